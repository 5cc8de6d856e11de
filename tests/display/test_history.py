from __future__ import annotations

import json
import math
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from nbaccel.base.events import (
    Checkpoint,
    ExchangeTime,
    Loss,
    Memory,
    Metric,
    OutOfMemory,
    Phase,
    Progress,
    RecordsLost,
    Restarted,
    StepEntered,
)
from nbaccel.display.course import Left
from nbaccel.display.history import History, Mark, Usage


def test_losses_make_a_curve_by_rank_and_their_mean() -> None:
    history = History(2)
    for rank in (0, 1):
        for step in range(3):
            history.feed(rank, 0.1, Loss(1.0 + rank, step))
    assert history.curve("loss").mean == (1.5, 1.5, 1.5)
    assert history.curve("loss", rank=1).mean == (2.0, 2.0, 2.0)
    assert history.steps == 3


def test_rows_are_what_rank_0_logged_and_curves_are_of_all_ranks() -> None:
    history = History(2)
    for rank in (0, 1):
        history.feed(rank, 0.1, Metric({"acc": 0.5 + rank / 4, "stage": "warm"}, step=2))
    assert list(history.rows) == [{"step": 2, "acc": 0.5, "stage": "warm"}]
    assert history.curve("acc").mean == (0.625,)
    assert history.names == ["acc"]


def test_a_logged_loss_stands_beside_that_of_backward_whichever_came_first() -> None:
    history = History(1)
    history.feed(0, 0.1, Metric({"loss": 9.0}, step=0))
    assert history.names == ["loss"]
    history.feed(0, 0.1, Loss(1.0, step=0))
    assert history.curve("loss").mean == (1.0,)
    assert history.curve("logged loss").mean == (9.0,)


def test_a_loss_that_is_logged_in_some_steps_is_one_loss_in_whichever_order_it_arrives() -> None:
    history = History(2)
    late: list[Metric] = []
    for step in range(25):
        for rank in (0, 1):
            value = math.nan if step == 20 else 1.0 / (1 + step + rank)
            logged = [Metric({"loss": value}, step)] if step % 10 == 0 else []
            if rank:
                history.feed(rank, float(step), Loss(value, step))
                late += logged  # a tensor has to be waited for
            else:
                for event in [*logged, Loss(value, step)]:
                    history.feed(rank, float(step), event)
    for event in late:
        history.feed(1, 25.0, event)
    assert history.names == ["loss"]
    history.feed(0, 26.0, Metric({"loss": 0.7}, step=25))  # the average of an epoch
    history.feed(0, 27.0, Loss(0.5, step=26))
    assert history.names == ["loss", "logged loss"]


def test_a_loss_that_is_logged_hundreds_of_steps_after_its_backward_is_one_loss() -> None:
    history = History(1)
    for step in range(500):
        history.feed(0, 0.0, Loss(1.0 / (step + 1), step))
    for step in range(500):
        history.feed(0, 0.0, Metric({"loss": 1.0 / (step + 1)}, step))
    assert history.names == ["loss"]


def test_a_logged_loss_that_says_the_same_again_is_left_out() -> None:
    history = History(2)
    for rank in (0, 1):
        history.feed(rank, 0.1, Loss(1.0 + rank, step=0))
    history.feed(0, 0.1, Metric({"loss": 1.0, "acc": 0.5}, step=0))
    assert history.names == ["loss", "acc"]


def test_a_logged_mean_of_the_ranks_losses_says_the_same_again_and_another_one_does_not() -> None:
    history = History(2)
    for begin in (0, 100):  # ranks are heard one after the other, many steps at a time
        for rank in (0, 1):
            for step in range(begin, begin + 100):
                history.feed(rank, 0.1, Loss(1.0 / (1 + step + rank), step))
                history.feed(rank, 0.1, Metric({"loss": (1 / (1 + step) + 1 / (2 + step)) / 2}, step))
        assert history.names == ["loss"]
    history.feed(0, 0.2, Loss(0.5, step=200))
    history.feed(0, 0.2, Metric({"loss": 0.625}, step=200))
    assert history.names == ["loss"], "rank 1 has still to be heard of"
    history.feed(1, 0.2, Loss(0.75, step=200))
    assert history.names == ["loss"]
    history.feed(0, 0.3, Metric({"loss": 9.0}, step=200))  # of other data
    assert history.names == ["loss", "logged loss"]


