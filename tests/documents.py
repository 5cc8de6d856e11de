"""Read the pages that people read: README.md, docs/ and the other Markdown files of the repository.

Used by the tests that execute their commands and follow their links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from environments import REPOSITORY

__all__ = ["ADDRESS", "PAGES", "README", "Block", "anchors", "blocks", "links"]

ADDRESS: str | None = None
"""Where the repository is published; None: nowhere yet. Then no page and no metadata names an address of it, and what
needs one says `ADDRESS`. `make address` writes it, here and into the others (tests/published.py)."""

README = REPOSITORY / "README.md"
PAGES = tuple(sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]))

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. `line` is that of its fence, counted from 1."""

    language: str
    text: str
    page: Path
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page in their order, of all languages or of these."""
    text = page.read_text()
    found = [Block(match[1], match[2], page, text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)]
    return [block for block in found if not languages or block.language in languages]


def links(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page."""
    return _LINK.findall(_without_code(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer makes of the page's headings."""
    return {_anchor(title) for title in _HEADING.findall(_without_code(page))}


def below(folder: Path, link: str) -> str:
    """Return the text between the heading that a link leads to and the next heading."""
    path, _, anchor = link.partition("#")
    parts = re.split(r"^#+ (.*)$", (folder / path).read_text(), flags=re.M)
    return next((text for title, text in zip(parts[1::2], parts[2::2], strict=True) if _anchor(title) == anchor), "")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")


def _without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]+`", lambda code: code[0].strip("`"), _FENCE.sub("", page.read_text()))
