"""Who is killed first: loader workers, then ranks, and the kernel as it always was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbaccel.launching.api import launch

pytestmark = pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="not Linux")


def score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


class Scores:
    """A dataset whose sample is the score of the process that reads it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return score()

    def __iter__(self) -> Iterator[int]:
        return iter([score()] * 2)


def scores() -> tuple[int, list[int]]:
    from torch.utils.data import DataLoader

    data: Any = Scores()
    return score(), [int(found) for batch in DataLoader(data, 1, num_workers=1) for found in batch]


def test_c27_ranks_go_before_the_kernel_and_loader_workers_before_ranks(start_method: str) -> None:
    before = score()
    assert launch(scores, 1, start_method=start_method).value == (900, [1000, 1000])
    assert score() == before


def test_a_score_that_is_higher_already_stays(tmp_path: Path) -> None:
    from nbaccel.launching.rank.process_setup import raise_oom_score

    file = tmp_path / "oom_score_adj"
    file.write_text("950\n")
    pid = os.fork()
    if not pid:  # what it registers for forks shall not stay with the tests
        raise_oom_score(str(file))
        os._exit(0)
    os.waitpid(pid, 0)
    assert file.read_text() == "950\n"
