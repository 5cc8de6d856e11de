"""`nbaccel.map` from a script: answers, deaths, stops, bad input, in the background; under fork and zygote."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbaccel
from nbaccel.errors import CannotContinue, CannotSave, CannotSend, LaunchRefused, NestedLaunch, RankDied, RanksFailed
from nbaccel.features.background.background_run import BackgroundRun
from nbaccel.features.map import Answers, Failed, map_items
from nbaccel.launching.api import launch
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan

AT_MOST_S = 60.0


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch, start_method: str) -> dict[str, Any]:
    """Arguments for two ranks on the CPU, which start by `start_method`."""
    start_by(monkeypatch, start_method)
    return {"num_processes": 2, "cpu": True}


def start_by(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    planned = map_items.planned

    def chosen(options: Any, *rest: Any) -> LaunchPlan:
        return planned(replace(options, start=method), *rest)

    monkeypatch.setattr(map_items, "planned", chosen)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def place_of(accelerator: Any) -> tuple[int, int, str]:
    return accelerator.process_index, accelerator.num_processes, accelerator.device.type


def with_place(place: tuple[int, int, str], items: list[int]) -> list[Any]:
    time.sleep(0.01)
    return [[item, *place] for item in items]


class BothWork:
    """Returns items with the rank's place; the first call of each of two ranks waits for that of the other."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, place: tuple[int, int, str], items: list[int]) -> list[Any]:
        Path(self.folder, str(place[0])).touch()
        while len(os.listdir(self.folder)) < 2:  # ended by the test's own timeout
            time.sleep(0.01)
        return with_place(place, items)


def test_answers_come_in_the_order_of_the_items(
    two_ranks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").mkdir()
    out, function = tmp_path / "answers" / "all.jsonl", BothWork(str(tmp_path / "ranks"))
    answers = nbaccel.map(function, range(100), setup=place_of, out=out, batch_size=5, **two_ranks)
    assert [answer[0] for answer in answers] == list(range(100))
    assert {tuple(answer[1:]) for answer in answers} == {(0, 2, "cpu"), (1, 2, "cpu")}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(100))
    assert sorted(path.name for path in out.parent.iterdir()) == ["all.jsonl", "all.jsonl.manifest.json"]
    assert capsys.readouterr().out.startswith("100 items in ")