def test_an_unknown_curve_is_named_with_those_there_are() -> None:
    history = History(1)
    with pytest.raises(KeyError, match="no curve is called 'acc'; there is: none yet"):
        history.curve("acc")
    history.feed(0, 0.1, Loss(1.0, step=0))
    with pytest.raises(KeyError, match="there is: loss"):
        history.curve("acc")


def test_progress_gives_pace_and_time_of_arrival() -> None:
    history = History(1, began_at=100.0)
    for batch in range(1, 51):
        at = 100.0 + batch * 0.1
        history.feed(0, at, Progress(step=batch, batch=batch, batches=100, epoch=0, epochs=2))
    assert history.steps_per_s == pytest.approx(10.0)
    assert history.phase.left == Left(pytest.approx(15.0))
    assert history.seconds == pytest.approx(5.0)
    assert history.speed.mean().mean[-1] == pytest.approx(10.0)


def test_without_the_number_of_epochs_the_epoch_has_an_end() -> None:
    history = History(1)
    for batch in range(1, 51):
        history.feed(0, batch * 0.1, Progress(step=batch, batch=batch, batches=100, epoch=1))
    assert history.phase.left == Left(pytest.approx(5.0), of_epoch=True)


def test_an_evaluation_is_shown_while_it_runs_beside_the_place_of_the_training() -> None:
    history = History(1)
    training, evaluation = Progress(step=5, batch=5, batches=5), Progress(step=5, batch=1, batches=3, is_training=False)
    history.feed(0, 1.0, training)
    history.feed(0, 2.0, evaluation)
    assert (history.phase.training, history.phase.evaluation) == (training, evaluation)
    history.feed(0, 3.0, Progress(step=5, batch=3, batches=3, is_training=False, is_over=True))
    assert (history.phase.training, history.phase.evaluation) == (training, None)


def test_memory_is_that_of_the_device_or_of_the_host() -> None:
    history = History(2)
    history.feed(0, 1.0, Memory(5, 6, 100, 7, 8, 9, 10))
    history.feed(1, 1.5, Memory(5, 6, 100))
    assert history.memory == {0: Usage(True, 8, 9, 10), 1: Usage(False, 5, 6, 100)}
    assert history.memory_bytes.line(1).step == (1500,)


def test_the_peak_of_memory_is_that_of_all_attempts() -> None:
    history = History(1)
    history.feed(0, 1.0, Memory(5, 9, 100))
    history.feed(0, 2.0, Restarted("memory ran out"))
    history.feed(0, 3.0, Memory(4, 6, 100))
    assert history.memory == {0: Usage(False, 4, 9, 100)}


def test_what_happened_once_is_a_mark_in_words() -> None:
    history = History(2)
    history.feed(1, 2.0, OutOfMemory(step=12, phase="backward", micro_batch_size=64, next_size=32, batch_size=64))
    history.feed(0, 3.0, Checkpoint("runs/a", step=20, seconds=0.4))
    assert history.marks == [
        Mark(2.0, "oom", "ran out of memory in backward with 64 samples; goes on with 32", 1, 12),
        Mark(3.0, "checkpoint", "saved runs/a in 0.4 s", None, 20),
    ]


def test_of_very_many_marks_the_first_and_the_latest_are_kept() -> None:
    history = History(1)
    for step in range(1_000):
        history.feed(0, step, OutOfMemory(step))
    assert len(history.marks) == 200
    assert (history.marks[0].step, history.marks[-1].step) == (0, 999)


def test_a_phase_has_curves_of_its_own_though_ranks_are_read_in_turn() -> None:
    history = History(2)
    for rank in (0, 1):
        history.feed(rank, 0.1, Phase("fold 1"))
        history.feed(rank, 0.2, Loss(1.0, 0))
        history.feed(rank, 0.3, Phase("fold 2"))
        history.feed(rank, 0.4, Loss(2.0, 0))
    assert [phase.name for phase in history.phases] == ["fold 1", "fold 2"]
    assert [phase.series["loss"].mean().mean for phase in history.phases] == [(1.0,), (2.0,)]
    assert [phase.series["loss"].ranks for phase in history.phases] == [[0, 1], [0, 1]]
    assert history.steps == 2


def test_steps_of_phases_are_counted_once_where_one_accelerator_counts_on() -> None:
    history = History(1)
    for fold in (0, 1):
        history.feed(0, 10.0 * fold, Phase(f"fold {fold}"))
        history.feed(0, 10.0 * fold + 1, Progress(64 * fold + 32, 32, 32, first=64 * fold, began=10.0 * fold + 0.5))
        history.feed(
            0, 10.0 * fold + 2, Progress(64 * fold + 64, 32, 32, first=64 * fold + 32, began=10.0 * fold + 1.5)
        )
    assert [phase.steps for phase in history.phases] == [64, 64]
    assert history.steps == 128


