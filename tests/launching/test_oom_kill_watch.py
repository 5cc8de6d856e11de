"""Why a rank was killed: read off the control group's count, or called a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel.base.hardware import out_of_memory_kills
from nbaccel.launching.attempts import OomKillWatch

GROUPS = {
    "version 2": ("0::/notebook\n", "sys/fs/cgroup/notebook/memory.events"),
    "version 1": ("4:memory:/notebook\n", "sys/fs/cgroup/memory/notebook/memory.oom_control"),
    "container": ("0::/host/path/that/is/not/here\n", "sys/fs/cgroup/memory.events"),
}


@pytest.fixture(params=GROUPS)
def counter(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file system whose control group counts 3 kills; the file that counts."""
    group, name = GROUPS[request.param]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("low 0\noom 5\noom_kill 3\n")
    return file


def test_c27_a_kill_that_the_control_group_counted_is_known(tmp_path: Path, counter: Path) -> None:
    host = OomKillWatch(tmp_path)
    counter.write_text("low 0\noom 6\noom_kill 4\n")
    assert host.kills == 1
    assert "the machine ran out of memory (the control group's oom_kill count rose by 1, from 3;" in host.explain_kill()
    assert "GB were available when the run began" in host.explain_kill()


def test_c27_a_kill_that_was_not_counted_is_a_guess(tmp_path: Path, counter: Path) -> None:
    host = OomKillWatch(tmp_path)
    assert host.kills == 0
    assert "if you did not do that yourself, a guess is host memory, though the control" in host.explain_kill()


def test_c27_where_nothing_is_counted_that_is_said(tmp_path: Path) -> None:
    assert out_of_memory_kills(tmp_path) is None
    assert OomKillWatch(tmp_path).explain_kill().startswith("probably for host memory, but that is a guess")
