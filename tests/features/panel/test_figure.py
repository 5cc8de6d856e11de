from __future__ import annotations

import base64
import gc
import io
import itertools
import random
import subprocess
import sys
import weakref
from typing import Any

import matplotlib
import numpy
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from display.runs import a_run
from nbaccel.base.events import Loss, Memory, Metric, OutOfMemory, Phase, Progress
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts
from nbaccel.features.panel.figure import PAPER, draw, picture
from nbaccel.features.panel.run_figure import _few_colours

GIGA = 1_000_000_000
FAILED = (
    "Cell In[5]: failed after 2 s, 30 steps: rank 1, AttributeError: 'Accelerator' object has no attribute "
    "'proces_index', 2 ranks on the CPU, seed 878899"
)


def titles(history: History, **options: object) -> list[str]:
    return [axes.get_title(loc="left") for axes in draw(history, **options).axes]  # type: ignore[arg-type]


def test_the_figure_shows_loss_memory_and_speed() -> None:
    loss = a_run().phase.series["loss"].latest
    assert titles(a_run()) == [f"loss {loss:#.4g}", "acc 0.8105", "memory, peak 11.2 GB", "speed, 10.0 steps/s"]


def test_each_rank_and_the_mean_are_in_the_legend() -> None:
    axes = draw(a_run(3, 50)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1", "rank 2", "mean, smooth"]  # type: ignore[union-attr]
    assert len({(line.get_color(), line.get_dash_capstyle(), line.get_linestyle()) for line in axes.lines}) >= 3


def test_the_limit_of_a_device_is_a_line_and_memory_starts_at_zero() -> None:
    axes = draw(a_run()).axes[2]
    assert [text.get_text() for text in axes.texts] == ["limit 14.7 GB"]
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("size", [None, (4.5, 2.7)])
def test_the_title_of_memory_is_not_cut_off(size: tuple[float, float] | None) -> None:
    history = History(2)
    for at in (1.0, 2.0):
        for rank in (0, 1):
            history.feed(rank, at, Memory(120 * GIGA, (123 + rank) * GIGA, 140 * GIGA))
    figure = draw(history, size=size)
    FigureCanvasAgg(figure).draw()
    (title,) = [text for text in figure.axes[-1].findobj(Text) if "peak" in text.get_text()]
    assert title.get_text() == "memory, peak 123.0 to 124.0 GB"
    assert 0 <= title.get_window_extent().x0 <= title.get_window_extent().x1 <= figure.bbox.x1


def test_where_memory_ran_out_is_marked() -> None:
    history = a_run()
    history.feed(1, 50.0, OutOfMemory(250, "forward", 64, 32, 64))
    labels = [text.get_text() for text in draw(history).axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["rank 0", "rank 1", "mean", "out of memory"]


def test_curves_can_be_chosen_and_an_unknown_one_is_refused() -> None:
    assert [title.split()[0] for title in titles(a_run(), names=["acc", "loss"])][:2] == ["acc", "loss"]
    with pytest.raises(KeyError, match="no curve is called 'f1'; this run has: loss, acc"):
        draw(a_run(), names=["f1"])


def test_phases_are_drawn_beside_each_other() -> None:
    history = History(1)
    for fold in (1, 2):
        history.feed(0, fold, Phase(f"fold {fold}"))
        for step in range(5):
            history.feed(0, fold, Loss(fold / (step + 1), step))
    labels = [text.get_text() for text in draw(history).axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["fold 1", "fold 2"]


def test_a_run_without_numbers_has_a_figure_that_says_so() -> None:
    assert titles(History(2)) == ["no numbers were logged"]


def test_chosen_curves_that_were_never_logged_do_not_break_the_picture_that_is_kept() -> None:
    history = a_run()
    assert titles(history, facts=RunFacts(plots=("f1", "acc")))[0].startswith("acc")


@pytest.mark.parametrize(("world_size", "steps"), [(1, 3), (2, 500), (8, 1000)])
def test_the_png_is_small_and_sharp(world_size: int, steps: int) -> None:
    kept = picture(draw(a_run(world_size, steps), title="Cell In[5]: done in 50 s"), "loss 0.5")
    data = kept.png
    assert len(data) < 60_000
    image = Image.open(io.BytesIO(data))
    assert (image.format, image.size) == ("PNG", (1504, 432))
    assert (kept.width, kept.height) == (902, 259)


def test_no_ticks_of_a_picture_are_laid_out_to_place_a_title(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[Axis] = []
    locations = Axis.get_majorticklocs

    def counted(axis: Axis) -> Any:
        laid_out.append(axis)
        return locations(axis)

    monkeypatch.setattr(Axis, "get_majorticklocs", counted)
    figure = draw(a_run(2, 500), title="Cell In[5]: done in 50 s")
    assert len(figure.axes) == 4
    picture(figure, "loss 0.5")
    assert len(laid_out) <= 22  # 43 where titles and all labels look for their place


def test_few_colours_are_those_of_all_pixels() -> None:
    pixels = numpy.zeros((4, 8, 4), dtype=numpy.uint8)
    pixels[:, :, 3] = 255
    pixels[1, 1] = pixels[2, 5] = (3, 1, 2, 255)  # as good as the ground
    pixels[3, 3:6] = (200, 40, 80, 128)
    image = _few_colours(pixels).convert("RGBA")
    seen = numpy.asarray(image).astype(int)
    assert abs(seen - pixels).max() <= 3
    assert len(set(map(tuple, seen.reshape(-1, 4)))) == 2
    assert tuple(seen[3, 3]) == (200, 40, 80, 128)


def test_a_picture_is_kept_with_words() -> None:
    data, metadata = picture(draw(a_run(1, 5)), "loss 0.5")._repr_mimebundle_()
    assert sorted(data) == ["image/png", "text/plain"]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == data["text/plain"] == "loss 0.5"


def test_a_figure_is_freed_with_all_its_pixels_when_its_picture_is_made() -> None:
    gc.disable()
    try:
        figure = draw(a_run(2, 50))
        parts = [weakref.ref(part) for part in (figure, *figure.axes, *figure.axes[0].lines)]
        picture(figure, "")
        del figure
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def many_curves(count: int) -> History:
    """A run with so many noisy curves, "c0" and so on, of two ranks."""
    history, noise = a_run(2, 300), random.Random(1)
    for step in range(300):
        for rank in (0, 1):
            values = {f"c{at}": noise.random() / (step + 1) for at in range(count)}
            history.feed(rank, step / 10, Metric(values, step))
    return history


def overlapping(figure: Any) -> list[str]:
    """What is written of it on something else that is written, or beyond its edge."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    written = []
    for axes in figure.axes:
        texts = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        written += [text for text in texts if text.get_text()]
    if figure.get_suptitle():
        written.append(figure._suptitle)
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in written]
    found = [
        name for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
    ]
    for (name, box), (other, its) in itertools.combinations(boxes, 2):
        if box.x0 < its.x1 and its.x0 < box.x1 and box.y0 < its.y1 and its.y0 < box.y1:
            found.append(f"{name} / {other}")
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_whatever_is_written_has_its_place(count: int) -> None:
    names = [f"c{at}" for at in range(count)]
    figure = draw(many_curves(count), names=names, title=FAILED)
    assert overlapping(figure) == []
    title = figure.get_suptitle().replace("\n", " ")
    assert title == FAILED
    assert [axes.get_title(loc="left").split()[0] for axes in figure.axes] == [*names, "memory,", "speed,"]


def test_a_title_of_any_length_keeps_its_beginning_and_ends_with_dots() -> None:
    figure = draw(a_run(1, 20), title=f"Cell In[5]: failed: {'word ' * 200}")
    assert overlapping(figure) == []
    assert figure.get_suptitle().startswith("Cell In[5]: failed: word")
    assert figure.get_suptitle().endswith(" …")
    assert overlapping(draw(a_run(1, 20), title="x" * 2000)) == []


def test_curves_wrap_into_rows_and_the_file_stays_small() -> None:
    names = [f"c{at}" for at in range(7)]
    figure = draw(many_curves(7), names=names)
    places = [axes.get_subplotspec() for axes in figure.axes[:7]]
    assert [(place.rowspan.start // 2, place.colspan.start) for place in places if place is not None] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0),
    ]  # fmt: skip
    assert len(picture(figure, "").png) < 60_000


def test_a_run_of_less_than_half_a_second_has_no_empty_plot_and_whole_steps() -> None:
    history = History(1)
    for step in range(3):
        history.feed(0, 0.1 * step, Loss(1.0 / (step + 1), step))
        history.feed(0, 0.1 * step, Progress(step + 1, step + 1, 3))
    history.feed(0, 0.2, Memory(3 * GIGA, 4 * GIGA, 24 * GIGA))
    figure = draw(history)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss 0.3333"]
    assert [tick for tick in figure.axes[0].get_xticks() if 0 <= tick <= 2] == [0, 1, 2]
    one = History(1)
    one.feed(0, 0.1, Loss(1.0, 41))
    assert list(draw(one).axes[0].get_xticks()) == [41]


def test_one_line_stands_for_ranks_that_logged_the_same_and_needs_no_legend() -> None:
    history = History(2)
    for step in range(5):
        for rank in (0, 1):
            history.feed(rank, step, Metric({"acc": step / 5, "own": rank + step / 5}, step))
    same, own = draw(history, names=["acc", "own"]).axes[:2]
    assert (len(same.lines), same.get_legend()) == (1, None)
    assert len(own.lines) == 3
    assert own.get_legend() is not None


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_lines_of_a_picture_can_be_read_on_its_own_paper() -> None:
    for colour, least in [(PAPER.ink, 4.5), (PAPER.soft, 4.5), (PAPER.bad, 4.5), *((one, 3.0) for one in PAPER.ranks)]:
        assert 1.05 / (luminance(colour) + 0.05) >= least, colour
    kept = picture(draw(a_run(2, 50)), "")
    image = Image.open(io.BytesIO(kept.png)).convert("RGBA")
    assert image.getchannel("A").getextrema() == (255, 255)
    assert image.getpixel((0, 0)) == (255, 255, 255, 255)


def test_a_figure_as_the_last_line_of_a_cell_is_seen_without_pyplot() -> None:
    figure = draw(a_run(2, 50), size=(5, 2))
    data, metadata = DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    assert metadata["image/png"] == {"width": 480, "height": 192}
    figure.savefig(file := io.BytesIO(), format="pdf")  # showing it has not used it up
    assert file.getvalue().startswith(b"%PDF")


def test_a_notebook_s_style_is_neither_used_nor_changed() -> None:
    with matplotlib.rc_context({"axes.facecolor": "black", "text.usetex": True, "font.size": 30.0}):
        figure = draw(a_run(1, 5))
        assert matplotlib.rcParams["font.size"] == 30.0
    assert figure.axes[0].get_facecolor() == (1.0, 1.0, 1.0, 1.0)


def test_pictures_need_no_pyplot_and_panels_no_matplotlib() -> None:
    code = """
import sys
from nbaccel.display.history import History
from nbaccel.features.panel.panel import Panel
Panel(History(1)).bundle(1.0)
assert "matplotlib" not in sys.modules, "the panel imports matplotlib"
from nbaccel.features.panel.figure import draw, picture
picture(draw(History(1)), "")
assert "matplotlib.pyplot" not in sys.modules, "the figure imports pyplot"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
