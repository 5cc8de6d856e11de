"""Comments: what may stand above `%%accelerate`. Runs in the kernel, on every cell before IPython reads it."""

from __future__ import annotations

__all__ = ["MAGIC", "comments_below_magic", "is_code"]

MAGIC = "%%accelerate"


def comments_below_magic(lines: list[str]) -> list[str]:
    """An input transformer: lets comments such as `#@title` stand above `%%accelerate`.

    IPython knows a cell magic only in the first line, so the comments move below it. No line is lost.

    >>> comments_below_magic(["#@title Training\\n", "%%accelerate -n 2\\n", "x = 1\\n"])
    ['%%accelerate -n 2\\n', '#@title Training\\n', 'x = 1\\n']
    """
    first = next((number for number, line in enumerate(lines) if is_code(line)), 0)
    if first == 0 or lines[first].split()[0] != MAGIC:
        return lines
    return [lines[first], *lines[:first], *lines[first + 1 :]]


def is_code(line: str) -> bool:
    """Whether a line is more than blanks and a comment."""
    text = line.strip()
    return bool(text) and not text.startswith("#")
