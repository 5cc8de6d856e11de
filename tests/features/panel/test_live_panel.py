"""How a run is shown in a notebook, without one: frames, lines and pictures on a screen that only remembers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from display.runs import Clock, Paper, report
from nbaccel.base.events import Restarted
from nbaccel.display.run_view import RunView
from nbaccel.display.summary import RunFacts
from nbaccel.display.views import PeriodicText
from nbaccel.features.panel import display_slot as place, live_panel
from nbaccel.features.panel.display_slot import DisplaySlot
from nbaccel.features.panel.live_panel import LivePanel
from nbaccel.features.panel.notebook_views import UnattendedText
from nbaccel.launching.inline import until_its_end

FACTS = RunFacts("Cell In[5]")


def test_the_first_line_comes_at_the_end_of_a_silent_run_and_at_once_where_nothing_else_shows_it() -> None:
    paper = Paper()
    silent = LivePanel(paper, 2, FACTS, clock=Clock())
    silent.head("2 ranks on CPU")
    silent.end("done", 0.5)
    assert paper.text == "2 ranks on CPU\n"
    PeriodicText(paper, 2, FACTS, clock=Clock()).head("1 rank on CPU")
    assert paper.text.endswith("1 rank on CPU\n")


def test_a_panel_is_one_display_that_is_updated_and_ends_as_a_picture() -> None:
    paper, clock = Paper(), Clock()
    shown = LivePanel(paper, 1, FACTS, clock=clock)
    report(shown, clock, 5.0)
    frames = len(paper.messages)
    assert 9 <= frames <= 10
    shown.end("done", 5.0)
    assert [message["kind"] for message in paper.messages] == ["display"] + ["update"] * (frames + 1)
    assert len({message["display_id"] for message in paper.messages}) == 1
    assert sorted(paper.messages[-1]["data"]) == ["image/png", "text/plain"]
    assert paper.messages[-1]["metadata"]["image/png"]["alt"].startswith("Cell In[5]: done in 5 s, 50 steps")
    assert paper.text.startswith("done in 5 s, 50 steps, loss 0.02000")


def test_what_the_picture_needs_is_loaded_with_the_first_frame_and_not_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(live_panel.importlib, "import_module", loaded.append)
    clock = Clock()
    shown = LivePanel(Paper(), 1, FACTS, clock=clock)
    shown.tick(clock.now)
    assert loaded == []
    report(shown, clock, 0.5)
    assert loaded == ["nbaccel.features.panel.run_figure"]


def test_a_run_that_is_short_and_has_no_numbers_leaves_nothing() -> None:
    paper, clock = Paper(), Clock()
    for shown in (LivePanel(paper, 2, FACTS, clock=clock), PeriodicText(paper, 2, FACTS, clock=clock)):
        clock.now += 1.0
        shown.tick(clock.now)
        shown.end("done", 1.0)
    assert (paper.text, paper.messages) == ("", [])


def test_a_run_without_numbers_is_shown_after_two_seconds_and_needs_no_picture() -> None:
    paper, clock = Paper(), Clock()
    shown = LivePanel(paper, 2, FACTS, clock=clock)
    for now in (100.5, 101.9, 102.0):
        shown.tick(now)
        assert len(paper.messages) == (now == 102.0)
    shown.end("failed", 3.0, ValueError("11 classes\nand more"), rank=1)
    assert sorted(paper.messages[-1]["data"]) == ["text/html", "text/plain"]
    assert paper.text == "failed after 3 s: rank 1, ValueError: 11 classes\n"


def test_frames_that_cost_more_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    paper, clock, cpu = Paper(), Clock(), Clock()

    def drawing_takes(message: dict[str, Any]) -> None:
        paper.messages.append(message)
        cpu.now += 0.06

    monkeypatch.setattr(live_panel.time, "thread_time", cpu)
    monkeypatch.setattr(paper, "publish", drawing_takes)
    report(LivePanel(paper, 1, FACTS, clock=clock), clock, 20.0)
    assert len(paper.messages) == 10  # 3 % of 20 s are 0.6 s


def test_bars_are_rows_of_the_panel_and_keep_their_room_until_it_ends() -> None:
    paper, clock = Paper(), Clock()
    shown = LivePanel(paper, 1, FACTS, clock=clock)
    shown.show_bars(["[rank 0] 10%|<#", "[rank 1]  5%|"])
    report(shown, clock, 0.5)
    shown.show_bars(["[rank 1] 50%|##"])
    report(shown, clock, 0.5)
    frames = [message["data"]["text/html"] for message in paper.messages]
    assert ["[rank 0] 10%|&lt;#\n[rank 1]  5%|</pre>" in frame for frame in frames] == [True, False]
    assert "[rank 1] 50%|##\n</pre>" in frames[1]
    assert len({re.findall(r"height:(\d+)px", frame)[0] for frame in frames}) == 1
    assert paper.messages[0]["data"]["text/plain"].endswith("[rank 0] 10%|<#\n[rank 1]  5%|")
    shown.end("done", 1.0)
    assert "%|" not in str(paper.messages[-1]["data"])


def test_where_nobody_watches_no_state_of_a_bar_is_shown_but_its_last() -> None:
    assert UnattendedText(Paper(), 1, FACTS, DisplaySlot()).has_room_for_bars
    assert not PeriodicText(Paper(), 1, FACTS).has_room_for_bars


def test_the_runs_of_one_place_share_its_display() -> None:
    paper, clock, place = Paper(), Clock(), DisplaySlot("cell")
    for _ in range(3):
        shown = LivePanel(paper, 1, FACTS, place, says_end=False, clock=clock)
        report(shown, clock, 1.0)
        shown.end("done", 1.0)
    assert [message["kind"] for message in paper.messages].count("display") == 1
    assert len(paper.messages[-1]["data"]["text/plain"].splitlines()) == 3
    assert sorted(paper.messages[-1]["data"]) == ["image/png", "text/plain"]
    assert paper.text == ""


def sweep(paper: Paper, place: DisplaySlot, runs: int, *, numbers: bool = True) -> None:
    for _ in range(runs):
        clock = Clock()
        shown = LivePanel(paper, 1, FACTS, place, says_end=False, clock=clock)
        if numbers:
            report(shown, clock, 1.0)
        shown.end("done", 3.0)


def test_the_picture_of_several_runs_is_drawn_once_when_their_cell_ends() -> None:
    paper, at_the_end = Paper(), list[Callable[[], None]]()
    sweep(paper, DisplaySlot("cell", at_the_end.append), 4)
    assert "text/html" in paper.messages[-1]["data"]
    (draw,) = at_the_end
    draw()
    assert sorted(paper.messages[-1]["data"]) == ["image/png", "text/plain"]
    assert [line.split(":")[0] for line in paper.messages[-1]["data"]["text/plain"].splitlines()] == [
        f"{number}. Cell In[5]" for number in (1, 2, 3, 4)
    ]


def test_several_runs_without_numbers_stay_a_table() -> None:
    paper = Paper()
    sweep(paper, DisplaySlot("cell"), 2, numbers=False)
    assert sorted(paper.messages[-1]["data"]) == ["text/html", "text/plain"]


def test_a_picture_of_several_runs_that_cannot_be_drawn_leaves_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(comparison: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(place, "kept_of_several", fails)
    paper = Paper()
    sweep(paper, DisplaySlot("cell"), 2)
    assert paper.text == "these runs could not be drawn (RuntimeError: no fonts)\n"
    assert "text/html" in paper.messages[-1]["data"]


def test_where_nobody_watches_the_picture_is_kept() -> None:
    paper, clock = Paper(), Clock()
    shown = UnattendedText(paper, 1, FACTS, DisplaySlot(), clock=clock)
    report(shown, clock, 5.0)
    shown.end("done", 5.0)
    assert [sorted(message["data"]) for message in paper.messages] == [["image/png", "text/plain"]]


def test_a_picture_that_cannot_be_drawn_is_said_and_the_panel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(place, "shown_of", fails)
    paper, clock = Paper(), Clock()
    shown = LivePanel(paper, 1, FACTS, clock=clock)
    report(shown, clock, 1.0)
    shown.end("done", 1.0)
    assert paper.text == "this run could not be drawn (RuntimeError: no fonts)\n"
    assert "done in 1 s" in paper.messages[-1]["data"]["text/html"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "done in 5 s, 50 steps"),
        (ValueError("11 classes"), "failed after 5 s, 50 steps: ValueError: 11 classes"),
        (KeyboardInterrupt(), "stopped after 5 s, 50 steps"),
    ],
)
def test_a_run_in_this_process_says_how_it_ended_and_lets_its_error_through(
    error: BaseException | None, expected: str
) -> None:
    paper, clock = Paper(), Clock()
    shown = LivePanel(paper, 1, FACTS, clock=clock)

    def run() -> None:
        with until_its_end(shown):
            report(shown, clock, 5.0)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert paper.messages[-1]["data"]["text/plain"].splitlines()[0] == f"Cell In[5]: {expected}"
    assert paper.text.startswith(expected)


@pytest.mark.parametrize("kind", [LivePanel, PeriodicText])
def test_the_end_counts_all_attempts_and_names_the_one_whose_steps_it_says(kind: type[RunView]) -> None:
    paper, clock = Paper(), Clock()
    shown = kind(paper, 1, FACTS, clock=clock)
    for _ in range(2):
        shown.feed(0, clock.now, Restarted("memory ran out"))
        clock.now += 2.0
        report(shown, clock, 4.0)
    shown.end("done", shown.elapsed_s)
    assert re.search(r"^done in 12 s, 40 steps in the last of 3 attempts, loss", paper.text, re.M)
    for message in paper.messages[-1:]:
        assert message["data"]["text/plain"].startswith("Cell In[5]: done in 12 s, 40 steps in the last of 3 attempts")
