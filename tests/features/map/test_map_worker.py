"""The worker of a map: what goes wrong stays with its items, and the run fails only where nothing would be right."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from features.map.forks import ended, fork, kill
from nbaccel import Accelerator
from nbaccel.base.events import CallEntered, CallsEnded, Event, ItemsDone, outlet
from nbaccel.errors import CannotContinue, CannotSave, RunStopped
from nbaccel.features.map import Answers, Failed, MapJob
from nbaccel.features.map.claim_log import LifeLock
from nbaccel.features.map.item_source import StreamedItems
from nbaccel.features.map.map_job import as_items
from nbaccel.features.map.map_worker import work
from nbaccel.features.map.records import RecordFile
from nbaccel.testing import run_ranks

TEXTS = ["a" * (number % 17 + 1) + str(number) for number in range(60)]


def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


async def ask(texts: list[str]) -> list[str]:
    return texts


class Table(list[str]):
    """One that is read by columns, as those of pandas are."""

    columns = ("text",)


def mapped(function: Any, items: Any = TEXTS, **options: Any) -> Answers:
    return Accelerator(cpu=True).map(function, items, **options)


def shouted(texts: list[str] = TEXTS) -> list[str]:
    return [text.upper() for text in texts]


class Recording:
    """A function that remembers the sizes of its calls, and fails as it is told."""

    def __init__(self, fails: Callable[[list[str]], BaseException | None] = lambda texts: None) -> None:
        self.calls: list[list[str]] = []
        self._fails = fails

    def __call__(self, texts: list[str]) -> list[str]:
        self.calls.append(texts)
        if (error := self._fails(texts)) is not None:
            raise error
        return shout(texts)


def test_answers_are_those_of_a_loop() -> None:
    assert mapped(shout) == shouted()


def test_the_longest_come_first_and_calls_become_larger() -> None:
    function = Recording()
    mapped(function)
    lengths = [len(text) for call in function.calls for text in call]
    assert lengths == sorted(lengths, reverse=True)
    assert len(function.calls[0]) == 1
    assert max(map(len, function.calls)) > 4


def test_a_call_has_no_more_items_than_asked_for() -> None:
    function = Recording()
    mapped(function, batch_size=4)
    assert max(map(len, function.calls)) == 4
    assert len(function.calls) == len(TEXTS) // 4 + (len(function.calls) - len(TEXTS) // 4)
    assert sum(map(len, function.calls)) == len(TEXTS)


def test_setup_is_called_once_with_the_accelerator() -> None:
    seen: list[Any] = []

    def load(accelerator: Accelerator) -> str:
        seen.append(accelerator.device)
        return "!"

    assert mapped(lambda mark, texts: [text + mark for text in texts], setup=load) == [text + "!" for text in TEXTS]
    assert seen == [torch.device("cpu")]


def test_a_call_that_runs_out_of_memory_is_halved_and_nothing_is_lost() -> None:
    function = Recording(lambda texts: torch.OutOfMemoryError("CUDA out of memory.") if padded(texts) > 60 else None)
    answers = mapped(function, batch_size=16)
    assert answers == shouted()
    assert answers.failed == []
    assert sum(padded(call) > 60 for call in function.calls) <= 6  # then it has learned


def padded(texts: list[str]) -> int:
    return len(texts) * max(map(len, texts))


def test_an_item_that_does_not_fit_alone_fails_alone() -> None:
    function = Recording(lambda texts: torch.OutOfMemoryError("out of memory") if TEXTS[7] in texts else None)
    answers = mapped(function)
    assert [failed.index for failed in answers.failed] == [7]
    assert "OutOfMemoryError" in answers[7].error
    assert answers[:7] == shouted()[:7]


def test_an_item_that_fails_is_tried_three_times_alone(tmp_path: Path) -> None:
    function = Recording(lambda texts: ValueError("bad text") if TEXTS[30] in texts else None)
    answers = mapped(function, out=tmp_path / "a.jsonl")
    assert answers.failed == [Failed(30, "ValueError: bad text")]
    assert sum(call == [TEXTS[30]] for call in function.calls) == 3
    assert [answers[item] for item in range(60) if item != 30] == [t for n, t in enumerate(shouted()) if n != 30]
    line = (tmp_path / "a.jsonl").read_text().splitlines()[30]
    assert json.loads(line) == {"index": 30, "error": "ValueError: bad text"}


def test_a_failure_that_passes_is_no_failure() -> None:
    times = 0

    def sometimes(texts: list[str]) -> BaseException | None:
        nonlocal times
        times += TEXTS[30] in texts
        return ConnectionError("try again") if TEXTS[30] in texts and times < 3 else None

    assert mapped(Recording(sometimes)) == shouted()


def test_a_function_that_fails_with_everything_ends_early_with_its_error() -> None:
    function = Recording(lambda texts: KeyError("text"))
    with pytest.raises(KeyError, match="text") as caught:
        mapped(function)
    assert len(function.calls) <= 5
    assert caught.traceback[-1].path == Path(__file__)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no such image"), ConnectionError("refused")])
def test_so_does_one_whose_errors_look_like_those_of_our_files(tmp_path: Path, error: OSError) -> None:
    with pytest.raises(type(error)) as caught:
        mapped(Recording(lambda texts: error), out=tmp_path / "a.jsonl")
    assert caught.value is error
    assert error.__context__ is None


def test_the_longest_items_may_fail_where_others_do_not() -> None:
    function = Recording(lambda texts: IndexError("too long") if max(map(len, texts)) > 15 else None)
    answers = mapped(function)
    assert {failed.index for failed in answers.failed} == {n for n, text in enumerate(TEXTS) if len(text) > 15}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda texts: "text", "it returned a str"),
        (lambda texts: None, "it returned a NoneType"),
        (lambda texts: {"text": 1}, "it returned a dict"),
        (lambda texts: (texts,), "it returned a tuple"),
        (lambda texts: {*texts}, "it returned a set"),
        (lambda texts: Table(texts), "it returned a Table"),
        (ask, r"the function is async.*asyncio.run\(ask\(items\)\)"),
        (lambda texts: [*texts, "more"], "2 answers for 1 item: it gets a list of items"),
    ],
)
def test_what_is_no_list_of_answers_is_said(function: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        mapped(function)


def test_a_function_for_one_item_is_told_that_it_gets_a_list() -> None:
    with pytest.raises(AttributeError, match="'list' object has no attribute 'upper'") as caught:
        mapped(lambda text: text.upper())
    assert "map calls the function with a list of items" in caught.value.__notes__[0]


def test_an_answer_that_json_cannot_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"an answer holds a .*object, which JSON cannot hold.*leave out= away"):
        mapped(lambda texts: [object() for _ in texts], out=tmp_path / "a.jsonl")


def test_tensors_and_arrays_become_lists_in_a_file(tmp_path: Path) -> None:
    def rows(texts: list[str]) -> list[Any]:
        return [{"row": torch.ones(2, device="cpu"), "n": torch.tensor(3, device="cpu").numpy()} for _ in texts]

    assert mapped(rows, TEXTS[:2], out=tmp_path / "a.jsonl") == [{"row": [1.0, 1.0], "n": 3}] * 2


def test_a_tensor_in_memory_does_not_keep_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, append = 0, RecordFile.append

    def weighed(self: RecordFile, records: Any) -> None:
        nonlocal largest
        records = list(records)
        largest = max([largest, *(len(record.payload) for record in records)])
        append(self, records)

    monkeypatch.setattr(RecordFile, "append", weighed)
    answers = mapped(lambda texts: torch.ones(len(texts), 1000, device="cpu"), batch_size=30)
    assert torch.equal(answers[-1], torch.ones(1000, device="cpu"))
    assert largest < 6000


def test_what_the_function_prints_or_raises_of_the_disk_stays_with_its_items() -> None:
    function = Recording(lambda texts: OSError(errno.ENOENT, "no such image") if TEXTS[3] in texts else None)
    assert [failed.index for failed in mapped(function).failed] == [3]


def test_a_full_disk_is_said_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, count = RecordFile.append, 0

    def full(self: RecordFile, records: Any) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, records)

    monkeypatch.setattr(RecordFile, "append", full)
    with pytest.raises(CannotSave, match=r"rank 0 cannot write to .*a.jsonl.parts: No space left on device.*make room"):
        mapped(shout, out=tmp_path / "a.jsonl")
    monkeypatch.undo()
    function = Recording()
    assert Accelerator(cpu=True).map(shout, TEXTS, out=tmp_path / "a.jsonl") == shouted()
    assert not (tmp_path / "a.jsonl.parts").exists()
    assert function.calls == []


def test_an_interrupt_keeps_what_is_answered(tmp_path: Path) -> None:
    count = 0

    def pressed(texts: list[str]) -> list[str]:
        nonlocal count
        count += len(texts)
        if count > 20:
            raise KeyboardInterrupt
        return shout(texts)

    with pytest.raises(KeyboardInterrupt):
        mapped(pressed, out=tmp_path / "a.jsonl", batch_size=5)
    job = MapJob.open(TEXTS, pressed, None, out=tmp_path / "a.jsonl", batch_size=5)
    assert job.records().answered == 20
    job.close()


def stops_after(calls: int, seen: list[Event]) -> Callable[[Event], None]:
    """An outlet of a run that is stopped after so many calls."""

    def take(event: Event) -> None:
        seen.append(event)
        if isinstance(event, CallEntered) and event.done >= calls:
            event.stop()

    return take


def test_a_stop_comes_between_two_calls_and_what_was_returned_is_written(tmp_path: Path) -> None:
    seen: list[Event] = []
    function = Recording()
    with outlet(stops_after(3, seen)), pytest.raises(RunStopped, match="before the next call"):
        mapped(function, out=tmp_path / "a.jsonl", batch_size=5)
    assert isinstance(seen[-1], CallsEnded)
    job = MapJob.open(TEXTS, function, None, out=tmp_path / "a.jsonl", batch_size=5)
    assert job.records().answered == sum(map(len, function.calls)) > 0
    job.close()
    assert len(function.calls) == 3
    assert mapped(function, out=tmp_path / "a.jsonl", batch_size=5) == shouted()
    assert sum(map(len, function.calls)) == len(TEXTS)  # nothing was asked twice


def test_a_stop_within_a_claim_leaves_the_rest_of_it(tmp_path: Path) -> None:
    function = Recording(lambda texts: ValueError("no") if len(texts) > 1 and len(function.calls) > 2 else None)
    with outlet(stops_after(4, [])), pytest.raises(RunStopped):
        mapped(function, out=tmp_path / "a.jsonl", batch_size=8)
    for _ in range(4):  # an item alone is left each time
        with outlet(stops_after(0, [])), pytest.raises(RunStopped):
            mapped(function, out=tmp_path / "a.jsonl", batch_size=1)
    answers = mapped(function, out=tmp_path / "a.jsonl")
    assert answers == shouted()


def test_a_stop_that_comes_when_all_is_answered_is_none() -> None:
    assert mapped(shout, ["a"], batch_size=1) == ["A"]
    with outlet(stops_after(1, [])):
        assert mapped(shout, ["a"], batch_size=1) == ["A"]


def test_a_stop_while_the_function_is_tested_on_other_items_is_one() -> None:
    def fails(texts: list[str]) -> list[str]:
        raise ValueError(texts[0])

    with outlet(stops_after(2, [])), pytest.raises(RunStopped):
        mapped(fails)


@pytest.mark.parametrize("stopped_rank", [0, 1])
def test_ranks_leave_a_map_together_though_only_one_has_heard_of_the_stop(tmp_path: Path, stopped_rank: int) -> None:
    def rank() -> tuple[str, int]:
        accelerator = Accelerator(cpu=True)
        is_stopped = accelerator.process_index == stopped_rank
        with outlet(stops_after(2 if is_stopped else 10_000, [])):
            try:
                accelerator.map(slow, range(400), out=tmp_path / "a.jsonl", batch_size=2)
                word = "done"
            except RunStopped:
                word = "stopped"
        return word, int(accelerator.reduce(torch.ones(1)).item())  # the next collective of all ranks

    def slow(items: list[int]) -> list[int]:
        time.sleep(0.01)
        return items

    assert run_ranks(2, rank) == [("stopped", 2)] * 2
    assert list(mapped(slow, range(400), out=tmp_path / "a.jsonl", batch_size=2)) == list(range(400))


def test_it_reports_what_is_done() -> None:
    seen: list[Any] = []
    with outlet(seen.append):
        mapped(Recording(lambda texts: ValueError("no") if TEXTS[0] in texts else None))
    done = [event for event in seen if isinstance(event, ItemsDone)]
    assert (done[-1].done, done[-1].failed, done[-1].everywhere) == (59, 1, 60)


def test_it_reports_what_another_process_has_done_in_the_same_file(tmp_path: Path) -> None:
    def slow(items: list[int]) -> list[int]:
        while not (tmp_path / "both").exists():
            if len(list((tmp_path / "a.jsonl.parts" / "records").iterdir())) == 2:
                (tmp_path / "both").touch()
            time.sleep(0.01)
        time.sleep(0.005)
        return items

    call = {"out": tmp_path / "a.jsonl", "batch_size": 1}
    pid = fork(lambda: mapped(slow, range(200), **call))
    seen: list[Any] = []
    with outlet(seen.append):
        mapped(slow, range(200), **call)
    ended(pid)
    reports = [event for event in seen if isinstance(event, ItemsDone)]
    assert reports[-1].done < reports[-1].everywhere <= 200
    assert any(0 < event.done < event.everywhere < 199 for event in reports)  # and not at the end alone


# -- streams


def drawn() -> Iterator[str]:
    yield from TEXTS


def test_a_stream_gives_the_same_answers(tmp_path: Path) -> None:
    assert mapped(shout, drawn()) == shouted()
    assert mapped(shout, drawn(), out=tmp_path / "a.jsonl") == shouted()


def test_a_stream_that_goes_on_is_compared(tmp_path: Path) -> None:
    def pressed(texts: list[str]) -> list[str]:
        if TEXTS[20] in texts:
            raise KeyboardInterrupt
        return shout(texts)

    def call(items: Any) -> Answers:
        return Accelerator(cpu=True).map(pressed, items, out=tmp_path / "a.jsonl")

    with pytest.raises(KeyboardInterrupt):
        call(drawn())
    with pytest.raises(CannotContinue, match="the stream gives other items now: those from number 0 to"):
        call(iter(TEXTS[::-1]))
    with pytest.raises(KeyboardInterrupt):
        call(drawn())
    assert (tmp_path / "a.jsonl.parts").exists()


@pytest.mark.parametrize("is_over", [True, False])
def test_failed_items_of_a_stream_are_drawn_again(tmp_path: Path, is_over: bool) -> None:
    (tmp_path / "broken").touch()

    def sometimes(texts: list[str]) -> list[str]:
        if TEXTS[7] in texts and (tmp_path / "broken").exists():
            raise ValueError("no")
        if not is_over and TEXTS[50] in texts and (tmp_path / "broken").exists():
            raise KeyboardInterrupt
        return shout(texts)

    def call(**options: Any) -> Answers:
        return Accelerator(cpu=True).map(sometimes, drawn(), out=tmp_path / "a.jsonl", batch_size=4, **options)

    if is_over:
        assert [failed.index for failed in call().failed] == [7]
    else:
        with pytest.raises(KeyboardInterrupt):
            call()
    (tmp_path / "broken").unlink()
    assert call(retry_failed=True) == shouted()


def test_a_second_run_may_ask_again_for_failed_items_of_a_stream_that_is_being_answered(tmp_path: Path) -> None:
    """The first process waits with its last item, so that the second one does what has failed before."""
    call: dict[str, Any] = {"out": tmp_path / "a.jsonl", "batch_size": 2}

    def answer(texts: list[str]) -> list[str]:
        if TEXTS[7] in texts and not (tmp_path / "mended").exists():
            raise ValueError("no")
        if TEXTS[59] in texts:
            (tmp_path / "mended").touch()
            while not (tmp_path / "done").exists():
                time.sleep(0.01)
        elif (tmp_path / "mended").exists():
            (tmp_path / "done").touch()
        return shout(texts)

    first = fork(lambda: mapped(answer, drawn(), **call))
    while not (tmp_path / "mended").exists():
        time.sleep(0.01)
    assert mapped(answer, drawn(), retry_failed=True, **call) == shouted()
    assert ended(first) == 0


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_does_not_wait_for_ever_for_a_block_that_is_gone(tmp_path: Path, is_stopped: bool) -> None:
    job = MapJob.open(as_items(drawn()), shout, None, out=tmp_path / "a.jsonl")
    claims = job.claims()
    claims.add_block(0, 60, "")
    claims.end_stream(60)
    drawer = LifeLock(job.folder / "drawer")
    drawn_all = None if is_stopped else LifeLock(job.folder / "drawn")
    error, words = (RunStopped, "before the next call") if is_stopped else (CannotContinue, "from number 0 on are gone")
    looks = itertools.count()

    def stop(event: Event) -> None:
        if isinstance(event, CallEntered) and is_stopped and next(looks) > 3:
            event.stop()

    with outlet(stop), pytest.raises(error, match=words):
        mapped(shout, drawn(), out=tmp_path / "a.jsonl")
    for lock in (drawer, drawn_all):
        if lock is not None:
            lock.close()
    job.close()


def test_a_late_rank_whose_folder_is_joined_while_it_makes_one_there_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mkdir(exist_ok=True)`` says that a folder exists if another rank removes it between its two looks."""
    opens = functools.partial(MapJob.open, function=shout, setup=None, out=tmp_path / "a.jsonl")
    accelerator, late, tend = Accelerator(cpu=True), opens(drawn()), StreamedItems.tend

    def tend_late(self: StreamedItems, size: int) -> None:
        monkeypatch.setattr(StreamedItems, "tend", tend)
        assert mapped(shout, drawn(), out=tmp_path / "a.jsonl") == shouted()
        raise FileExistsError(errno.EEXIST, "File exists", str(late.folder / "blocks"))

    monkeypatch.setattr(StreamedItems, "tend", tend_late)
    work(accelerator, late, drawn(), shout, None)
    assert late.answers() == shouted()
    late.close()


