"""Items of a map in words, in the panel, and over the death of a rank."""

from __future__ import annotations

from nbaccel.base.events import ItemsDone, Memory, RankRestarted
from nbaccel.display.history import History
from nbaccel.display.summary import RUNNING, RunFacts, RunState, line, text
from nbaccel.features.map.item_count import ItemCount
from nbaccel.features.panel.panel import Panel


def history_of(total: int | None = 1000, before: int = 0) -> History:
    history = History(2)
    history.items = ItemCount(total, before)
    for rank in (0, 1):
        history.feed(rank, 0.0, ItemsDone())
        history.feed(rank, 10.0, ItemsDone(done=100 + rank, failed=rank))
        history.feed(rank, 10.0, Memory(host_bytes=400_000_000, host_peak_bytes=500_000_000))
    return history


def test_the_text_has_progress_speed_time_left_and_each_rank() -> None:
    words = text(history_of(), RunFacts("map(answer, 1,000 items)"), 10.0)
    assert "202 of 1,000 items, 20 %, 1 failed, 20.2 items/s, 10 s, about 40 s left" in words
    assert "rank 0: 100 items, 10.0 items/s, host 0.40 GB" in words
    assert "rank 1: 102 items, 10.2 items/s, 1 failed, host 0.40 GB" in words


def test_a_stream_has_no_total_and_no_time_left() -> None:
    words = line(history_of(None), RunFacts(), 10.0)
    assert words.startswith("202 items, 1 failed, 20.2 items/s, 10 s, memory")


def test_items_of_an_earlier_run_count_as_done_and_not_for_the_speed() -> None:
    words = line(history_of(before=500), RunFacts(), 10.0)
    assert words.startswith("702 of 1,000 items, 70 %, 1 failed, 20.2 items/s, 10 s, about 15 s left")


def test_items_that_another_notebook_finishes_count_for_progress_speed_and_time_left() -> None:
    history = History(2)
    history.items = ItemCount(1000, 100)
    for at, mine, everywhere in ((0.0, 0, 100), (10.0, 100, 400)):
        history.feed(0, at, ItemsDone(done=mine, everywhere=everywhere))
    words = text(history, RunFacts(), 10.0)
    assert "400 of 1,000 items, 40 %, 30.0 items/s, 10 s, about 20 s left" in words
    assert "rank 0: 100 items, 10.0 items/s" in words


def test_the_next_map_of_a_run_counts_anew() -> None:
    items = ItemCount()
    items.take(0, 1.0, ItemsDone(done=50, everywhere=80))
    items.take(0, 2.0, ItemsDone(done=1, everywhere=2))
    assert items.done == 2


def test_progress_does_not_go_back_when_a_process_dies() -> None:
    items = ItemCount(1000)
    items.take(0, 1.0, ItemsDone(done=50, everywhere=400))
    items.restart(0)
    assert items.done == 400
    items.take(0, 2.0, ItemsDone(done=1, everywhere=410))
    assert (items.done, items.finished) == (410, 51)


def test_items_of_a_process_that_died_are_kept_and_the_next_one_counts_from_zero() -> None:
    history = history_of()
    history.feed(1, 11.0, RankRestarted("rank 1 was killed by SIGKILL; started again"))
    history.feed(1, 12.0, ItemsDone())
    assert history.items is not None
    assert history.items.finished == 202
    history.feed(1, 13.0, ItemsDone(done=8))
    assert history.items.finished == 210
    assert history.items.finished_by(1) == 110
    assert "rank 1 was killed by SIGKILL" in text(history, RunFacts(), 13.0)


def test_the_panel_has_a_row_for_each_rank_and_a_bar() -> None:
    html = Panel(history_of(), RunFacts("map")).html(10.0, RUNNING)
    assert '<th scope="col">items</th>' in html
    assert "<td>102</td><td>10.2</td><td>1</td><td>0.40 GB</td>" in html.replace("<td> ", "<td>")
    assert 'value="0.202"' in html
    assert "no numbers yet" not in html


def test_the_end_is_the_sentence_alone() -> None:
    state = RunState("done", "1,000 items in 42 s (23.8/s)", is_written=True)
    html = Panel(history_of(), RunFacts("map")).html(42.0, state)
    assert "no number was reported" not in html
    assert "of 1,000 items" not in html  # of this notebook alone; another one may have had a share
    assert 'value="1.000"' in html
    lines = text(history_of(), RunFacts("map"), 42.0, state).splitlines()
    assert lines[0] == "map: 1,000 items in 42 s (23.8/s)"
    assert lines[1].startswith("rank 0: 100 items")


def test_items_are_in_the_dictionary_of_a_history() -> None:
    found = history_of().to_dict()["items"]
    assert found == {
        "total": 1000,
        "before": 0,
        "done": 202,
        "finished": 202,
        "failed": 1,
        "ranks": {0: {"done": 100, "failed": 0}, 1: {"done": 101, "failed": 1}},
    }
