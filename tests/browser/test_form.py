"""The form in a browser: by mouse, by keyboard alone, in both themes, and as axe-core sees it."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, expect

from browser.conftest import OpenNotebook
from browser.page import FrontEnd, NotebookPage

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FORM = ".nbaccel-form"
SHOW = "%load_ext nbaccel\n%accelerate config"
RUN = "%%accelerate --cpu\n1"

ON_TWO_T4 = """
%load_ext nbaccel
from nbaccel.base.hardware import Gpu, Survey
gpus = tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 10**10, 0, (7, 5)) for index in range(2))
get_ipython().magics_manager.registry["AccelerateMagics"].session.survey = lambda: Survey(gpus=gpus)
%accelerate config
"""


def form(notebook: NotebookPage) -> Locator:
    notebook.run(0)
    shown = notebook.page.locator(FORM)
    shown.wait_for()
    return shown


@pytest.mark.full
def test_choices_by_mouse_change_what_the_next_run_prints(open_notebook: OpenNotebook, front_end: FrontEnd) -> None:
    notebook = open_notebook(SHOW, RUN, front_end=front_end)
    shown = form(notebook)
    shown.get_by_label("Ranks").fill("2")
    shown.get_by_role("radio", name="bf16").click()
    shown.get_by_label("Batches per optimizer step").fill("4")
    shown.get_by_label("Seed").fill("7")
    shown.get_by_label("Seed").blur()
    expect(shown.get_by_text("32 x 2 x 4 = 256")).to_be_visible()
    expect(shown.locator("code")).to_have_text("%%accelerate -n 2 -p bf16 -a 4 --seed 7")
    line = notebook.run(1).split("\n")[0]
    assert line == "2 ranks on CPU, seed 7; bf16, accumulate 4"


@pytest.mark.full
def test_the_keyboard_alone_is_enough(open_notebook: OpenNotebook, front_end: FrontEnd) -> None:
    """Tab goes through the fields from above, Space chooses and presses; the front end must not take a key."""
    notebook = open_notebook(SHOW, RUN, front_end=front_end)
    shown = form(notebook)
    press, type_ = notebook.page.keyboard.press, notebook.page.keyboard.type
    shown.get_by_label("Ranks").focus()
    type_("2")
    press("Tab")
    for _ in range(3):  # auto, no, fp16, bf16
        press("Tab")
    press("Space")
    expect(shown.get_by_role("radio", name="bf16")).to_be_checked()
    for _ in range(3):  # the strategy: auto, ddp, fsdp
        press("Tab")
    press("Tab")
    expect(shown.get_by_label("Batches per optimizer step")).to_be_focused()
    press("ArrowUp")
    press("ArrowUp")
    press("ArrowUp")
    press("Tab")
    type_("7")
    press("Tab")  # out of memory: shrink, stop
    press("Tab")
    press("Tab")  # checkpoint every
    press("Tab")
    type_("8")  # in the place of 32, which Tab has selected
    press("Tab")
    expect(shown.get_by_role("button", name="Save to nbaccel.toml")).to_be_focused()
    expect(shown.get_by_text("8 x 2 x 4 = 64")).to_be_visible()
    press("Space")
    expect(shown.get_by_role("status")).to_contain_text("nbaccel.toml: num-processes=2 mixed-precision=bf16 accumul")
    line = notebook.run(1).split("\n")[0]
    assert line == "2 ranks on CPU, seed 7; bf16, accumulate 4"


@pytest.mark.full
def test_a_wrong_seed_is_answered_in_the_form(open_notebook: OpenNotebook) -> None:
    shown = form(open_notebook(SHOW))
    shown.get_by_label("Seed").fill("soon")
    shown.get_by_label("Seed").press("Enter")
    expect(shown.get_by_role("alert")).to_have_text("Not taken: --seed: a seed lies in 0..4294867295; got 'soon'.")


@pytest.mark.full
def test_a_second_display_shows_the_same(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(SHOW, "import nbaccel; nbaccel.panel()", "%accelerate config accumulate=4")
    first = form(notebook)
    notebook.run(1)
    second = notebook.output(1).locator(FORM)
    first.first.get_by_label("Seed").fill("7")
    first.first.get_by_label("Seed").blur()
    expect(second.get_by_label("Seed")).to_have_value("7")
    notebook.run(2)
    expect(first.first.get_by_label("Batches per optimizer step")).to_have_value("4")


@pytest.mark.full
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(open_notebook: OpenNotebook, front_end: FrontEnd, is_dark: bool) -> None:
    notebook = open_notebook(ON_TWO_T4, front_end=front_end, is_dark=is_dark)
    shown = form(notebook)
    expect(shown.get_by_text("bf16 (not here: Tesla T4 has no bf16 units)")).to_be_visible()
    shown.get_by_label("Seed").fill("soon")
    shown.get_by_label("Seed").press("Enter")
    expect(shown.get_by_role("alert")).to_contain_text("Not taken")
    assert notebook.grave_findings(FORM) == []
