from __future__ import annotations

import math
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from display.runs import a_run
from nbaccel.base.events import Loss, Metric, OutOfMemory
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState, line
from nbaccel.features.panel.figure import draw
from nbaccel.features.panel.panel import Panel

FACTS = RunFacts("Cell In[5]", "2 x Tesla T4, fp16", ("GPU 0", "GPU 1"))
DONE = RunState("done", "done in 50 s, 500 steps")


def tree(html: str) -> ElementTree.Element:
    """The fragment, which is also well-formed XML."""
    return ElementTree.fromstring(html)


def words(html: str) -> str:
    return " ".join(" ".join(tree(html).itertext()).split())


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("state", [RunState("running"), DONE], ids=lambda state: state.word)
def test_the_panel_is_well_formed_and_carries_no_script(world_size: int, state: RunState) -> None:
    bundle = Panel(a_run(world_size, 200), FACTS).bundle(20.0, state)
    html = bundle["text/html"]
    assert sorted(bundle) == ["text/html", "text/plain"]
    assert not re.search(r"<script|javascript:|\bon\w+=|https?://|@import|url\(", html)
    panel = tree(html.partition("</style>")[2])
    assert panel.attrib["class"] == "nbaccel"
    rows = panel.findall(".//tbody/tr")
    assert [row.findtext("th", "").strip() or row.find("th/svg").tail.strip() for row in rows] == [  # type: ignore[union-attr]
        str(rank) for rank in range(world_size)
    ]
    assert {head.attrib["scope"] for head in panel.iter("th")} == {"col", "row"}


def test_its_height_depends_on_the_number_of_ranks_alone() -> None:
    """Its parts have heights of their own; a browser adds them up (tests/browser/test_panel.py)."""
    heights = [
        re.findall(r'style="(?:max-)?height:(\d+)px"', Panel(history, FACTS).html(1.0))
        for history in (History(2), a_run(2, 1), a_run(2, 300))
    ]
    assert [found[0] for found in heights] == ["150"] * 3
    assert [found[-1] for found in heights] == ["64"] * 3
    assert 'class="ranks" style="max-height:196px"' in Panel(History(64), FACTS).html(1.0)


def test_a_run_that_is_over_keeps_no_empty_place_for_curves() -> None:
    running, done = (Panel(History(2), FACTS).html(3.0, state) for state in (RunState("running"), DONE))
    assert "no numbers yet" in words(running)
    assert list(tree(done).iter("figure")) == []
    assert "no number was reported" in words(done)


def test_one_line_is_drawn_where_all_ranks_logged_the_same() -> None:
    history = History(2)
    for step in range(5):
        for rank in (0, 1):
            history.feed(rank, step, Metric({"acc": step / 5}, step))
    panel = tree(Panel(history, FACTS).html(5.0))
    plot = next(svg for svg in panel.iter("svg") if svg.attrib.get("role") == "img")
    assert [path for path in plot if "stroke-dasharray" in path.attrib] == []


def test_a_person_who_hears_it_gets_the_numbers() -> None:
    history = a_run()
    panel = tree(Panel(history, FACTS).html(50.0))
    plots = [svg for svg in panel.iter("svg") if svg.attrib.get("role") == "img"]
    loss = history.phase.series["loss"]
    assert [svg.attrib["aria-label"] for svg in plots] == [
        f"loss {loss.latest:#.4g} (rank 0 {loss.last[0]:#.4g}, rank 1 {loss.last[1]:#.4g}, "
        f"lowest {loss.lowest:#.4g}, highest {loss.highest:#.4g})",
        "acc 0.8105 (lowest 0, highest 0.8105)",
    ]
    assert panel.find("progress").attrib["aria-label"] == "epoch 1/3, batch 500/500, step 500, 33 %"  # type: ignore[union-attr]


def test_the_end_is_a_sentence_that_is_announced_once() -> None:
    running, done = (tree(Panel(a_run(), FACTS).html(50.0, state)) for state in (RunState("running"), DONE))
    assert [e.tag for e in running.iter() if e.attrib.get("role") == "status"] == []
    assert ["".join(e.itertext()) for e in done.iter() if e.attrib.get("role") == "status"] == [DONE.sentence]


@pytest.mark.parametrize("word", ["done", "failed", "stopped"])
def test_the_state_is_a_word_and_a_sign_not_a_colour_alone(word: str) -> None:
    assert re.search(rf"[✓✕■] {word}", words(Panel(a_run(), FACTS).html(50.0, RunState(word, f"{word} in 50 s"))))


def test_the_curves_that_were_chosen_are_drawn() -> None:
    chosen = ("acc", "loss", "f1", "bleu", "rouge")
    html = Panel(a_run(), RunFacts(plots=chosen)).html(50.0)
    assert [figure.findtext("div/b", "").split()[0] for figure in tree(html).iter("figure")] == list(chosen)
    assert "nothing yet; there is loss, acc" in words(html)