def test_a_loss_that_was_waited_for_belongs_to_the_phase_that_computed_it() -> None:
    history = History(1)
    history.feed(0, 1.0, Phase("fold 1"))
    history.feed(0, 3.0, Phase("fold 2"))
    for at, value in ((2.0, 1.0), (4.0, 2.0)):
        history.feed(0, at, Loss(value, 0))
    assert [(phase.name, phase.series["loss"].latest) for phase in history.phases] == [("fold 1", 1.0), ("fold 2", 2.0)]


def test_a_phase_of_the_same_name_is_a_new_one() -> None:
    history = History(1)
    for value in (1.0, 2.0):
        history.feed(0, 0.1, Phase("fold"))
        history.feed(0, 0.2, Loss(value, 0))
    assert [phase.series["loss"].latest for phase in history.phases] == [1.0, 2.0]


def test_a_run_that_was_started_again_counts_its_last_attempt() -> None:
    history = History(2)
    for attempt in range(2):
        for rank in (0, 1):
            for step in range(3 + attempt):
                history.feed(rank, 1.0, Loss(1.0, step))
                history.feed(rank, 1.0, Metric({"acc": 0.1 * attempt}, step))
        if not attempt:
            history.feed(0, 2.0, Restarted("rank 1 ran out of memory; started again"))
    assert [phase.name for phase in history.phases] == ["attempt 1", "attempt 2"]
    assert history.steps == 4
    assert list(history.rows) == [{"step": step, "acc": 0.1} for step in range(4)]
    assert history.marks == [Mark(2.0, "restart", "rank 1 ran out of memory; started again")]


def test_lost_records_are_counted_over_ranks() -> None:
    history = History(2)
    for rank, count in ((0, 3), (0, 5), (1, 1)):
        history.feed(rank, 1.0, RecordsLost(count))
    assert history.lost == 6


def test_events_it_does_not_know_are_left_out() -> None:
    history = History(1)
    history.feed(0, 5.0, StepEntered(3))
    assert history.seconds == 0.0
    assert history.phase.is_empty


def a_run(world_size: int = 2) -> History:
    history = History(world_size)
    for rank in range(world_size):
        for step in range(10):
            history.feed(rank, step / 10, Loss(1.0 / (step + 1), step))
            history.feed(rank, step / 10, Progress(step + 1, step + 1, 10))
            history.feed(rank, step / 10, Memory(1_000, 2_000, 10_000))
    history.feed(0, 1.0, Metric({"acc": 0.75}, 9))
    return history


def test_to_dict_is_json_and_has_every_number() -> None:
    data = json.loads(json.dumps(a_run().to_dict()))
    loss = data["phases"][0]["curves"]["loss"]
    assert loss["mean"] == [1.0 / (step + 1) for step in range(10)]
    assert loss["ranks"]["1"]["step"] == list(range(10))
    assert data["rows"] == [{"step": 9, "acc": 0.75}]
    assert data["memory"]["0"]["peak_bytes"] == 2_000
    assert (data["steps"], data["world_size"], data["lost"]) == (10, 2, 0)


def test_to_pandas_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas.*to_dict"):
        a_run().to_pandas()


def test_to_pandas_has_a_row_for_each_step_and_a_column_for_each_curve() -> None:
    pytest.importorskip("pandas")
    frame = a_run().to_pandas()
    assert list(frame.columns) == ["loss", "acc"]
    assert frame.loc[("", 9), "acc"] == 0.75
    assert math.isnan(frame.loc[("", 0), "acc"])
    assert a_run().to_pandas(rank=1)["loss"].iloc[1] == 0.5


def lag_of_rank_1(step: int, *, seconds_later: float) -> int:
    """Where the leader does ten steps per second and has done 100."""
    history = History(2)
    for at in range(101):
        history.feed(0, at / 10, Progress(at, at, 1000))
    history.feed(1, 10.0 + seconds_later, Progress(step, step, 1000))
    return history.phase.lag(1)


def test_a_rank_is_behind_or_ahead_by_steps_and_not_by_the_moment_at_which_it_says_so() -> None:
    assert lag_of_rank_1(98, seconds_later=-0.2) == 0
    assert lag_of_rank_1(103, seconds_later=0.25) == 0
    assert lag_of_rank_1(101, seconds_later=0.0) == 0
    assert lag_of_rank_1(103, seconds_later=0.0) == 0, "less than the time that reports need"
    assert lag_of_rank_1(90, seconds_later=0.0) == -10
    assert lag_of_rank_1(90, seconds_later=0.2) == -12
    assert lag_of_rank_1(140, seconds_later=0.0) == 40


