"""The table of a sweep: every run has its row, and of very many those that matter now are shown."""

from __future__ import annotations

from typing import Any

from nbaccel.base.events import Metric
from nbaccel.display.history import History
from nbaccel.features.panel.display_slot import DisplaySlot
from nbaccel.features.sweep.sweep_table import SweepRow, SweepTable, SweepView


class Recorded:
    """A screen that records."""

    has_room_for_bars = False

    def __init__(self) -> None:
        self.text = ""
        self.messages: list[dict[str, Any]] = []

    def write(self, stream: str, text: str) -> None:
        self.text += text

    def publish(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def show_bars(self, rows: Any) -> None: ...


def row(word: str, title: str = "lr=<0.1>", **fields: Any) -> SweepRow:
    history = History(1)
    if word not in ("waiting",):
        for step in range(4):
            history.feed(0, 0.1 * step, Metric({"acc": step / 4}, step))
    return SweepRow(title, word, history=history, **fields)


def test_text_and_html_have_every_run_with_its_state_numbers_and_place() -> None:
    rows = [
        row("done", place="GPU 0", seconds=3.0),
        row("failed", place="GPU 1", seconds=1.0, why="ValueError: a < b"),
        row("running", place="GPU 1", began_at=5.0),
        row("done", seconds=9.0, is_found=True),
        row("waiting"),
    ]
    bundle = SweepTable("sweep of train", rows, began_at=0.0).bundle(7.0, hint="Stop: interrupt the kernel")
    assert bundle["text/plain"].splitlines() == [
        "sweep of train: 1 running, 1 waiting, 2 done, 1 failed, 7 s",
        "1. lr=<0.1>: done on GPU 0, acc 0.7500, 3 s",
        "2. lr=<0.1>: failed on GPU 1, acc 0.7500, 1 s: ValueError: a < b",
        "3. lr=<0.1>: running on GPU 1, acc 0.7500, 2 s",
        "4. lr=<0.1>: done earlier, acc 0.7500, 9 s",
        "5. lr=<0.1>: waiting",
    ]
    page = bundle["text/html"]
    assert "lr=&lt;0.1&gt;" in page
    assert "ValueError: a &lt; b" in page
    assert "Stop: interrupt the kernel" in page
    assert page.count("<tr>") == 6
    assert 'aria-label="3 of 5 runs are over"' in page


def test_of_very_many_rows_those_that_go_on_and_those_that_failed_stay() -> None:
    rows = [row("done", f"at={at}") for at in range(150)]
    rows[3] = row("failed", "at=3")
    rows += [row("running", "at=150", place="slot 1"), *(row("waiting", f"at={at}") for at in range(151, 300))]
    text = SweepTable("sweep of train", rows, began_at=0.0).bundle(1.0)["text/plain"]
    lines = text.splitlines()
    assert len(lines) == 62
    assert lines[-1] == "… 240 more runs"
    assert any("at=3: failed" in line for line in lines)
    assert any("at=150: running" in line for line in lines)
    assert any("at=149: done" in line for line in lines)


def test_a_view_in_a_cell_updates_one_display_and_leaves_a_picture() -> None:
    screen, now = Recorded(), [10.0]
    table = SweepTable("sweep of train", [row("running", began_at=10.0), row("waiting")], began_at=10.0)
    view = SweepView(table, screen, DisplaySlot("cell"), is_live=True, clock=lambda: now[0])
    for now[0] in (10.0, 10.1, 11.0):
        view.tick(now[0])
    assert [message["kind"] for message in screen.messages] == ["display", "update"]
    table.rows[0].word = table.rows[1].word = "done"
    view.ended(1)
    view.end()
    assert "image/png" in screen.messages[-1]["data"]
    assert screen.messages[-1]["data"]["text/plain"].startswith("sweep of train: 2 done")
    assert screen.text == ""


def test_without_a_display_each_run_is_a_line_when_it_ends() -> None:
    screen = Recorded()
    table = SweepTable("sweep of train", [row("done", seconds=2.0), row("done", is_found=True)], began_at=0.0)
    view = SweepView(table, screen, None, is_live=False, clock=lambda: 3.0)
    view.tick(0.05)
    view.ended(1)
    view.ended(2)
    view.end()
    assert screen.text == "1. lr=<0.1>: done, acc 0.7500, 2 s\n"
    assert screen.messages == []