def test_an_error_of_the_stream_ends_the_map_with_it() -> None:
    def failing() -> Iterator[str]:
        yield from TEXTS[:5]
        raise LookupError("the page is gone")

    with pytest.raises(LookupError, match="the page is gone"):
        mapped(shout, failing())


class Mute(PermissionError):
    """An error whose text fails."""

    def __str__(self) -> str:
        raise LookupError("no text")


def test_such_an_error_may_look_like_one_of_our_files_and_have_no_text(tmp_path: Path) -> None:
    def failing() -> Iterator[str]:
        yield from TEXTS[:5]
        raise Mute

    with pytest.raises(Mute):
        mapped(shout, failing(), out=tmp_path / "a.jsonl")


def test_an_endless_stream_is_not_read_far_ahead() -> None:
    drawn_so_far = itertools.count()

    def pressed(numbers: list[int]) -> list[int]:
        if max(numbers) > 50:
            raise KeyboardInterrupt
        return numbers

    with pytest.raises(KeyboardInterrupt):
        mapped(pressed, (next(drawn_so_far) for _ in itertools.count()), batch_size=2)
    assert next(drawn_so_far) < 50_000


# -- several ranks


def in_two_ranks(function: Any, items: Any, **options: Any) -> list[Any]:
    def rank() -> Any:
        return list(Accelerator(cpu=True).map(function, items() if callable(items) else items, **options))

    return run_ranks(2, rank)