def test_no_rank_is_behind_while_the_pace_is_unknown() -> None:
    history = History(2)
    for step in range(64):  # both rings are read in one go, and rank 0 went on meanwhile
        history.feed(1, 1.0, Progress(step, step, 1000))
    for step in range(121):
        history.feed(0, 1.0, Progress(step, step, 1000))
    assert history.phase.lag(1) == 0


def test_a_history_says_what_it_is() -> None:
    assert repr(a_run()) == "<History: 10 steps, 2 ranks; loss 0.1000, acc 0.7500>"


def bytes_of(make: Callable[[], History]) -> int:
    tracemalloc.start()
    try:
        kept = make()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert not kept.phase.is_empty
    return used


@pytest.mark.full
@pytest.mark.slow
def test_a_million_steps_take_less_than_5_mb() -> None:
    """Two ranks; what differs by step is what could grow with their number."""

    def million() -> History:
        history = History(2)
        for step in range(1_000_000):
            history.feed(step & 1, step / 100, Loss(1.0 / (step + 1), step >> 1))
            if step % 40 == 0:
                history.feed(0, step / 100, Metric({"lr": 0.1 * step, "acc": 1.0 * step}, step))
            if step % 200 == 0:
                history.feed(0, step / 100, Progress(step, step, 1_000_000))
                history.feed(1, step / 100, Memory(step, step, 10**10))
        return history

    assert bytes_of(million) < 5_000_000


@pytest.mark.full
@pytest.mark.slow
def test_all_that_eight_ranks_log_at_every_step_takes_less_than_5_mb() -> None:
    def full() -> History:
        history = History(8)
        for step in range(0, 48_000_000, 4_000):  # as many rows as are kept, and curves that are full
            for rank in range(8):
                history.feed(rank, step, Loss(1.0 / (step + 1), step))
                history.feed(rank, step, Metric({"lr": 0.1 * step, "acc": 0.2 * step, "norm": 0.3 * step}, step))
        return history

    assert len(full().rows) == 12_000
    assert bytes_of(full) < 5_000_000


def test_very_many_curves_share_the_room() -> None:
    def many() -> History:
        history = History(8)
        for step in range(30):
            for rank in range(8):
                history.feed(rank, step, Metric({f"norm {name}": 1.0 for name in range(150)}, step))
        return history

    assert bytes_of(many) < 5_000_000


def test_the_curves_of_all_phases_are_one_table_with_a_column_each(tmp_path: Path) -> None:
    history = History(2)
    for fold in ("a", "b"):
        for rank in (0, 1):
            history.feed(rank, 1.0, Phase(fold))
            for step in range(3):
                history.feed(rank, 1.0, Loss(1.0 + rank + step, step))
        history.feed(0, 1.0, Metric({"acc, top 1": 0.25}, 2))
    path = tmp_path / "curves.csv"
    history.to_csv(path)
    history.to_csv(path)  # it replaces the file
    assert path.read_text().splitlines()[:4] == ['phase,step,loss,"acc, top 1"', "a,0,1.5,", "a,1,2.5,", "a,2,3.5,0.25"]
    assert len(path.read_text().splitlines()) == 7
    history.to_csv(path, rank=1)
    assert path.read_text().splitlines()[3] == "a,2,4.0,"
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(path).set_index(["phase", "step"])
    pandas.testing.assert_frame_equal(table.astype(float), history.to_pandas(1), check_index_type=False)


def test_the_share_of_exchanges_is_a_mean_of_all_ranks_of_the_last_attempt() -> None:
    history = History(2)
    history.feed(0, 9.0, ExchangeTime(9.0, 9.0))
    history.feed(0, 9.0, Restarted("started again"))
    history.feed(0, 20.0, ExchangeTime(6.0, 10.0))
    assert history.exchange_share is None, "one rank has not told"
    history.feed(1, 20.0, ExchangeTime(2.0, 10.0))
    assert history.exchange_share == pytest.approx(0.4)


@pytest.mark.parametrize(("ranks", "of_s"), [(1, 10.0), (2, 9.9)])
def test_of_one_rank_and_of_a_short_run_no_share_is_known(ranks: int, of_s: float) -> None:
    history = History(ranks)
    for rank in range(ranks):
        history.feed(rank, of_s, ExchangeTime(of_s, of_s))
    assert history.exchange_share is None
