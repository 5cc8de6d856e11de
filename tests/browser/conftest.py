"""Notebooks in a real browser: Debian's Chromium, driven by Playwright, with JupyterLab 4 and Notebook 7.

A test asks for `open_notebook`, and for `front_end` if it holds for both front ends:

    def test_a_cell_shows_what_it_prints(open_notebook: OpenNotebook, front_end: FrontEnd) -> None:
        notebook = open_notebook("print(6 * 7)", front_end=front_end)
        assert notebook.run(0) == "42"

Its modules say `pytestmark = [pytest.mark.browser, pytest.mark.slow]`. One server serves all of them and starts at
the first; a browser serves a module, since Playwright keeps an event loop running that other tests could not bear.
`pytest -m browser --basetemp=build/browser` leaves a picture of every notebook's last state beside what it wrote.

Where there is no Chromium these tests are skipped and say so; `make test` installs it where it may.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser.page import FRONT_ENDS, LAB, FrontEnd, NotebookPage
from browser.server import JupyterServer
from environments import NEWEST, Environment

OpenNotebook = Callable[..., NotebookPage]

_BROWSERS = ("chromium", "google-chrome")
_READY_TIMEOUT_S = 40.0
_PATIENCE_S = 20.0
"""For what `expect` waits on, where nothing else is said: the machine may be busy."""

_WINDOW = {"width": 1200, "height": 900}


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    return path


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """The server of all browser tests."""
    server = JupyterServer(tmp_path_factory.mktemp("jupyter"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """The module's browser, without a window."""
    expect.set_options(timeout=_PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(params=FRONT_ENDS, ids=lambda front_end: front_end.name)
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    """Each front end in turn."""
    front_end: FrontEnd = request.param
    return front_end


@pytest.fixture
def open_notebook(server: JupyterServer, browser: Browser, tmp_path: Path) -> Iterator[OpenNotebook]:
    """Opens a new notebook with these code cells in a new window, and waits for its kernel.

    Further arguments: `front_end`, by default JupyterLab; `environment`, by default the newest, whose kernel it gets;
    `is_dark`, for the dark theme.
    """
    pages: list[NotebookPage] = []

    def open_(
        *cells: str, front_end: FrontEnd = LAB, environment: Environment = NEWEST, is_dark: bool = False
    ) -> NotebookPage:
        theme = "JupyterLab Dark" if is_dark else "JupyterLab Light"
        server.configure({"apputils-extension/themes": {"theme": theme}})
        written = server.write(f"{tmp_path.name}-{len(pages)}", list(cells), environment)
        context = browser.new_context(viewport=_WINDOW, color_scheme="dark" if is_dark else "light")
        notebook = NotebookPage(context.new_page())
        pages.append(notebook)
        notebook.page.goto(f"{server.url(f'{front_end.path}/{written.as_posix()}')}?token={server.token}&reset")
        server.wait_for_kernel(written, _READY_TIMEOUT_S)
        notebook.wait_until_ready(_READY_TIMEOUT_S)
        return notebook

    yield open_
    for number, notebook in enumerate(pages):
        notebook.shoot(tmp_path / f"last-{number}.png")
        notebook.page.context.close()
    server.end_kernels()
