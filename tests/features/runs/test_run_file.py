"""Runs that a file keeps beside the notebook: whole lines, also from two kernels at once, and what is damaged."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from display.runs import a_run
from features.runs.test_runs import a_finished, losses, remembered
from nbaccel.base.events import Checkpoint, Loss, Metric, Resumed
from nbaccel.display.summary import RunState
from nbaccel.features.runs.run_file import RunFile
from nbaccel.features.runs.runs import Runs
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.run import Run


def read(path: Path) -> list[Run]:
    runs, damaged = RunFile(str(path)).read()
    assert damaged == 0
    return runs


def test_a_run_is_read_as_it_was_kept(tmp_path: Path) -> None:
    run = a_finished(error=ValueError("11 classes"), value={"score": [0.5, None]})
    run.checkpoint, run.restarts = "saves/step_20", ["again with 8"]
    part = a_finished("fold 1", history=a_run(1, 3))
    part.config = {"lr": 0.1}
    run.runs = [part]
    file = RunFile(str(tmp_path / "runs.jsonl"))
    file.append(run)
    (back,) = read(tmp_path / "runs.jsonl")
    assert back.in_a_line() == run.in_a_line().replace(", 10.0 steps/s", "")
    assert (back.value, back.log_path, back.checkpoint) == ({"score": [0.5, None]}, run.log_path, "saves/step_20")
    assert (back.facts, back.ending, back.restarts) == (run.facts, run.ending, run.restarts)
    assert (back.origin.flags, back.origin.choices, back.origin.is_earlier) == (
        run.origin.flags,
        run.origin.choices,
        True,
    )
    assert back.history.steps == run.history.steps == 20
    assert back.history.memory == run.history.memory
    assert str(back.error) == "ValueError: 11 classes"
    for name, line in run.curves.items():
        assert back.curves[name].mean == pytest.approx(line.mean, rel=1e-6)
        assert back.history.phase.series[name].latest == pytest.approx(run.history.phase.series[name].latest, rel=1e-6)
    assert [(one.facts.title, one.config) for one in back.runs] == [("fold 1", {"lr": 0.1})]
    assert back.plot().png


def test_a_long_run_is_a_line_of_some_kilobytes(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    RunFile(str(path)).append(a_finished(history=a_run(2, 2_000)))
    assert path.stat().st_size < 40_000
    assert path.read_bytes().count(b"\n") == 1
    (back,) = read(path)
    assert back.history.steps == 2_000
    assert 50 < len(back.curves["loss"]) <= 200


def test_values_that_are_not_finite_survive_as_such(tmp_path: Path) -> None:
    history = losses(0, 3)
    history.feed(0, 1.0, Loss(math.nan, 3))
    history.feed(0, 1.0, Metric({"acc": math.inf}, 3))
    path = tmp_path / "runs.jsonl"
    RunFile(str(path)).append(a_finished(history=history))
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    (back,) = read(path)
    assert math.isnan(back.history.phase.series["loss"].latest)
    assert "not finite since step 3" in back.text


def test_a_new_kernel_lists_the_earlier_runs_first_and_marks_them(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.jsonl")
    first = remembered(a_finished(history=a_run(1, 3)))
    assert first.keep_in(path) == ""  # the runs so far are written, too
    history = losses(0, 30)
    history.feed(0, 2.0, Checkpoint(str(tmp_path / "step_20"), 20, 0.1))
    first.add(a_finished(history=history))
    second = remembered(a_finished("launched before the file was named"))
    assert second.keep_in(path) == ""
    goes_on = losses(20, 40)
    goes_on.feed(0, 0.0, Resumed(str(tmp_path / "step_20"), 20))
    second.add(a_finished(history=goes_on))
    assert [run.number for run in second] == [1, 2, 3, 4]
    assert [run.origin.is_earlier for run in second] == [True, True, False, False]
    assert second[-1].goes_on_from == 2
    assert repr(second).splitlines()[2].endswith("done, 30 steps, another kernel")
    assert second.keep_in(path) == ""  # read once only
    assert len(second) == 4
    assert len(read(tmp_path / "runs.jsonl")) == 4
    assert second.keep_in(None) == ""
    second.add(a_finished())
    assert len(read(tmp_path / "runs.jsonl")) == 4


def test_a_damaged_line_is_left_out_with_one_notice_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    file = RunFile(str(path))
    file.append(a_finished())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])  # a kill, or a full disk, while the second was written
    file.append(a_finished("after it"))
    with path.open("ab") as lines:
        lines.write(b'{"version": 1}\n[]\n\xff\n')
    runs = Runs()
    notice = runs.keep_in(str(path))
    assert notice == f"{path}: 4 damaged lines could not be read and are left out of nbaccel.runs"
    assert [run.facts.title for run in runs] == ["Cell In[5]", "after it"]


def append_many(path: str, name: str) -> None:
    file, run = RunFile(path), a_finished(name, history=a_run(1, 300))
    for _ in range(40):
        file.append(run)


def test_two_kernels_may_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=append_many, args=(str(path), name)) for name in ("one", "other")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(run.facts.title for run in read(path)) == ["one"] * 40 + ["other"] * 40


def test_runs_that_another_kernel_ends_meanwhile_come_when_they_are_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "runs.jsonl")
    mine, other = remembered(a_finished("mine")), Runs()
    mine.keep_in(path)
    other.keep_in(path)
    other.add(a_finished("theirs"))
    mine.add(a_finished("mine, after theirs"))
    assert [run.facts.title for run in mine] == ["mine", "mine, after theirs"]
    other.add(a_finished("theirs, too"))
    assert mine.keep_in(path) == ""
    titles = ["mine", "mine, after theirs", "theirs", "theirs, too"]
    assert [(run.number, run.facts.title) for run in mine] == list(enumerate(titles, 1))
    assert [run.origin.is_earlier for run in mine] == [False, False, True, True]
    assert mine.newest is mine[1]  # nbaccel.last_run
    assert mine.keep_in(path) == ""
    assert len(mine) == 4
    other.keep_in(path)
    assert [run.facts.title for run in other] == ["mine", "theirs", "theirs, too", "mine, after theirs"]


def test_an_unchanged_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    RunFile(str(path)).append(a_finished())
    runs = Runs()
    runs.keep_in(str(path))
    runs.add(a_finished())
    monkeypatch.setattr("builtins.open", lambda *args: pytest.fail("it was opened"))
    assert runs.keep_in(str(path)) == ""
    assert len(runs) == 2


def test_a_file_that_was_written_anew_brings_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for title in ("deleted later", "stays"):
        RunFile(str(path)).append(a_finished(title))
    runs = Runs()
    runs.keep_in(str(path))
    runs.add(a_finished("mine"))
    (tmp_path / "new").write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    os.replace(tmp_path / "new", path)
    RunFile(str(path)).append(a_finished("theirs"))
    assert runs.keep_in(str(path)) == ""
    assert [run.facts.title for run in runs] == ["deleted later", "stays", "mine", "theirs"]
    path.unlink()
    assert runs.keep_in(str(path)) == ""
    runs.add(a_finished("last"))
    assert runs.keep_in(str(path)) == ""
    assert [run.facts.title for run in runs][3:] == ["theirs", "last"]


def test_a_line_that_was_cut_short_is_one_notice_once_another_follows(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = remembered(a_finished("first"))
    runs.keep_in(str(path))
    with path.open("ab") as file:
        file.write(b'{"version": 1, "cell"')
    assert runs.keep_in(str(path)) == ""
    runs.add(a_finished("second"))
    assert "1 damaged line could not be read" in runs.keep_in(str(path))
    assert runs.keep_in(str(path)) == ""
    assert [run.facts.title for run in runs] == ["first", "second"]


def a_kernel(path: str, name: str, together: Barrier, told: SimpleQueue[tuple[str, list[str]]]) -> None:
    """Do ten runs, and look at all runs after each; at the end tell of all."""
    runs, run = Runs(), a_finished(name, history=a_run(1, 30))
    runs.keep_in(path)
    together.wait()
    numbers: dict[str, list[int]] = {}
    for at in range(10):
        runs.add(replace(run, values=[at]))
        runs.keep_in(path)
        for each in runs:
            numbers.setdefault(f"{each.facts.title} {each.value}", []).append(each.number)
    together.wait()
    runs.keep_in(path)
    assert all(len(set(each)) == 1 for each in numbers.values()), "a run has changed its number"
    told.put((name, [f"{each.facts.title} {each.value}" for each in runs]))


def test_two_kernels_with_one_file_see_all_runs_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    fork = multiprocessing.get_context("fork")
    together, told = fork.Barrier(2), fork.SimpleQueue()
    kernels = [fork.Process(target=a_kernel, args=(str(path), name, together, told)) for name in ("one", "other")]
    for kernel in kernels:
        kernel.start()
    for kernel in kernels:
        kernel.join()
        assert kernel.exitcode == 0
    everything = sorted(f"{name} {at}" for name in ("one", "other") for at in range(10))
    for _ in kernels:
        name, seen = told.get()
        assert sorted(seen) == everything, name
    assert sorted(f"{run.facts.title} {run.value}" for run in read(path)) == everything


def test_a_file_that_cannot_be_written_is_a_warning_and_the_run_is_there(tmp_path: Path) -> None:
    launcher = Launcher()
    runs = Runs(launcher.ended_runs)
    runs.keep_in(str(tmp_path / "folder" / "runs.jsonl"))
    with pytest.warns(UserWarning, match="this run was not kept in .*runs.jsonl: No such file or directory"):
        launcher.remember(a_finished(), None)
    assert launcher.last_run is runs[-1]
    os.mkdir(tmp_path / "folder")
    launcher.remember(a_finished(), None)
    assert len(read(tmp_path / "folder" / "runs.jsonl")) == 1


def test_the_latest_thousand_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run = a_finished(history=a_run(1, 2))
    run.state = RunState("done", "done in 1 s")
    RunFile(str(path)).append(run)
    path.write_bytes(path.read_bytes() * 1_005)
    assert len(read(path)) == 1_000