def test_all_ranks_get_all_answers(tmp_path: Path) -> None:
    assert in_two_ranks(shout, TEXTS) == [shouted()] * 2
    assert in_two_ranks(shout, TEXTS, out=tmp_path / "a.jsonl") == [shouted()] * 2


@pytest.mark.slow
def test_a_stream_is_drawn_by_one_rank_and_answered_by_both() -> None:
    def by_whom(texts: list[str]) -> list[Any]:
        time.sleep(0.01)
        return [[text.upper(), os.getpid()] for text in texts]

    first, second = in_two_ranks(by_whom, drawn, batch_size=2)
    assert first == second
    assert [text for text, _ in first] == shouted()
    assert len({pid for _, pid in first}) == 2


@pytest.mark.parametrize("count", [1, 60])
def test_both_ranks_fail_alike(count: int) -> None:
    def rank() -> str:
        try:
            Accelerator(cpu=True).map(lambda texts: [texts[99]], TEXTS[:count])
        except IndexError as error:
            return str(error)
        return "no error"

    assert run_ranks(2, rank) == ["list index out of range"] * 2


def test_a_rank_whose_function_fails_leaves_the_items_to_the_other() -> None:
    def rank() -> Any:
        accelerator = Accelerator(cpu=True)

        def load(accelerator: Accelerator) -> bool:
            time.sleep(0.2 * accelerator.process_index)
            return accelerator.is_main_process

        def answer(is_main: bool, texts: list[str]) -> list[str]:
            return [text.upper() if not is_main or len(text) < 17 else texts[99] for text in texts]

        return list(accelerator.map(answer, TEXTS, setup=load))

    first, second = run_ranks(2, rank)
    assert first == second
    assert all(isinstance(one, Failed) or one == two for one, two in zip(first, shouted(), strict=True))