def test_a_chosen_metric_is_found_under_the_names_of_its_parts_and_what_is_not_there_is_said() -> None:
    history = History(1)
    for step in range(4):
        history.feed(0, 1.0 + step, Metric({"loss": 1.0, "train/acc": step / 10, "val/acc": step / 9}, step))
    facts = RunFacts(plots=("acc",))
    (figure,) = tree(Panel(history, facts).html(5.0)).iter("figure")
    assert [each.text for each in figure.iter("b")] == ["train/acc 0.3000", "● val/acc 0.3333"]
    assert [axes.get_title(loc="left") for axes in draw(history, facts).axes][:1] == ["train/acc 0.3000"]
    assert [axes.get_title(loc="left") for axes in draw(history, RunFacts(plots=("f1",))).axes][:1] == [
        "--plot f1: nothing is called so; there is loss, train/acc, val/acc"
    ]
    ended = line(history, RunFacts(plots=("loss", "f1")), 5.0, RunState("done", "done in 5 s"))
    assert ended.endswith("; --plot f1: nothing is called so; there is loss, train/acc, val/acc")


def test_a_logged_accuracy_is_drawn_beside_the_loss_and_other_numbers_are_written() -> None:
    history = a_run()
    history.feed(0, 50.0, Metric({"lr": 0.5}, 500))
    html = Panel(history, FACTS).html(50.0)
    assert [figure.findtext("div/b", "").split()[0] for figure in tree(html).iter("figure")] == ["loss", "acc"]
    assert "lr 0.5000" in words(html)


def test_names_of_the_user_are_text_not_html() -> None:
    history = History(1)
    history.feed(0, 0.1, Loss(1.0, 0))
    history.feed(0, 0.1, Metric({'top "5"': 0.5}, 0))
    html = Panel(history, RunFacts("<b>", 'a"b', plots=("loss", "<i>&", 'top "5"'))).html(1.0)
    assert "<i>&" in words(html)
    assert any(svg.attrib.get("aria-label", "").startswith('top "5"') for svg in tree(html).iter("svg"))
    assert tree(html).attrib["aria-label"] == "<b>"


def test_ranks_are_told_apart_by_dashes_too() -> None:
    panel = tree(Panel(a_run(8, 50), FACTS).html(5.0))
    plot = next(svg for svg in panel.iter("svg") if svg.attrib.get("role") == "img")
    lines = [
        (path.attrib["stroke"], path.attrib["stroke-dasharray"]) for path in plot if "stroke-dasharray" in path.attrib
    ]
    assert len(lines) == len(set(lines)) == 8


def test_a_loss_that_is_no_number_is_said_where_it_is_drawn() -> None:
    history = History(1)
    for step in range(4):
        history.feed(0, 1.0, Loss(math.nan if step == 3 else 1.0, step))
    assert "loss nan not finite since step 3" in words(Panel(history, FACTS).html(1.0))
    only = History(1)
    only.feed(0, 1.0, Loss(math.inf, 0))
    assert "not finite since step 0" in words(Panel(only, FACTS).html(1.0))


def test_memory_that_ran_out_is_marked_in_the_plot_and_said() -> None:
    history = a_run()
    history.feed(1, 50.0, OutOfMemory(250, "forward", 64, 32, 64))
    html = Panel(history, FACTS).html(50.0)
    assert "step 250: rank 1 ran out of memory" in words(html)
    assert html.count('stroke="var(--bad)"') == 2


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9, 1e12])
def test_a_flat_curve_can_be_drawn(value: float) -> None:
    history = History(1)
    for step in range(3):
        history.feed(0, 1.0, Loss(value, step))
    assert tree(Panel(history, FACTS).html(1.0)) is not None


def test_one_point_is_a_dot() -> None:
    history = History(1)
    history.feed(0, 1.0, Loss(1.0, 7))
    assert 'd="M0 500l0 0"' in Panel(history, FACTS).html(1.0)


def test_a_frame_is_small() -> None:
    """About 30 kB per second at two frames per second (a panel waits longer after a larger one), and a saved notebook
    of less than 100 kB."""
    for world_size, most in ((2, 13_000), (8, 16_500)):
        bundle = Panel(a_run(world_size, 1_000), FACTS).bundle(100.0)
        assert sum(map(len, bundle.values())) < most


def seconds_of(function: Callable[[], object]) -> float:
    def once() -> float:
        began = time.process_time()
        function()
        return time.process_time() - began

    return min(once() for _ in range(20))


@pytest.mark.timed
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_frame_after_a_million_steps_takes_no_longer_than_a_frame(world_size: int) -> None:
    history = History(world_size)
    for step in range(1_000_000 - 1_000, 1_000_000):  # as full as a curve can be, which steps before do not change
        for rank in range(world_size):
            history.feed(rank, step, Loss(1.0 / (step + 1), step))
    panel = Panel(history, FACTS)
    assert history.phase.series["loss"].buckets > 500
    assert seconds_of(lambda: panel.bundle(100.0)) < 0.05  # 3 ms on an idle machine
