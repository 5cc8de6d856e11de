"""Comments: allows comments above `%%accelerate`. Runs in the kernel, on every cell before IPython reads it."""

from __future__ import annotations

__all__ = ["MAGIC", "comments_below_magic", "is_code"]

MAGIC = "%%accelerate"


def comments_below_magic(lines: list[str]) -> list[str]:
    """Move comments such as `#@title` from above `%%accelerate` to below it; an input transformer.

    IPython recognises a cell magic only in the first line. No line is lost.

    >>> comments_below_magic(["#@title Training\\n", "%%accelerate -n 2\\n", "x = 1\\n"])
    ['%%accelerate -n 2\\n', '#@title Training\\n', 'x = 1\\n']
    """
    first = next((number for number, line in enumerate(lines) if is_code(line)), 0)
    if first == 0 or lines[first].split()[0] != MAGIC:
        return lines
    return [lines[first], *lines[:first], *lines[first + 1 :]]


def is_code(line: str) -> bool:
    """Return whether a line is more than blanks and a comment."""
    text = line.strip()
    return bool(text) and not text.startswith("#")
