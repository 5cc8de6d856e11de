"""Curves of training and of held-out data in one plot, and noisy curves that are smoothed."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ElementTree

import pytest

from display.runs import a_run
from nbaccel.base.events import Loss, Metric
from nbaccel.display.history import History
from nbaccel.display.series import Line
from nbaccel.display.summary import RunFacts
from nbaccel.features.panel.figure import PAPER, draw
from nbaccel.features.panel.panel import Panel
from nbaccel.features.panel.shared_plots import held_out_beside, plots_of, smoothed


@pytest.mark.parametrize(
    ("training", "held_out"),
    [
        ("loss", "val_loss"),
        ("loss", "eval_loss"),
        ("loss", "loss/val"),
        ("train/loss", "val/loss"),
        ("train_loss", "valid_loss"),
        ("Loss/train", "Loss/test"),
        ("training loss", "validation loss"),
        ("train_loss_step", "val_loss"),
        ("train_loss_epoch", "val_loss_epoch"),
        ("acc", "val_acc"),
        ("train-top-5", "dev-top-5"),
        ("train.mlm.loss", "eval.mlm.loss"),
    ],
)
def test_one_metric_of_training_and_held_out_data_shares_a_plot(training: str, held_out: str) -> None:
    assert held_out_beside(training, ["other", held_out, training]) == [held_out]
    assert held_out_beside(held_out, ["other", held_out, training]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [("loss", "train_loss"), ("loss", "val_acc"), ("val_loss", "test_loss"), ("acc", "accuracy"), ("test", "loss")],
)
def test_other_names_have_plots_of_their_own(one: str, other: str) -> None:
    assert held_out_beside(one, [one, other]) == []
    assert plots_of([one, other], [one, other]) == [(one, []), (other, [])]


def test_of_several_at_most_two_share_a_plot_and_none_is_drawn_twice() -> None:
    names = ["loss", "val_loss", "test_loss", "dev_loss"]
    assert plots_of(["val_loss", "loss"], names) == [("loss", ["val_loss", "test_loss"])]
    assert plots_of(["loss", "dev_loss"], names) == [("loss", ["val_loss", "test_loss"]), ("dev_loss", [])]


def a_validated(world_size: int = 1) -> History:
    history = a_run(world_size, 200)
    for step in range(49, 200, 50):
        history.feed(0, step / 10, Metric({"val_loss": 3.0 - step / 100, "val_acc": 0.5}, step))
    return history


def test_the_panel_and_the_picture_draw_both_in_one_plot() -> None:
    history = a_validated()
    html = Panel(history, RunFacts("Cell In[5]", plots=("loss",))).html(20.0)
    (figure,) = ElementTree.fromstring(html).iter("figure")
    strong = ["".join(each.itertext()) for each in figure.iter("b")]
    assert strong[0].startswith("loss 0.")
    assert strong[1:] == ["● val_loss 1.010"]
    (svg,) = figure.iter("svg")
    assert "val_loss 1.010" in svg.attrib["aria-label"]
    of_held_out = [path for path in svg if path.attrib.get("stroke") == "var(--val)"]
    assert len(of_held_out) == 2  # a line and its dots
    assert of_held_out[1].attrib["d"].count("M") == 4
    foot = html.rpartition('<p class="row soft fits">')[2]
    assert "val_acc 0.5000" in foot
    assert "val_loss" not in foot
    axes = draw(history, RunFacts("Cell In[5]"), names=["loss", "val_loss"]).axes
    assert [each.get_title(loc="left").split()[0] for each in axes][:2] != ["loss", "val_loss"]
    assert "val_loss 1.010" in [text.get_text() for text in axes[0].get_legend().get_texts()]


def test_a_held_out_value_that_is_higher_than_all_others_fits_into_the_plot() -> None:
    history = History(1)
    for step in range(10):
        history.feed(0, 0.1, Loss(1.0, step))
    history.feed(0, 1.0, Metric({"val_loss": 5.0}, 12))
    html = Panel(history, RunFacts()).html(1.0)
    axis = ElementTree.fromstring(html).find(".//div[@class='axis']")
    assert axis is not None
    assert [span.text for span in axis] == ["5", "1"]
    steps = ElementTree.fromstring(html).find(".//div[@class='steps']")
    assert steps is not None
    assert [span.text for span in steps] == ["step 0", "12"]


def test_a_held_out_curve_that_is_not_finite_is_no_trouble() -> None:
    history = a_validated()
    history.feed(0, 1.0, Metric({"test_loss": math.nan}, 10))
    assert "test_loss" in Panel(history, RunFacts()).html(1.0)
    assert draw(history, RunFacts()).axes


def line_of(values: list[float]) -> Line:
    return Line(tuple(range(len(values))), *[tuple(values)] * 3)


def test_only_noise_is_smoothed() -> None:
    noise = random.Random(0)
    falling = [2.0 * math.exp(-step / 50) for step in range(160)]
    noisy = [value + 0.5 * noise.gauss(0, 1) for value in falling]
    assert smoothed(line_of(falling)) is None
    assert smoothed(line_of([math.sin(step / 4) for step in range(160)])) is None
    assert smoothed(line_of([1.0] * 160)) is None
    assert smoothed(line_of(noisy[:20])) is None
    smooth = smoothed(line_of(noisy))
    assert smooth is not None
    far = [abs(one - other) for one, other in zip(smooth.mean, falling, strict=True)]
    assert sum(far) / len(far) < 0.2
    assert smooth.step == tuple(range(160))


def test_a_noisy_curve_is_drawn_pale_below_a_smooth_one_and_its_numbers_stay() -> None:
    noise, history = random.Random(0), History(1)
    for step in range(400):
        history.feed(0, step / 10, Loss(2.0 + noise.gauss(0, 0.5), step))
    html = Panel(history, RunFacts()).html(40.0)
    (svg,) = ElementTree.fromstring(html).iter("svg")
    drawn = [path.attrib for path in svg if path.attrib.get("stroke") == "var(--r0)"]
    assert [path.get("opacity") for path in drawn] == [".35", None]
    assert f"loss {history.phase.series['loss'].latest:#.4g}" in html
    alphas = [each.get_alpha() for each in draw(history, RunFacts()).axes[0].lines]
    assert alphas == [0.35, 1.0]


@pytest.mark.parametrize(
    ("colour", "ground"),
    [(PAPER.held_out, "#ffffff")],
)
def test_the_colour_of_held_out_data_is_visible(colour: str, ground: str) -> None:
    def light(text: str) -> float:
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(colour), light(ground)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 3.0
