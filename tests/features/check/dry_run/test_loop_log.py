"""Loops of a dry run end after few rounds that draw or step, others run as they are; records say where it was."""

from __future__ import annotations

import itertools
import json
import os
import threading
from typing import Any

import pytest

from features.check.dry_run.timed_program import Clock, DryRun, run_dry
from nbaccel.features.check.dry_run import rewriting
from nbaccel.features.check.dry_run.loop_log import DryRunEnded, LoopLog
from nbaccel.features.check.dry_run.loop_totals import total_of
from nbaccel.features.check.forecasts.forecast import loops_open_at_end


def rounds_of(run: DryRun, line: int) -> list[int]:
    """Return the rounds of each run of the loop in a line."""
    numbers = [entry["number"] for entry in run.table if entry["line"] == line and entry["kind"] in ("for", "while")]
    return [each["rounds"] for each in run.of_kind("loop") if each["number"] == numbers[0]]


def log_of() -> tuple[LoopLog, list[dict[str, Any]], Clock]:
    records: list[dict[str, Any]] = []
    clock = Clock()
    return LoopLog(lambda record: records.append(json.loads(json.dumps(record))), clock), records, clock


# --- when loops end


def test_epochs_end_after_two_rounds_and_their_loaders_after_three_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(
        """
        train, test = loader(100), loader(2)
        for epoch in range(50):
            for x in train:
                step()
            for x in test:
                work(1)
        last = epoch
        """,
        monkeypatch,
    )
    assert run.names["last"] == 1
    assert rounds_of(run, 3) == [2]
    assert rounds_of(run, 4) == [3, 3]
    assert rounds_of(run, 6) == [2, 2]
    (epochs,) = [each for each in run.of_kind("loop") if each["total"] == 50]
    assert epochs["end"] == "cut"


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("for i in range(99):\n    step()", 6),
        ("i = -1\nwhile True:\n    i += 1\n    step()", 6),
        ("for i in range(99):\n    for k in range(4): step()", 2),
        ("for i in range(99):\n    for k in range(40): step()", 2),
        ("for i in range(99):\n    for k in range(4): work(1)\n    step()", 6),
        ("for i in range(4): step()", 4),
        ("it = iter(loader([1] * 99))\nfor i in range(99):\n    try: next(it)\n    except StopIteration: break", 4),
        ("def cycle(x):\n    while True: yield from x\nfor i, x in enumerate(cycle(loader(99))): pass", 6),
        ("for i in range(99):\n    sum(loader(99))", 2),
        ("for i in range(99):\n    work(1)", 99),
        ("for i in range(99):\n    if i % 30 == 0: sum(loader(99))", 99),
        ("for i in range(99):\n    if i % 30 == 0: sum(loader(99))\n    step()", 6),
        ("for i in range(99):\n    step()\n    sum(loader(99))", 6),  # so in a rank that does not evaluate
        ("for i in range(99):\n    sum(loader(99))\n    step()", 6),
        ("for i in range(99):\n    for k in range(4): step()\n    sum(loader(99))", 2),
    ],
)
def test_a_loop_ends_after_rounds_that_draw_or_step(text: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(text, monkeypatch)
    assert run.names["i"] == rounds - 1


def test_a_loop_that_neither_draws_nor_steps_leaves_no_record_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry("for text in range(10000):\n    for part in range(2): pass\n    if text % 2 == 0: pass", monkeypatch)
    assert run.names["text"] == 9999
    kinds = [each["kind"] for each in run.records]
    assert kinds == ["loop_began", "loop_began", "loop_ended", "loop_ended", "whole", "root"]


def test_a_loop_that_trains_after_many_runs_that_did_not_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(
        """
        def repeat(what):
            for i in range(99):
                what()
        for k in range(40):
            repeat(lambda: None)
        def train():
            work(2)
            step()
        repeat(train)
        """,
        monkeypatch,
    )
    (loop,) = run.of_kind("loop")
    assert loop["rounds"] == 6
    assert loop["seconds"] == pytest.approx(10)  # the first round ended before it was known to train


def test_a_loop_that_was_ended_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    for i in range(99):
        step()
        if i == 50: break
    else:
        raise RuntimeError("no convergence")
    for k in range(99):
        step()
    else:
        k = "else"
    """
    assert run_dry(text, monkeypatch).names["k"] == "else"
    with pytest.raises(RuntimeError, match="no convergence"):
        run_dry(text.replace("99", "3"), monkeypatch)


def test_a_period_that_never_comes_is_true_in_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(
        """
        saved, logged, epochs_saved, never = [], [], [], []
        for epoch in range(20):
            for i, x in enumerate(loader(500)):
                step()
                if (i + 1) % 100 == 0: saved.append((epoch, i))
                if not i % 2: logged.append((epoch, i))
            if (epoch + 1) % 5 == 0: epochs_saved.append(epoch)
        for i in range(3):
            step()
            if i % 5 == 4: never.append(i)
        for i in range(99):
            step()
            if i % 50 == 49: saved.append(i)
        """,
        monkeypatch,
    )
    assert run.names["saved"] == [(0, 2), (1, 2), 5]
    assert run.names["logged"] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert run.names["epochs_saved"] == [1]
    assert run.names["never"] == [], "three rounds are all that the loop has"


def test_a_period_whose_body_raises_does_not_come_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    for i in range(0, 99, 2):
        step()
        if i % 2 == 1: raise ValueError("odd")
        if step and i % 2 == 1:
            print(i)
            raise ValueError("odd")
    """
    assert run_dry(text, monkeypatch).names["i"] == 10


def test_a_condition_on_the_number_of_a_rank_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "sent = []\nrank = 1\nfor i in range(99):\n    step()\n    if rank % 2 == 0: sent.append(i)"
    assert run_dry(text, monkeypatch).names["sent"] == []


def test_a_period_in_a_callback_counts_the_rounds_of_the_training_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(
        """
        saved = []
        def save(i):
            if i % 50 == 49:
                work(3)
                saved.append(i)
        for i in range(99):
            step()
            for callback in [print_nothing, save]:
                callback(i)
        """.replace("print_nothing", "work"),
        monkeypatch,
    )
    assert run.names["saved"] == [5]
    (branch,), (loop,) = run.of_kind("branch"), run.of_kind("loop")
    assert (branch["outer"], branch["outer_round"], branch["own_s"]) == (loop["id"], 6, 3)


def test_a_loop_of_another_thread_and_one_in_a_forked_process_run_as_they_are() -> None:
    log, records, _ = log_of()
    had: list[int] = []

    def run_through() -> None:
        with log.loop(3):
            had.extend(log.over(3, range(99)))
            log.note_step()
            log.begin_pass("", "", 9, 1).batch(1, "last")
            assert log.goes_on(3)
            assert log.holds(3, [1]) is True
            assert log.every(4, 6, 3, 0) is True
            assert log.compare(5, 1, "<", 2) is True
            with log.branch(6):
                pass

    thread = threading.Thread(target=run_through)
    thread.start()
    thread.join()
    log.leave()
    run_through()
    assert had == [*range(99)] * 2
    assert records == []


def test_processes_that_are_forked_by_a_rank_log_nothing() -> None:
    pid = os.fork()
    if pid == 0:  # a rank, which has the builtins until it ends
        log, records, _ = log_of()
        rewriting.provide(log)
        if os.fork() == 0:  # a process of its loader
            with log.loop(1):
                count = sum(1 for _ in log.over(1, range(9)) if log.note_step() is None)
            os._exit(0 if (count, records) == (9, []) else 1)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- what others ask


def test_the_present_round_moves_with_the_open_loops() -> None:
    log, _, _ = log_of()
    with log.loop(1) as outer:
        for _ in outer.over([1]):
            with log.loop(2) as inner:
                seen = []
                while inner.may_go_on():
                    inner.begin_round()
                    seen.append(log.present())
                    assert log.present() == seen[-1]
                    log.note_step()
            assert len(set(seen)) == 6
            before = log.present()
            with log.loop(3) as other:
                assert list(other.over("ab")) == ["a", "b"]
            assert log.present() == before, "a loop that is over has moved nothing that is open"
    assert log.present() == ()


def test_the_end_of_a_dry_run_passes_by_the_errors_that_a_program_expects() -> None:
    log, records, _ = log_of()
    with pytest.raises(DryRunEnded), log.loop(1) as loop:
        for _ in loop.over(range(9)):
            log.note_step()
            try:
                raise DryRunEnded
            except Exception as error:
                raise AssertionError("a program has caught it") from error
    assert records[-1]["end"] == "cut"


def test_values_that_are_no_numbers_are_compared_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry(
        """
        import numpy
        n, name, ready, best = 0, "a", numpy.array([True]), float("inf")
        while n < 9 and name < "b" and ready == True and best > 1 and 10**400 > n:
            step()
            n += 1
        """,
        monkeypatch,
    )
    (loop,) = run.of_kind("loop")
    kept = [each["values"] for _, each in sorted(loop["compared"].items())]
    assert kept == [[[number + 1, number, 9, False] for number in range(6)]]


# --- records


def test_seconds_of_a_round_are_apart_from_those_of_inner_loops_branches_and_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_dry(
        """
        work(7)
        for epoch in range(9):
            work(1)
            for x in loader(100, 0.5):
                work(0.25)
                step()
                for part in range(10): work(0.125)
                if epoch % 1 == 0: work(3)
            total = sum(x for x in loader(50, 0.0625))
        work(5)
        """,
        monkeypatch,
    )
    loops = {each["total"]: each for each in run.of_kind("loop")}
    assert [own for own, *_ in loops[9]["kept"]] == [1, 1]
    assert [own for own, *_ in loops[100]["kept"]] == [1.5] * 3  # with the loop that only works
    assert [waited for _, waited, *_ in loops[100]["kept"]] == [0, 0.5, 0.5]
    assert loops[100]["start_s"] == 0.5
    assert [each["own_s"] for each in run.of_kind("branch")] == [3] * 6
    assert [each["count"] for each in run.of_kind("pass")] == [3, 3]
    assert [each["seconds"] for each in run.of_kind("pass")] == [0.1875] * 2
    (setup,), (root,) = run.of_kind("setup"), run.of_kind("root")
    assert (setup["seconds"], root["own_s"]) == (7, 12)


def test_seconds_of_the_dry_run_itself_count_nowhere() -> None:
    log, records, clock = log_of()
    with log.loop(1) as loop:
        for _ in loop.over(range(9)):
            clock.work(1)
            with log.excluded():
                clock.work(50)
            log.note_step()
    log.close()
    assert [own for own, *_ in records[-3]["kept"]] == [1] * 6
    assert records[-2] == {"kind": "whole", "seconds": 6, "setup_s": 0}


def test_a_rank_that_is_killed_has_said_in_which_loop_it_was() -> None:
    log, records, _ = log_of()
    with log.loop(4) as outer:
        for _ in outer.over(range(9)):
            with log.loop(5) as inner:
                for _ in inner.over(range(9)):
                    log.begin_pass("Cell In[3], line 9", "DataLoader", 9, 1.0)
                    began = [each for each in records if each["kind"] == "loop_began"]
                    assert [(each["number"], each["outer_round"]) for each in began] == [(4, 0), (5, 1)]
                    assert loops_open_at_end(records) == [4, 5]
                    break
            with log.loop(6) as other:
                list(other.over(range(3)))
            assert loops_open_at_end(records) == [4]
            with log.loop(5) as inner:
                for _ in inner.over(range(9)):
                    log.note_step()
                    assert loops_open_at_end(records) == [4, 5]
            break
    log.close()
    assert loops_open_at_end(records) == []


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("exhausted", "for i in range(2): step()"),
        ("exhausted", "i = 0\nwhile i < 2:\n    i += 1\n    step()"),
        ("cut", "for i in range(9): step()"),
        ("left", "for i in range(9):\n    step()\n    if i: break"),
        ("left", "def f():\n    for i in range(9):\n        step()\n        return\nf()"),
        ("error", "try:\n    for i in range(9):\n        step()\n        i / 0\nexcept ZeroDivisionError: pass"),
    ],
)
def test_a_record_says_how_a_loop_ended(end: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each["end"] for each in run_dry(text, monkeypatch).of_kind("loop")] == [end]


