"""How a run is shown as text, without a notebook: lines on a screen that only remembers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from display.runs import Clock, Paper, report
from nbaccel.base.events import Restarted
from nbaccel.base.hardware import Platform
from nbaccel.display import views
from nbaccel.display.attendance import runs_unattended
from nbaccel.display.run_view import RunView
from nbaccel.display.summary import RunFacts
from nbaccel.display.views import PeriodicText, Views
from nbaccel.errors import FeatureMissing

FACTS = RunFacts("Cell In[5]")

NOTICE = "nbaccel: loader: each of 8 batches split over 2 ranks\n"


def test_the_first_line_takes_the_first_notice_and_no_attempt_repeats_one() -> None:
    paper = Paper()
    shown = RunView(paper, 2, FACTS, Clock())
    shown.head("2 ranks on CPU")
    assert paper.text == "", "the ranks have said nothing"
    for _ in range(2):
        shown.write("stdout", f"{NOTICE}epoch 0\n")
    assert paper.text == "2 ranks on CPU; loader: each of 8 batches split over 2 ranks\nepoch 0\nepoch 0\n"


@pytest.mark.parametrize(
    ("stream", "text"), [("stdout", "mine\n"), ("stderr", NOTICE), ("stdout", f"nbaccel: {'long ' * 30}\n")]
)
def test_the_first_line_stands_alone_above_anything_else(stream: str, text: str) -> None:
    paper = Paper()
    shown = RunView(paper, 2, FACTS, Clock())
    shown.head("2 ranks on CPU")
    shown.write(stream, text)
    assert paper.text == f"2 ranks on CPU\n{text}"


def test_the_first_line_comes_at_the_end_of_a_silent_run_and_at_once_where_nothing_else_shows_it() -> None:
    paper = Paper()
    silent = RunView(paper, 2, FACTS, Clock())
    silent.head("2 ranks on CPU")
    silent.end("done", 0.5)
    assert paper.text == "2 ranks on CPU\n"
    PeriodicText(paper, 2, FACTS, clock=Clock()).head("1 rank on CPU")
    assert paper.text.endswith("1 rank on CPU\n")


def test_a_run_that_is_short_and_has_no_numbers_leaves_nothing() -> None:
    paper, clock = Paper(), Clock()
    shown = PeriodicText(paper, 2, FACTS, clock=clock)
    clock.now += 1.0
    shown.tick(clock.now)
    shown.end("done", 1.0)
    assert (paper.text, paper.messages) == ("", [])


def test_a_line_about_the_run_never_stands_behind_a_bar_or_unfinished_text() -> None:
    paper, clock = Paper(), Clock()
    shown = PeriodicText(paper, 1, FACTS, clock=clock)
    shown.write("stderr", "\r 10%|#")
    shown.write("stderr", "\r 20%|##")
    report(shown, clock, 30.0)
    assert paper.text.startswith("\r 10%|#\r 20%|##\r       \repoch 1,")
    shown.write("stdout", "no end")
    report(shown, clock, 30.0)
    assert "\nno end\nepoch 1," in paper.text


def test_a_line_comes_every_half_minute_and_one_at_the_end() -> None:
    paper, clock = Paper(), Clock()
    shown = PeriodicText(paper, 1, FACTS, clock=clock)
    report(shown, clock, 95.0)
    shown.end("stopped", 95.0)
    first, *_, last = lines = paper.text.splitlines()
    assert len(lines) == 4
    assert first.startswith("epoch 1, batch 300/1,000, step 300, 30 % of this epoch, loss")
    assert last.startswith("stopped after 1 min 35 s, 950 steps, epoch 1, batch 950/1,000")
    assert paper.messages == []


def test_a_script_sees_what_its_ranks_print_and_a_terminal_lines(capsys: pytest.CaptureFixture[str]) -> None:
    views = Views()
    script = views.show(None, 1, FACTS, Platform.SCRIPT)
    assert type(script) is RunView
    script.write("stdout", "hi\n")
    script.end("done", 100.0)
    assert capsys.readouterr().out == "hi\n"
    assert isinstance(views.show(_Shell(), 1, FACTS, Platform.SCRIPT), PeriodicText)


class _Shell:
    display_pub = payload_manager = None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/usr/bin/python3\0/usr/bin/jupyter-nbconvert\0--execute\0a.ipynb", True),
        ("python\0-m\0nbconvert\0--to\0notebook", True),
        ("/opt/python\0/opt/bin/papermill\0a.ipynb\0b.ipynb", True),
        ("/usr/bin/python3\0/usr/bin/jupyter-execute\0a.ipynb", True),
        ("/usr/bin/python3\0/usr/bin/jupyter-lab\0--port=8888\0--no-browser\0papermill.ipynb", False),
        ("/usr/bin/python3\0-m\0jupyterlab", False),
    ],
)
def test_programs_that_execute_notebooks_are_known(tmp_path: Path, command: str, expected: bool) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cmdline").write_text(command)
    assert runs_unattended(Platform.JUPYTER, parent=7, root=tmp_path) is expected


def test_kaggle_says_that_nobody_watches() -> None:
    assert runs_unattended(Platform.KAGGLE_BATCH)
    assert not runs_unattended(Platform.KAGGLE, parent=7, root=Path("/nowhere"))


def test_the_end_counts_all_attempts_and_names_the_one_whose_steps_it_says() -> None:
    paper, clock = Paper(), Clock()
    shown = PeriodicText(paper, 1, FACTS, clock=clock)
    for _ in range(2):
        shown.feed(0, clock.now, Restarted("memory ran out"))
        clock.now += 2.0
        report(shown, clock, 4.0)
    shown.end("done", shown.elapsed_s)
    assert re.search(r"^done in 12 s, 40 steps in the last of 3 attempts, loss", paper.text, re.M)


def test_a_notebook_without_what_draws_shows_lines_and_is_told_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(name: str) -> None:
        raise FeatureMissing(f"{name} belongs to a folder that is not there")

    monkeypatch.setattr(views, "feature", lacks)
    monkeypatch.setattr(views, "is_notebook_kernel", lambda: True)
    views._notebook_views.cache_clear()
    try:
        for each in (Views(), Views()):
            for _ in range(2):
                with each.steered(_Shell()) as (frames, beside):
                    assert type(each.show(_Shell(), 1, FACTS, Platform.JUPYTER, frames=frames)) is PeriodicText
                assert beside == []
            each.close()
    finally:
        views._notebook_views.cache_clear()
    assert capsys.readouterr().out == "the panel of a run belongs to a folder that is not there\n"


def test_text_that_is_asked_for_loads_nothing_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "is_notebook_kernel", lambda: True)
    monkeypatch.setattr(views, "_notebook_views", lambda: pytest.fail("something that draws was asked for"))
    shown = Views()
    with shown.steered(_Shell(), is_plain=True):
        assert type(shown.show(_Shell(), 1, FACTS, Platform.JUPYTER, is_plain=True)) is PeriodicText
