"""The report of a check, from results that are written here."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.features.check.findings import DryRunResult, FoundError
from nbaccel.features.check.report import CheckReport
from nbaccel.launching.tasks.cell_code import CellSource

PLAN: Any = SimpleNamespace(
    options=SimpleNamespace(names_back=None, limit=None), devices=SimpleNamespace(gpus=(), num_processes=1)
)
SOURCE = CellSource("first = 1\nsecond = 2\nthird = 3", "Cell In[5]")


def test_losses_of_a_rank_are_no_wrong_result() -> None:
    seen = [{"seen": {"losses": (str(rank), f"[{rank}]"), "score": (str(rank), f"0.{rank}")}} for rank in range(2)]
    found = DryRunResult([[], []], seen, None, 1.0, 0.1, lambda path: 10**9, trained={"losses"})
    options = SimpleNamespace(names_back=("losses", "score"), limit=None)
    plan: Any = SimpleNamespace(options=options, devices=PLAN.devices)
    said = str(CheckReport.of(found, SOURCE, plan)).splitlines()
    assert said[:2] == [
        "red: score depends on the rank (0.0 in rank 0, 0.1 in rank 1), and --out brings that of rank 0: gather what "
        "it is computed from first, predictions and labels by accelerator.gather_for_metrics",
        "yellow: losses depends on the rank ([0] in rank 0, [1] in rank 1), and --out brings that of rank 0, of its "
        "part of the samples",
    ]


def lines(error: FoundError | None, *records: dict[str, Any]) -> list[str]:
    found = DryRunResult([records], [{}], error, 1.0, 0.1, lambda path: 10**9)
    return str(CheckReport.of(found, SOURCE, PLAN)).splitlines()


UNRUN = {"kind": "not_run", "file": "Cell In[5]", "line": 1, "why": "it starts a program (touch x)"}


def test_lines_that_were_not_run_are_yellow() -> None:
    first, second, _ = lines(None, UNRUN, UNRUN, {**UNRUN, "file": "/home/me/mine.py", "why": "it removes /x"})
    assert first == "yellow: line 1 was not run, since a check cannot undo it: it starts a program (touch x)"
    assert second == "yellow: /home/me/mine.py, line 1 was not run, since a check cannot undo it: it removes /x"


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (FoundError("FileNotFoundError: x", "rank 0", "Cell In[5]", 2), "yellow"),
        (FoundError("NameError: name 'x' is not defined", "rank 0", "Cell In[5]", 2), "red"),
        (FoundError("RuntimeError: CUDA out of memory", "rank 0", "Cell In[5]", 2, is_memory=True), "red"),
    ],
)
def test_an_error_behind_a_line_that_was_not_run_is_yellow(error: FoundError, level: str) -> None:
    said = lines(error, UNRUN)
    assert "yellow: line 1 was not run, since a check cannot undo it: it starts a program (touch x)" in said
    (found,) = [line for line in said if error.text in line]
    assert found.startswith(f"{level}: line 2, rank 0: ")
    assert ("; line 1 was not run in this check, so this line, and what" in found) == (level == "yellow")
    assert next(line for line in lines(error) if error.text in line).startswith("red: ")


def test_a_write_to_a_file_that_can_only_be_read_is_yellow() -> None:
    (found, _) = lines(FoundError("OSError: [Errno 9] Bad file descriptor", "rank 0", "Cell In[5]", 2))
    assert found.startswith(
        "yellow: line 2, rank 0: OSError: [Errno 9] Bad file descriptor; a file that the notebook has open, and that "
        "is too large for a copy, can only be read in a check"
    )


@pytest.mark.parametrize(
    ("text", "room_bytes", "level"),
    [
        ("OSError: [Errno 28] No space left on device: 'x.bin'", 10**8, "yellow"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] file write failed", 10**8, "yellow"),
        ("OSError: [Errno 28] No space left on device: 'x.bin'", 10**9, "red"),  # the disk itself is full
        ("RuntimeError: unable to write to file </torch_1>: No space left on device (28)", 10**8, "red"),  # /dev/shm
    ],
)
def test_a_full_disk_of_temporary_files_is_yellow(text: str, room_bytes: int, level: str) -> None:
    error = FoundError(text, "rank 0", "Cell In[5]", 2)
    free = {tempfile.gettempdir(): room_bytes}
    found = DryRunResult([[]], [{}], error, 1.0, 0.1, lambda path: free.get(path, 10**9))
    first = str(CheckReport.of(found, SOURCE, PLAN)).splitlines()[0]
    assert first.startswith(f"{level}: line 2, rank 0: {text}")
    assert ("let TMPDIR be" in first) == (level == "yellow")


def test_an_error_below_the_cell_has_both_lines() -> None:
    (first,) = lines(FoundError("ValueError: no", "rank 1", "Cell In[5]", 3, inner="Cell In[4], line 12"))
    assert first == "red: line 3 (Cell In[4], line 12), rank 1: ValueError: no"


LEFT = {"kind": "loop", "id": 2, "outer": 1, "outer_round": 1, "rounds": 2, "end": "cut", "is_cut_by_pass": False}
WHOLE = {**LEFT, "end": "exhausted"}
AROUND = {**LEFT, "id": 1, "outer": 0, "outer_round": 0, "rounds": 1, "end": "error"}


@pytest.mark.parametrize(
    ("records", "level"),
    [
        ([LEFT], "yellow"),
        ([WHOLE], "red"),
        ([{**WHOLE, "is_cut_by_pass": True}], "yellow"),
        ([LEFT, AROUND], "yellow"),
        ([LEFT, {**AROUND, "rounds": 2}], "red"),
        ([AROUND], "red"),
    ],
    ids=["behind", "behind a whole one", "behind a pass", "in the loop around", "in its next round", "inside"],
)
def test_an_index_beyond_the_end_is_yellow_behind_a_loop_that_ended_early(
    records: list[dict[str, Any]], level: str
) -> None:
    error = FoundError("IndexError: list index out of range", "all 2 ranks", "Cell In[5]", 3, is_users=True)
    assert lines(error, *records)[0].startswith(f"{level}: line 3, all 2 ranks: IndexError: list index out of range")
    assert lines(replace(error, is_users=False), *records)[0].startswith("red: ")
    assert lines(replace(error, text="KeyError: 49"), *records)[0].startswith(f"{level}: line 3")
    assert lines(replace(error, text="KeyError: 'loss'"), *records)[0].startswith("red: ")


def test_a_score_of_few_batches_may_lack_a_class() -> None:
    text = "ValueError: Number of classes, 4, does not match size of target_names, 10."
    error = FoundError(text, "rank 0", "Cell In[5]", 3, raised_in="/lib/sklearn/metrics/_classification.py")
    cut = {"kind": "cut", "place": "f:3", "number": 0, "samples": 3, "last_samples": 1, "remainder": -1}
    assert lines(error, cut)[0].startswith("yellow: line 3, rank 0: ValueError: Number of classes, 4")
    assert lines(error)[0].startswith("red: ")
    assert lines(replace(error, raised_in="/lib/sklearn/svm.py"), cut)[0].startswith("red: ")
    assert lines(replace(error, text="ValueError: inconsistent numbers of samples"), cut)[0].startswith("red: ")


def test_an_assertion_after_a_short_training_is_yellow_and_any_other_is_red() -> None:
    error = FoundError("AssertionError: too bad", "all 2 ranks", "Cell In[5]", 3, is_users=True)
    (first,) = lines(error, {"kind": "loop"})
    assert first.startswith("yellow: line 3, all 2 ranks: AssertionError: too bad; after the few rounds of a check")
    assert lines(error) == ["red: line 3, all 2 ranks: AssertionError: too bad"]
    assert lines(replace(error, is_users=False), {"kind": "loop"}) == [
        "red: line 3, all 2 ranks: AssertionError: too bad"
    ]
