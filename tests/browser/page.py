"""A notebook in a browser: open it, run its cells, look at what they show. Runs in the tests.

`NotebookPage` knows where JupyterLab and Notebook 7 put things; everything else is asked of `page`, which is
Playwright's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

__all__ = ["FRONT_ENDS", "LAB", "NOTEBOOK", "FrontEnd", "NotebookPage"]

_DONE = re.compile(r"\[\d+\]:?")
_GRAVE = ("serious", "critical")


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """One way to show a notebook. path: where the server has it."""

    name: str
    path: str


LAB = FrontEnd("lab", "lab/tree")
NOTEBOOK = FrontEnd("notebook", "notebooks")
FRONT_ENDS = (LAB, NOTEBOOK)


class NotebookPage:
    """A notebook that is open. Cells are counted from 0.

    page: Playwright's page, for all that this class has no word for.
    """

    def __init__(self, page: Page) -> None:
        self.page = page

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the notebook says that its kernel is idle. Before it has one, JupyterLab says that too."""
        expect(self.page.locator(".jp-Notebook-ExecutionIndicator").first).to_have_attribute(
            "data-status", "idle", timeout=timeout_s * 1000
        )

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def output(self, number: int) -> Locator:
        """What a cell shows, output by output."""
        return self.cell(number).locator(".jp-OutputArea-output")

    def begin(self, number: int) -> None:
        """Press Control-Enter in a cell; returns while it runs."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def end(self, number: int, timeout_s: float = 30.0) -> str:
        """Wait until a cell has ended, however; the text that it shows."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(_DONE, timeout=timeout_s * 1000)
        return "\n".join(text.rstrip("\n") for text in self.output(number).all_inner_texts())

    def run(self, number: int, timeout_s: float = 30.0) -> str:
        """Run a cell to its end; the text that it shows."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        before = prompt.inner_text()
        self.begin(number)
        expect(prompt).not_to_have_text(before, timeout=timeout_s * 1000)
        return self.end(number, timeout_s)

    def grave_findings(self, selector: str) -> list[str]:
        """What axe-core calls serious or critical about the first element of this CSS selector."""
        self.page.locator(selector).first.wait_for()
        found: list[dict[str, Any]] = Axe().run(self.page, context=selector).response["violations"]
        return [
            f"{finding['id']}: {finding['help']} ({node['html'][:200]})"
            for finding in found
            if finding["impact"] in _GRAVE
            for node in finding["nodes"]
        ]

    def shoot(self, path: Path, selector: str | None = None) -> Path:
        """Take a picture of the page, or of the first element of this selector."""
        shown = self.page if selector is None else self.page.locator(selector).first
        path.write_bytes(shown.screenshot())  # Playwright would start a thread to write the file
        return path