def test_without_a_file_answers_are_in_memory_and_nothing_is_left(
    two_ranks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert nbaccel.map(double, range(20), **two_ranks) == [2 * item for item in range(20)]
    assert not list(tmp_path.glob("nbaccel-map-*"))


def test_a_finished_map_starts_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.jsonl"
    first = nbaccel.map(double, range(20), out=out, cpu=True)
    capsys.readouterr()
    assert nbaccel.map(double, range(20), out=out, cpu=True) == first
    assert capsys.readouterr().out == f"20 items are in {out} already: no rank was started\n"


def test_a_map_is_the_last_run(tmp_path: Path) -> None:
    nbaccel.map(double, range(20), cpu=True)
    run = nbaccel.last_run
    assert run is not None
    assert run.facts.title == "map(double, 20 items)"
    assert run.text.startswith("map(double, 20 items): 20 items in ")


class Kills:
    """Kills its process at the first call that has item 7, as often as it is told to."""

    def __init__(self, folder: str, times: int) -> None:
        self.folder = folder
        self.times = times

    def __call__(self, items: list[int]) -> list[int]:
        deaths = len(os.listdir(self.folder))
        if 7 in items and deaths < self.times:
            Path(self.folder, str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return double(items)


def test_a_rank_that_is_killed_loses_nothing(
    two_ranks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deaths").mkdir()
    answers = nbaccel.map(
        Kills(str(tmp_path / "deaths"), 1), range(100), out=tmp_path / "a.jsonl", batch_size=5, **two_ranks
    )
    assert answers == [2 * item for item in range(100)]
    assert "was killed by SIGKILL; started again, its items go to the others meanwhile" in capsys.readouterr().err


def test_an_item_that_kills_each_process_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], launcher: Launcher
) -> None:
    (tmp_path / "deaths").mkdir()
    kills = Kills(str(tmp_path / "deaths"), 99)
    answers = nbaccel.map(kills, range(50), out=tmp_path / "a.jsonl", batch_size=5, num_processes=2, cpu=True)
    assert isinstance(answers[7], Failed)
    assert [answer for number, answer in enumerate(answers) if number != 7] == [
        2 * item for item in range(50) if item != 7
    ]
    assert len(answers.failed) == 1
    assert ", 1 failed (answers.failed)" in capsys.readouterr().out
    assert repr(nbaccel.runs[-1:]).endswith("done, 1 failed")


def load_on_rank_0_alone(accelerator: Any) -> None:
    if accelerator.process_index == 1:
        raise ValueError("no such weights")
    time.sleep(AT_MOST_S)


def second(state: None, items: list[int]) -> list[int]:
    return items


def test_a_setup_that_fails_on_one_rank_names_the_rank_and_the_line(
    two_ranks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="no such weights") as caught:
        nbaccel.map(second, range(10), setup=load_on_rank_0_alone, out=tmp_path / "a.jsonl", **two_ranks)
    assert "rank 1 of 2" in caught.value.__notes__[0]
    assert "load_on_rank_0_alone" in str(caught.value.__cause__)
    assert capsys.readouterr().out.endswith(", ValueError: no such weights: no item is done\n")
    assert not list(tmp_path.iterdir())  # mended, it may be called with the same `out`


def fails(items: list[int]) -> list[int]:
    raise RuntimeError("weights on another device")


def test_a_function_that_fails_with_everything_is_the_error_of_the_call(
    two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="weights on another device"):
        nbaccel.map(fails, range(100), out=tmp_path / "a.jsonl", **two_ranks)


def rarely(items: list[int]) -> list[int]:
    if 3 in items:
        raise ValueError("not a question")
    return items


def test_an_item_that_fails_is_recorded_and_tried_again_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"out": tmp_path / "a.jsonl", "cpu": True}
    answers = nbaccel.map(rarely, range(10), **call)
    assert answers[3] == Failed(3, "ValueError: not a question")
    capsys.readouterr()
    nbaccel.map(rarely, range(10), **call)
    assert "already, 1 failed (answers.failed): no rank was started" in capsys.readouterr().out
    assert len(nbaccel.map(rarely, range(10), retry_failed=True, **call).failed) == 1
    assert ", 9 of them before, 1 failed" in capsys.readouterr().out


def slowly(items: list[int]) -> list[int]:
    time.sleep(0.05 * len(items))
    return double(items)


