from __future__ import annotations

import base64
import gc
import io
import subprocess
import sys
import weakref

import matplotlib
import pytest
from PIL import Image

from nbaccel.events import Loss, OutOfMemory, Phase
from nbaccel.view.figure import draw, picture
from nbaccel.view.history import History
from nbaccel.view.state import Facts
from view.runs import a_run


def titles(history: History, **options: object) -> list[str]:
    return [axes.get_title(loc="left") for axes in draw(history, **options).axes]  # type: ignore[arg-type]


def test_the_figure_shows_loss_memory_and_speed() -> None:
    loss = a_run().phase.series["loss"].latest
    assert titles(a_run()) == [f"loss {loss:#.4g}", "memory, peak 11.2 GB", "speed, 10.0 steps/s"]


def test_each_rank_and_the_mean_are_in_the_legend() -> None:
    axes = draw(a_run(3, 50)).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1", "rank 2", "mean"]  # type: ignore[union-attr]
    assert len({(line.get_color(), line.get_dash_capstyle(), line.get_linestyle()) for line in axes.lines}) >= 3


def test_the_limit_of_a_device_is_a_line_and_memory_starts_at_zero() -> None:
    axes = draw(a_run()).axes[1]
    assert [text.get_text() for text in axes.texts] == ["limit 14.7 GB"]
    assert axes.get_ylim()[0] == 0


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
    assert titles(History(2)) == ["no numbers were logged", "memory", "speed"]


def test_chosen_curves_that_were_never_logged_do_not_break_the_picture_that_is_kept() -> None:
    history = a_run()
    assert titles(history, facts=Facts(plots=("f1", "acc")))[0].startswith("acc")


@pytest.mark.parametrize(("world_size", "steps"), [(1, 3), (2, 500), (8, 1000)])
def test_the_png_is_small_and_sharp(world_size: int, steps: int) -> None:
    kept = picture(draw(a_run(world_size, steps), title="Cell In[5]: done in 0:50"), "loss 0.5")
    data = kept.png
    assert len(data) < 60_000
    image = Image.open(io.BytesIO(data))
    assert (image.format, image.size) == ("PNG", (1504, 432))
    assert (kept.width, kept.height) == (902, 259)


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


def test_a_notebook_s_style_is_neither_used_nor_changed() -> None:
    with matplotlib.rc_context({"axes.facecolor": "black", "text.usetex": True, "font.size": 30.0}):
        figure = draw(a_run(1, 5))
        assert matplotlib.rcParams["font.size"] == 30.0
    assert figure.axes[0].get_facecolor() == (1.0, 1.0, 1.0, 1.0)


def test_pictures_need_no_pyplot_and_panels_no_matplotlib() -> None:
    code = """
import sys
from nbaccel.view.history import History
from nbaccel.view.panel import Panel
Panel(History(1)).bundle(1.0)
assert "matplotlib" not in sys.modules, "the panel imports matplotlib"
from nbaccel.view.figure import draw, picture
picture(draw(History(1)), "")
assert "matplotlib.pyplot" not in sys.modules, "the figure imports pyplot"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
