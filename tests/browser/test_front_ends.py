"""The ground that the browser tests stand on: kernels of both environments answer in both front ends."""

from __future__ import annotations

import pytest

from browser.conftest import OpenNotebook
from browser.page import FrontEnd
from environments import Environment

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.full
def test_a_cell_shows_what_it_prints_and_returns(open_notebook: OpenNotebook, front_end: FrontEnd) -> None:
    notebook = open_notebook("print('six times seven')\n6 * 7", front_end=front_end)
    assert notebook.run(0) == "six times seven\n42"
    assert notebook.run(0) == "six times seven\n42"


@pytest.mark.full
def test_the_kernel_is_that_of_the_environment(open_notebook: OpenNotebook, environment: Environment) -> None:
    notebook = open_notebook("import sys; print(sys.executable)", environment=environment)
    assert notebook.run(0) == str(environment.python)


@pytest.mark.full
def test_axe_finds_a_button_without_a_name_and_nothing_where_it_has_one(open_notebook: OpenNotebook) -> None:
    bad, good = '<button class="bad"></button>', '<button class="good">Stop</button>'
    notebook = open_notebook(f"from IPython.display import HTML; HTML({bad + good!r})")
    notebook.run(0)
    assert notebook.grave_findings(".bad")[0].startswith("button-name: ")
    assert notebook.grave_findings(".good") == []


@pytest.mark.full
@pytest.mark.parametrize(("is_dark", "background"), [(False, "rgb(255, 255, 255)"), (True, "rgb(17, 17, 17)")])
def test_the_theme_is_the_one_that_was_asked_for(open_notebook: OpenNotebook, is_dark: bool, background: str) -> None:
    notebook = open_notebook("", is_dark=is_dark)
    panel = notebook.page.locator(".jp-NotebookPanel-notebook").first
    assert panel.evaluate("element => getComputedStyle(element).backgroundColor") == background
