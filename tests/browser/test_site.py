"""The built site, in a browser and as a file: what `make docs` builds, without a warning; its search, and its looks."""

from __future__ import annotations

import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

import public_surface
from environments import REPOSITORY
from test_site import QUESTIONS

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

PYTHON = REPOSITORY / ".venv-docs" / "bin" / "python"

FIRST_HITS = 3

LOOKED_AT = (
    "docs/index",
    "README",
    "docs/cells",
    "docs/flags",
    "docs/checkpoints",
    "docs/benchmarks",
    "docs/reference/cell",
    "docs/reference/accelerator",
    "docs/design/step",
    "notebooks/05_watch_and_steer",
)

NARROW = {"width": 600, "height": 900}
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built anew."""
    assert PYTHON.exists(), f"{PYTHON} is not there; `make full` builds it, and so does `make docs`"
    folder = tmp_path_factory.mktemp("site")
    command = ["make", "docs", "-o", ".venv-docs/.stamp", f"SITE={folder / 'site'}", f"DOCTREES={folder / 'doctrees'}"]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "warning" not in built.stderr.lower(), built.stderr
    return folder / "site"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window that keeps what was asked of anything but files, as `asked`."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.asked = []  # type: ignore[attr-defined]
    context.on("request", lambda request: _is_local(request.url) or page.asked.append(request.url))
    yield page
    context.close()


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:"))


def hits(page: Page, site: Path, asked: str) -> list[str]:
    """Return the pages that the site's search finds, the best first, without the places in them."""
    page.goto(f"file://{site}/search.html?q={quote(asked)}")
    expect(page.locator("#search-results .search-summary")).to_contain_text(re.compile(r"found|did not match"))
    found = page.locator("#search-results ul.search > li > a").evaluate_all(
        "all => all.map(a => a.getAttribute('href'))"
    )
    return list(dict.fromkeys(re.split(r"[?#]", link)[0] for link in found))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["asked"])
def test_the_search_answers_a_newcomer_within_the_first_hits(page: Page, site: Path, question: dict[str, str]) -> None:
    found = hits(page, site, question["asked"])
    wanted = question["page"].removesuffix(".md") + ".html"
    assert wanted in found[:FIRST_HITS], f"{wanted} is not among {found[:8]}"


def test_a_question_that_the_pages_do_not_answer_has_no_hits(page: Page, site: Path) -> None:
    assert hits(page, site, "zebrafish") == []


def test_the_site_begins_at_its_index_and_asks_nothing_of_a_network(page: Page, site: Path) -> None:
    page.goto(f"file://{site}/index.html")
    page.wait_for_url("**/docs/index.html")
    for name in LOOKED_AT:
        page.goto(f"file://{site}/{name}.html")
        page.wait_for_load_state("networkidle")
    assert page.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", [WIDE, NARROW], ids=lambda window: str(window["width"]))
def test_no_page_is_wider_than_its_window(browser: Browser, site: Path, window: dict[str, int], scheme: str) -> None:
    """Wide tables and lines of code scroll inside of their own boxes."""
    context = browser.new_context(viewport=window, color_scheme=scheme)
    page = context.new_page()
    for name in LOOKED_AT:
        page.goto(f"file://{site}/{name}.html")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, f"{name} is {wider} px wider than a window of {window['width']} px"
        backgrounds = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", backgrounds)[:3])) < 3 * 128) == (scheme == "dark"), name
    context.close()


def test_every_public_name_and_member_has_its_place_in_the_reference(site: Path) -> None:
    _, _, _, _, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    objects = {line.split(" ")[0]: line.split(" ")[1] for line in zlib.decompress(packed).decode().splitlines()}
    described = {name for name, kind in objects.items() if kind.startswith("py:")}
    names = {path for path, what in public_surface.read().items() if not what.startswith("= nbaccel.")}
    lacking = sorted(
        name for name in names - described if "__" not in name.rpartition(".")[2] or name == "nbaccel.__version__"
    )
    assert not lacking, "not in the reference:\n" + "\n".join(lacking)


def test_notebooks_are_shown_with_their_outputs(page: Page, site: Path) -> None:
    page.goto(f"file://{site}/notebooks/01_quickstart.html")
    assert page.locator(".cell_input").count() > 3
    assert page.locator(".cell_output").count() > 2
    assert page.locator(".cell_output img").first.evaluate("image => image.complete && image.naturalWidth > 100")