def test_the_sizes_of_batches_stand_beside_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dry("for x, y in zip(loader([1, 9, 4, 2]), loader([5, 5, 5, 5])): pass", monkeypatch)
    (loop,) = run.of_kind("loop")
    assert [size for *_, size, _ in loop["kept"]] == [14, 9, 7]
    assert loop["is_cut_by_pass"]
    assert [each["mean_size"] for each in loop["passes"]] == [4, 5]


@pytest.mark.parametrize(
    ("kinds", "is_cut"),
    [
        (["longest", "between", "between", "between"], False),
        (["longest", "between", "last"], True),
        (["first", "first"], False),
        (["first", "first", "first"], True),
    ],
)
def test_a_pass_that_the_program_leaves_is_none_that_was_cut(kinds: list[str], is_cut: bool) -> None:
    log, records, _ = log_of()
    begun = log.begin_pass("", "", 100, 1.0)
    for kind in kinds:
        begun.batch(1.0, kind)
    begun.end(is_whole=False)
    assert records[-1]["is_cut"] is is_cut


def test_a_period_is_tried_in_the_last_batches_of_a_pass_that_has_more_than_three() -> None:
    log, _, _ = log_of()
    begun = log.begin_pass("", "", 100, 1.0)
    kinds = ["longest", "longest", "between", "between", "last", "last"]
    with log.loop(1) as loop:
        saved = []
        for number in loop.over(range(100)):
            begun.batch(1.0, kinds[number])
            if log.every(2, number, 50, 49):
                saved.append(number)
    assert saved == [4]


