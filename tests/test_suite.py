"""``make unit`` forgives a test that fails once, and says so; it forgives nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments import REPOSITORY
from suite import HANDFUL, may_be_chance, numbers_differ

UNSTEADY = """
from pathlib import Path
def test_fails_the_first_time():
    seen = Path({mark!r})
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""

ROUNDED = UNSTEADY.replace("assert was_there", "assert was_there, 'torch.equal(ours, theirs)'")


def unit(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, str(REPOSITORY / "tests" / "suite.py"), "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # installed plugins take seconds to import
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
def test_a_test_that_fails_once_is_named_and_the_run_passes(tmp_path: Path) -> None:
    mark = str(tmp_path / "seen")
    well = f"import sys\ndef test_well(): assert sys.path[:2].count({str(tmp_path)!r})"  # as under `python -m pytest`
    done = unit(tmp_path, test_chance=UNSTEADY.format(mark=mark), test_well=well)
    assert done.returncode == 0, done.stdout
    assert "1 failed, 1 passed" in done.stdout  # the first try is not hidden
    assert "UNSTEADY: test_chance.py::test_fails_the_first_time failed, and passed" in done.stdout
    assert re.search(
        r"spent for:\n(?: +\d+\.\d min +1 tests  test_(?:chance|well)\.py\n)+ +0\.0 min +0 tests  elsewhere",
        done.stdout,
    )


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    mark = str(tmp_path / "seen")
    done = unit(tmp_path, test_chance=UNSTEADY.format(mark=mark), test_wrong="def test_wrong(): assert 1 == 2")
    assert done.returncode == 1
    assert "once more, in a fresh process: 2 failed" in done.stdout
    assert "UNSTEADY" not in done.stdout


@pytest.mark.slow
def test_a_file_that_cannot_be_collected_fails_the_run_also_beside_a_test_that_fails_once(tmp_path: Path) -> None:
    chance = UNSTEADY.format(mark=str(tmp_path / "seen"))
    done = unit(tmp_path, test_chance=chance, test_moved="from pathlib import no_such_name\ndef test_moved(): pass")
    assert done.returncode == 1, done.stdout
    assert "ERROR test_moved.py" in done.stdout


@pytest.mark.slow
def test_numbers_that_differ_once_fail_the_run_though_they_agree_in_the_second_try(tmp_path: Path) -> None:
    done = unit(tmp_path, test_chance=ROUNDED.format(mark=str(tmp_path / "seen")))
    assert done.returncode == 1, done.stdout
    assert "NUMBERS DIFFER: test_chance.py::test_fails_the_first_time compares what was computed" in done.stdout


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (">   assert torch.equal(ours, theirs)\nE   assert False", True),
        (">   run_ranks(2, training)\nE   RanksFailed: rank 1 of 2: AssertionError: Tensor-likes are not close!", True),
        (">   run_ranks(2, training)\nE       torch.testing.assert_close(mine, whole)", True),
        (">   assert found.losses == [0.5, 0.25]\nE   assert [0.5] == [0.5, 0.25]", True),
        ("    assert torch.equal(ours, theirs)\n>   assert 'done' in cell.stdout\nE   AssertionError", False),
        (">   kernel.do('assert torch.equal(a, b)')\nE   AssertionError: no reply within 60 s", False),
        (">   assert torch.equal(ours, run.value)\nE   Failed: Timeout (>180.0s) from pytest-timeout.", False),
    ],
)
def test_a_failed_comparison_of_numbers_is_told_from_what_came_too_late(failure: str, expected: bool) -> None:
    assert numbers_differ(failure) is expected


@pytest.mark.parametrize(
    ("code", "failures"),
    [
        (pytest.ExitCode.OK, 0),
        (pytest.ExitCode.TESTS_FAILED, HANDFUL + 1),
        (pytest.ExitCode.TESTS_FAILED, 0),  # asked for by a plugin, or --maxfail
        (pytest.ExitCode.INTERRUPTED, 1),  # by hand, or a file that cannot be collected
        (pytest.ExitCode.INTERNAL_ERROR, 1),
        (pytest.ExitCode.USAGE_ERROR, 0),
        (pytest.ExitCode.NO_TESTS_COLLECTED, 0),
    ],
)
def test_what_is_no_chance_gets_no_second_try(code: pytest.ExitCode, failures: int) -> None:
    assert not may_be_chance(code, failures)