def test_a_time_limit_ends_softly_and_the_same_line_goes_on(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    call = {"out": tmp_path / "a.jsonl", "batch_size": 2, **two_ranks}
    with pytest.raises(TimeoutError) as caught:
        nbaccel.map(slowly, range(400), time_limit_s=3, **call)
    said = str(caught.value)
    assert said.startswith("stopped at its time limit, 3 s: ")
    assert said.endswith("of 400 items are in a.jsonl.parts; the same line goes on")
    assert nbaccel.map(slowly, range(400), **{**call, "num_processes": 8}) == [2 * item for item in range(400)]


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def interrupt_when_something_is_done() -> None:
        while not any(path.stat().st_size for path in tmp_path.glob("a.jsonl.parts/records/*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_something_is_done)
    thread.start()
    with pytest.raises(
        KeyboardInterrupt, match=r"stopped by an interrupt: .* are in a.jsonl.parts; the same line goes"
    ):
        nbaccel.map(slowly, range(2000), out=out, batch_size=2, num_processes=2, cpu=True)
    thread.join()


class Marks:
    """Returns its items after a while, and leaves a file where a call has begun, and one where it has ended."""

    def __init__(self, folder: Path, seconds: float = 0.6) -> None:
        self.folder = folder
        self.seconds = seconds

    def __call__(self, items: list[int]) -> list[int]:
        (self.folder / f"began-{items[0]}").touch()
        time.sleep(self.seconds)
        (self.folder / f"ended-{items[0]}").touch()
        return items

    def calls(self, word: str) -> set[int]:
        return {int(path.name.partition("-")[2]) for path in self.folder.glob(f"{word}-*")}


def when(is_time: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something as soon as it is time, in another thread."""

    def wait() -> None:
        while not is_time():  # ended by the test's own timeout
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_lets_each_rank_finish_its_call(
    two_ranks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = Marks(tmp_path, seconds=1.2)
    thread = when(lambda: len(marks.calls("began")) > 3, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        nbaccel.map(marks, range(2000), out=tmp_path / "a.jsonl", batch_size=2, **two_ranks)
    thread.join()
    assert marks.calls("began") == marks.calls("ended")
    answered = 2 * len(marks.calls("ended"))
    assert f": {answered} of 2,000 items are in a.jsonl.parts; the same line goes on" in str(caught.value)
    assert "finishing the calls under way, press again to stop now" in capsys.readouterr().err


def test_a_time_limit_lets_each_rank_finish_its_call(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    with pytest.raises(TimeoutError, match=r"stopped at its time limit, 2 s: "):
        nbaccel.map(
            marks, range(2000), out=tmp_path / "a.jsonl", batch_size=2, num_processes=2, cpu=True, time_limit_s=2
        )
    assert marks.calls("began") == marks.calls("ended") != set()


def test_a_second_interrupt_does_not_wait_for_the_call(tmp_path: Path) -> None:
    marks = Marks(tmp_path, seconds=AT_MOST_S)

    def press_twice() -> None:
        interrupt()
        time.sleep(0.3)  # two signals at once are one
        interrupt()

    thread = when(lambda: bool(marks.calls("began")), press_twice)
    with pytest.raises(KeyboardInterrupt, match="stopped by an interrupt: no item is done"):
        nbaccel.map(marks, range(2000), out=tmp_path / "a.jsonl", num_processes=2, cpu=True)
    thread.join()
    assert not marks.calls("ended")


@pytest.mark.parametrize("limit_s", [None, 1.5])
def test_a_stop_while_the_last_items_finish_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit_s: float | None
) -> None:
    marks = Marks(tmp_path, seconds=2.5)
    thread = when(lambda: len(marks.calls("began")) == 2, interrupt if limit_s is None else lambda: None)
    call: dict[str, Any] = {"out": tmp_path / "a.jsonl", "batch_size": 1, "num_processes": 2, "cpu": True}
    assert nbaccel.map(marks, range(2), time_limit_s=limit_s, **call) == [0, 1]
    thread.join()
    assert capsys.readouterr().out.startswith("2 items in ")


def test_an_interrupt_in_this_process_lets_it_finish_its_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_by(monkeypatch, "inline")
    marks = Marks(tmp_path)
    thread = when(lambda: len(marks.calls("began")) > 1, interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"stopped by an interrupt: \d+ of 2,000 items are in a.jsonl.parts"):
        nbaccel.map(marks, range(2000), out=tmp_path / "a.jsonl", batch_size=2, cpu=True)
    thread.join()
    assert marks.calls("began") == marks.calls("ended")


def test_a_death_after_death_without_an_item_ends_the_map(tmp_path: Path) -> None:
    def dies(accelerator: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied, match="started again 3 times, and finished no item in between"):
        nbaccel.map(second, range(10), setup=dies, out=tmp_path / "a.jsonl", cpu=True)


def test_a_stream_is_read_by_forked_ranks_and_refused_by_a_clean_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream() -> Iterator[int]:
        yield from range(60)

    assert nbaccel.map(double, stream(), num_processes=2, cpu=True) == [2 * item for item in range(60)]
    start_by(monkeypatch, "zygote")
    with pytest.raises(CannotSend, match=r"items is a stream, which only forked ranks can read.*pass list\(items\)"):
        nbaccel.map(double, stream(), cpu=True, out=tmp_path / "a.jsonl")


def test_a_function_that_cannot_be_sent_is_refused_by_a_clean_process(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locked(items: list[int]) -> list[int]:
        with lock:
            return items

    assert nbaccel.map(locked, range(3), cpu=True) == [0, 1, 2]
    start_by(monkeypatch, "zygote")
    with pytest.raises(CannotSend, match=r"map cannot send function to ranks .*a lock cannot") as caught:
        nbaccel.map(locked, range(3), cpu=True)
    assert "\n" not in str(caught.value)


def test_in_this_process_where_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_by(monkeypatch, "inline")
    assert nbaccel.map(with_place, range(10), setup=place_of, cpu=True)[9] == [9, 0, 1, "cpu"]
    assert capsys.readouterr().out.startswith("10 items in ")
    with pytest.raises(LaunchRefused, match="time_limit_s can stop ranks only"):
        nbaccel.map(slowly, range(10), cpu=True, time_limit_s=5)


def test_an_out_of_other_items_names_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    nbaccel.map(double, range(10), out=out, cpu=True)
    with pytest.raises(CannotContinue, match="overwrite=True"):
        nbaccel.map(double, range(11), out=out, cpu=True)
    with pytest.raises(CannotContinue, match="overwrite=True"):
        nbaccel.map(double, range(10), out=out, cpu=True, key="other weights")
    assert len(nbaccel.map(double, range(11), out=out, cpu=True, overwrite=True)) == 11


def test_overwrite_that_stays_in_the_line_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"out": tmp_path / "a.jsonl", "cpu": True, "overwrite": True}
    nbaccel.map(double, range(10), **call)
    capsys.readouterr()
    assert nbaccel.map(double, range(10), **call) == double(list(range(10)))
    said = capsys.readouterr().out
    assert "10 items are in " in said
    assert said.endswith("only answers to something else: another key=, or no file, does it again\n")
    with pytest.raises(RuntimeError):
        nbaccel.map(fails, range(10), **call)
    assert nbaccel.map(double, range(10), **call) == double(list(range(10)))
    assert "already: no rank was started" in capsys.readouterr().out


def test_another_generator_has_not_the_answers_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    nbaccel.map(double, (number for number in range(30)), out=out, cpu=True)
    assert len(nbaccel.map(double, (number for number in range(30)), out=out, cpu=True)) == 30
    with pytest.raises(CannotContinue, match=r"a.jsonl has answers to other items \(.*\): overwrite=True"):
        nbaccel.map(double, (number for number in range(90, 120)), out=out, cpu=True)
    answers = nbaccel.map(double, (number for number in range(90, 120)), out=out, cpu=True, overwrite=True)
    assert answers == [2 * number for number in range(90, 120)]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nbaccel.map("double", [1]), TypeError, "the first argument of map is a function, got str"),
        (lambda: nbaccel.map(double, "text"), TypeError, "items is a list of items, got a str"),
        (lambda: nbaccel.map(double, {1: 2}), TypeError, "items is a list of items, got a dict"),
        (lambda: nbaccel.map(double, [1], setup=3), TypeError, "setup is a function that gets an accelerator, got int"),
        (lambda: nbaccel.map(double, [1], tries=0), ValueError, "tries must be a whole number from 1, got 0"),
        (lambda: nbaccel.map(double, [1], time_limit_s=-1), ValueError, "a time is above 0"),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_in_a_rank_it_is_accelerator_map() -> None:
    with pytest.raises(NestedLaunch, match=r"call accelerator\.map\(function, items, \.\.\.\) here, in all ranks"):
        launch(lambda: nbaccel.map(double, [1]), 2, cpu=True)


def test_ranks_that_are_killed_leave_no_answers_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # ranks that are no forks ask the variable, too
    with pytest.raises((RankDied, RanksFailed)):
        launch(map_and_die, 2, cpu=True, start_method=start_method)
    assert not list(tmp_path.glob("**/nbaccel-map-*"))


def map_and_die() -> None:
    accelerator = nbaccel.Accelerator()

    def answer(items: list[int]) -> list[int]:
        if accelerator.process_index:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(AT_MOST_S)
        return items

    accelerator.map(answer, range(10))


def test_a_full_disk_is_said_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbaccel.features.map.records import RecordFile

    append = RecordFile.append
    written: list[int] = []

    def append_until_full(self: RecordFile, records: Any) -> None:
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(1)
        append(self, records)

    monkeypatch.setattr(RecordFile, "append", append_until_full)
    call = {"out": tmp_path / "a.jsonl", "batch_size": 2, "cpu": True}
    with pytest.raises(CannotSave, match=r"No space left on device.*make room"):
        nbaccel.map(double, range(100), **call)
    monkeypatch.undo()
    assert nbaccel.map(double, range(100), **call) == [2 * item for item in range(100)]


# --- in the background ---------------------------------------------------------------------------------------------


def wait_for(is_time: Callable[[], bool]) -> None:
    while not is_time():  # ended by the test's own timeout
        time.sleep(0.01)


def test_in_the_background_the_answers_are_there_for_whoever_waits(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    marks = Marks(tmp_path, seconds=0.1)
    answers = nbaccel.map(marks, range(40), out=tmp_path / "a.jsonl", batch_size=2, background=True, **two_ranks)
    assert isinstance(answers, Answers)
    assert not answers.is_over  # type: ignore[attr-defined]
    going = r"map\(Marks, 40 items\) has been running in the background since [\d:]+ \(\d+ of 40 items"
    assert re.match(going, str(answers))
    assert repr(answers) == f"<{answers}>" or answers.is_over  # type: ignore[attr-defined]
    assert len(answers) == 40
    assert answers.is_over  # type: ignore[attr-defined]
    assert list(answers) == answers == list(range(40))
    assert (answers[7], answers[-2:], answers.failed, answers.path) == (7, [38, 39], [], tmp_path / "a.jsonl")
    assert repr(answers).startswith("[0, 1, 2, … 37 more] in ")
    assert str(answers) == "map(Marks, 40 items) has ended in the background (done)"
    assert pickle.loads(pickle.dumps(answers)) == answers


def test_answers_in_memory_come_from_the_background_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert nbaccel.map(double, range(20), cpu=True, background=True) == double(list(range(20)))
    assert not list(tmp_path.glob("nbaccel-map-*"))


def test_another_run_is_refused_meanwhile_and_drops_nothing(tmp_path: Path) -> None:
    done = nbaccel.map(double, range(3), out=tmp_path / "done.jsonl", cpu=True)
    marks = Marks(tmp_path, seconds=0.3)
    here = {"out": tmp_path / "a.jsonl", "batch_size": 1, "cpu": True}
    answers = nbaccel.map(marks, range(10), background=True, **here)  # type: ignore[arg-type]
    manifest = (tmp_path / "a.jsonl.parts" / "manifest.json").read_text()
    refused = r"map\(Marks, 10 items\) has been running in the background since .*: wait\(\) for it, or stop\(\) it\."
    for call in ({}, {"background": True}, {"out": tmp_path / "done.jsonl", "overwrite": True}):
        with pytest.raises(LaunchRefused, match=refused):
            nbaccel.map(double, range(5), cpu=True, **call)  # type: ignore[arg-type]
    with pytest.raises(LaunchRefused, match=refused):
        nbaccel.map(double, range(10), retry_failed=True, **here)  # type: ignore[arg-type]
    assert (tmp_path / "a.jsonl.parts" / "manifest.json").read_text() == manifest
    assert nbaccel.map(double, range(3), out=tmp_path / "done.jsonl", cpu=True) == done
    assert answers == list(range(10))


def test_stop_ends_a_map_in_the_background_between_calls_and_the_same_line_goes_on(tmp_path: Path) -> None:
    marks = Marks(tmp_path, seconds=0.3)
    call: dict[str, Any] = {"out": tmp_path / "a.jsonl", "batch_size": 2, "num_processes": 2, "cpu": True}
    answers: Any = nbaccel.map(marks, range(60), background=True, **call)
    wait_for(lambda: len(marks.calls("ended")) > 2)
    answers.stop()
    with pytest.raises(KeyboardInterrupt, match=r"stopped by an interrupt: \d+ of 60 items are in a.jsonl.parts"):
        answers.wait()
    with pytest.raises(KeyboardInterrupt):
        len(answers)
    assert marks.calls("began") == marks.calls("ended")
    assert repr(answers) == f"<{answers}>" == "<map(Marks, 60 items) has ended in the background (stopped)>"
    answers.stop()  # it is over: nothing happens
    assert nbaccel.map(marks, range(60), **call) == list(range(60))


def is_waited_for() -> bool:
    """Return whether the main thread is inside the wait for a map; an interrupt before that would end the tests."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        if frame.f_back.f_code is BackgroundRun.wait.__code__:
            return True
        frame = frame.f_back
    return False


def test_an_interrupt_of_the_waiting_leaves_the_map_alone(tmp_path: Path) -> None:
    marks = Marks(tmp_path, seconds=0.3)
    answers: Any = nbaccel.map(marks, range(8), batch_size=2, cpu=True, background=True)
    thread = when(lambda: is_waited_for() or answers.is_over, lambda: None if answers.is_over else interrupt())
    said = r"the waiting was interrupted; map\(Marks, 8 items\) has been running .*wait\(\) waits again, stop\(\) ends"
    with pytest.raises(KeyboardInterrupt, match=said):
        len(answers)
    thread.join()
    assert list(answers) == list(range(8))


def test_the_error_of_a_map_in_the_background_comes_where_its_answers_are_used(tmp_path: Path) -> None:
    answers: Any = nbaccel.map(fails, range(10), out=tmp_path / "a.jsonl", cpu=True, background=True)
    wait_for(lambda: answers.is_over)
    for use in (answers.wait, lambda: len(answers), lambda: answers[0], lambda: list(answers), lambda: answers.failed):
        with pytest.raises(RuntimeError, match="weights on another device"):
            use()
    assert repr(answers) == "<map(fails, 10 items) has ended in the background (failed)>"


def test_what_keeps_ranks_from_starting_is_raised_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_by(monkeypatch, "zygote")
    with pytest.raises(CannotSend, match="items is a stream"):
        nbaccel.map(double, iter(range(3)), cpu=True, out=tmp_path / "a.jsonl", background=True)
    assert nbaccel.map(double, [1], cpu=True, out=tmp_path / "a.jsonl") == [2]  # it is not open any more


def test_a_finished_map_needs_no_background(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call: dict[str, Any] = {"out": tmp_path / "a.jsonl", "cpu": True}
    nbaccel.map(double, range(3), **call)
    capsys.readouterr()
    answers: Any = nbaccel.map(double, range(3), background=True, **call)
    assert "already: no rank was started" in capsys.readouterr().out
    assert answers.is_over
    assert answers.wait() == answers == [0, 2, 4]
    assert "already: no rank was started" in str(answers)
    answers.stop()


def test_where_only_this_process_can_work_the_call_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_by(monkeypatch, "inline")
    answers: Any = nbaccel.map(double, range(3), cpu=True, background=True)
    said = "background=True: a run in the notebook's own process leaves no room for other cells, so this call waits"
    assert capsys.readouterr().out.startswith(said)
    assert answers.is_over
    assert answers == [0, 2, 4]


@pytest.mark.slow
def test_a_script_that_ends_takes_its_map_along(tmp_path: Path) -> None:
    code = f"""
import time
import nbaccel

def answer(items):
    time.sleep(0.1)
    return items

if __name__ == "__main__":
    answers = nbaccel.map(answer, range(9999), out={str(tmp_path / "a.jsonl")!r}, num_processes=2, cpu=True,
                          batch_size=1, background=True)
    import psutil
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=AT_MOST_S)
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 3
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