# --- totals


class Bar:
    """A progress bar, as `tqdm` and others have it."""

    def __init__(self, total: Any) -> None:
        self.total = total

    def __iter__(self) -> Any:
        yield from ()


@pytest.mark.parametrize(
    ("iterable", "total"),
    [
        (zip(range(5), itertools.count()), 5),
        (enumerate(zip(itertools.repeat(1, 7), "abcdefghi", strict=False)), 7),
        (Bar(8), 8),
        (Bar(None), None),
        (enumerate(Bar(8)), 8),
        (enumerate(x for x in Bar(8)), None),
        (itertools.product("ab", range(4)), 8),
        (reversed([1, 2]), 2),
        ({"a": 1}.items(), 1),
        (itertools.count(), None),
        (itertools.cycle("ab"), None),
        (iter(int, 1), None),
        (filter(None, [1]), None),
        (5, None),
    ],
)
def test_the_total_of_a_loop_is_read_from_its_iterable(iterable: Any, total: int | None) -> None:
    assert total_of(iterable) == total


def test_a_table_has_the_rounds_of_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    assert total_of(pandas.DataFrame({"a": range(9), "b": range(9)})) == 2
    assert total_of(pandas.Series(range(9))) == 9


def test_reading_a_total_draws_nothing() -> None:
    iterator = enumerate(iter([1, 2, 3]))
    assert total_of(iterator) == 3
    assert list(iterator) == [(0, 1), (1, 2), (2, 3)]


def test_slices_have_a_total_where_python_tells_their_ends() -> None:
    if not hasattr(itertools.islice([], 1), "__setstate__"):
        pytest.skip("this Python does not tell the ends of a slice")
    assert total_of(itertools.islice(range(100), 5, 50, 2)) == 23
    assert total_of(itertools.islice([1, 2], 9)) == 2
    assert total_of(itertools.islice(itertools.count(), 9)) == 9


def test_epochs_of_an_accelerator_have_a_total() -> None:
    from nbaccel import Accelerator

    assert total_of(Accelerator().epochs(12)) == 12


def test_epochs_of_a_resumed_program_are_those_that_are_left() -> None:
    from nbaccel.train.checkpoint.training_state import Epochs
    from nbaccel.train.step.accumulation import Accumulation

    epochs = Epochs()
    epochs.load(epoch=5, clock=Accumulation(1).clock)
    assert total_of(epochs.run(12, Accumulation(1))) == 7