def test_a_value_that_each_rank_has_otherwise_refuses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def rank() -> list[str]:
        accelerator = Accelerator(cpu=True)
        number = accelerator.process_index
        return list(accelerator.map(lambda texts: [text.upper()[: 99 + number] for text in texts], TEXTS, out=out))

    assert run_ranks(2, rank) == [shouted(), shouted()]
    (number,) = json.loads(out.with_name("a.jsonl.manifest.json").read_text())["function"].keys() - {""}
    assert number == "number in lambda"


# -- kills


def killed_again_and_again(out: Path, items: Any, kills: int, seed: int) -> None:
    """Work on a map in two processes, of which one or both are killed at random moments, and started again."""
    chance = random.Random(seed)

    def slowly(texts: list[str]) -> list[str]:
        time.sleep(0.001 * len(texts))
        return shout(texts)

    def process() -> None:
        given = as_items(items() if callable(items) else items)
        job = MapJob.open(given, slowly, None, out=out)
        work(Accelerator(cpu=True), job, given, slowly, None)

    pids = [fork(process), fork(process)]
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 0.08))
        for number in range(2):
            if chance.random() < 0.6:
                try:
                    kill(pids[number])
                except ProcessLookupError:
                    os.waitpid(pids[number], 0)
                pids[number] = fork(process)
    assert [ended(pid) for pid in pids] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["list", "stream"])
def test_kills_lose_nothing_and_double_nothing(tmp_path: Path, kind: str, seed: int) -> None:
    out, items = tmp_path / "a.jsonl", TEXTS * 5
    killed_again_and_again(out, items if kind == "list" else lambda: iter(items), kills=8, seed=seed)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"index": n, "answer": text.upper()} for n, text in enumerate(items)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.manifest.json"]


@pytest.mark.slow
def test_an_item_that_kills_its_process_is_recorded_as_failed(tmp_path: Path) -> None:
    def deadly(texts: list[str]) -> list[str]:
        if TEXTS[30] in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return shout(texts)

    def process() -> None:
        job = MapJob.open(TEXTS, deadly, None, out=tmp_path / "a.jsonl")
        work(Accelerator(cpu=True), job, TEXTS, deadly, None)

    codes = []
    while not codes or codes[-1] != 0:
        codes.append(ended(fork(process)))
        assert len(codes) < 10
    answers = mapped(deadly, out=tmp_path / "a.jsonl")
    assert [failed.index for failed in answers.failed] == [30]
    assert "the process ended 3 times" in answers[30].error
