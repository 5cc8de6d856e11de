"""Write the address of the repository into everything that names it, once it is published.

    make address ADDRESS=https://host/owner/nbaccel

Until then no file names one: the pages write `ADDRESS`, and say what it stands for. Nothing else changes at a release
but the version, which stands in `nbaccel/__init__.py` alone, and which CITATION.cff and the pages quote under a test.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from environments import REPOSITORY

__all__ = ["publish"]

_PLACES = {
    "pyproject.toml": (
        "# `[project.urls]` waits for a published address: `make address`.\n",
        '[project.urls]\nRepository = "{address}"\n',
    ),
    "CITATION.cff": (
        "# `repository-code` waits for a published address: `make address`.\n",
        'repository-code: "{address}"\n',
    ),
    "tests/documents.py": ("ADDRESS: str | None = None\n", 'ADDRESS: str | None = "{address}"\n'),
}
"""What stands in each file before, and afterwards."""

_PAGES = ("README.md", "docs/*.md")
_IN_A_PAGE = re.compile(r"(?<=git\+)ADDRESS\b|\bADDRESS(?=: of the repository)|(?<=`)ADDRESS(?=` is the address)")


def publish(tree: Path, address: str) -> list[str]:
    """Write `address` into the files of a clone.

    Args:
        tree: The folder of the clone.
        address: Of the repository, by https.

    Returns:
        The files that have changed.

    Raises:
        ValueError: `address` is none, or a file has one already.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        raise ValueError(f"an address is https://host/owner/name, without more; got {address!r}")
    texts = {name: (tree / name).read_text(encoding="utf-8") for name in _PLACES}
    if without := [name for name, (before, _) in _PLACES.items() if before not in texts[name]]:
        raise ValueError(f"these have an address already, or lost their place for one: {', '.join(without)}")
    for name, (before, after) in _PLACES.items():
        texts[name] = texts[name].replace(before, after.format(address=address))
    for page in (found for pattern in _PAGES for found in tree.glob(pattern)):
        text = page.read_text(encoding="utf-8")
        if (written := _IN_A_PAGE.sub(address, text)) != text:
            texts[str(page.relative_to(tree))] = written
    for name, text in texts.items():
        (tree / name).write_text(text, encoding="utf-8")
    return sorted(texts)


def main(arguments: Sequence[str]) -> int:
    try:
        (address,) = arguments
        print("\n".join(publish(REPOSITORY, address)))
    except ValueError as error:
        print(f"make address ADDRESS=https://host/owner/nbaccel: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
