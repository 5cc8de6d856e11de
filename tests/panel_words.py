"""The words of a panel that do not change while it runs, without digits: what the README's picture is compared by."""

from __future__ import annotations

import html
import re

__all__ = ["panel_words"]


def panel_words(panel: str) -> str:
    """Return the first line, the heads of the table of ranks and the names of curves, a line each.

    panel: its HTML, as the product makes it or a browser has it.
    """
    head = re.search(r'<div class="row">(.*?)</div>', panel, re.S)
    assert head is not None, panel
    parts = re.findall(r">([^<>]+)<", f">{head[1]}<")
    columns = re.findall(r'<th scope="col">([^<]*)</th>', panel)
    curves = re.findall(r'<div class="row fits"><b>([^<]*?) [^< ]*</b>', panel)
    lines = ["".join(part if part.startswith(", ") else f" {part}" for part in parts), *columns, *curves]
    return "".join(f"{re.sub(r'[0-9]+', '#', html.unescape(line)).strip()}\n" for line in lines)
