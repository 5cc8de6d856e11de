"""The advice of a report on speed, read as a user reads it, and pasted into the cells of the notebook."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Advice", "CannotPaste", "PastedText", "advice_of", "pasted", "samples_per_s"]

_ADVICE = re.compile(r"^(.+): ([\d.]+) x as fast, by$", re.MULTILINE)
_BASE = re.compile(r"^the cell as it is +([\d,.]+) samples/s", re.MULTILINE)
_PLACES = {
    "line": re.compile(r"Cell In\[(\d+)\], line (\d+): (.*?)(?:  # .*)?"),
    "after": re.compile(r"after Cell In\[(\d+)\], line (\d+): (.*)"),
    "first": re.compile(r"Cell In\[(\d+)\], as its first (line): (.*)"),
    "flags": re.compile(r"Cell In\[(\d+)\], in its (%%accelerate) line: (.*)"),
}


class CannotPaste(ValueError):
    """A line of a report names no place in the notebook, or none that is there."""


@dataclass(frozen=True, slots=True)
class PastedText:
    """One statement to paste.

    where: "line" (instead of one), "after" one, "first" or "flags".  cell: its execution count.  line: 1-based, 0 for
    the last two.
    """

    where: str
    cell: int
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Advice:
    """change: "num_workers=4".  foretold: the gain that the report gives.  lines: what to paste."""

    change: str
    foretold: float
    lines: tuple[PastedText, ...]


def advice_of(report: str) -> Advice | None:
    """Return the advice of a report; None where nothing helps.

    Raises:
        CannotPaste: a line says no place.
    """
    found = _ADVICE.search(report)
    if found is None:
        return None
    below = report[found.end() :].strip("\n").splitlines()
    lines = []
    for said in below:
        if not said.startswith("  "):
            break
        lines.append(_pasted_text(said.strip()))
    return Advice(found[1], float(found[2]), tuple(lines))


def _pasted_text(said: str) -> PastedText:
    for where, pattern in _PLACES.items():
        if match := pattern.fullmatch(said):
            cell, line, text = match.groups()
            return PastedText(where, int(cell), int(line) if line.isdigit() else 0, text)
    raise CannotPaste(f"no place in a cell: {said}")


def samples_per_s(report: str) -> float | None:
    """Return the speed of the cell as it is; None where the report has none."""
    found = _BASE.search(report)
    return float(found[1].replace(",", "")) if found else None


def pasted(
    cells: Sequence[str], lines: Iterable[PastedText], numbers: Mapping[int, int], running: int
) -> tuple[list[str], str]:
    """Return the cells with the lines, and the flags for the line of the training cell.

    numbers: the index of each cell by the execution count that it had.  running: the index of the training cell, whose
    line 1 was the one with %%accelerate.

    Raises:
        CannotPaste: there is no such cell, or no statement begins in that line.
    """
    cells, flags = list(cells), []
    for line in sorted(lines, key=lambda each: -each.line):  # from below: the lines above keep their numbers
        if line.cell not in numbers:
            raise CannotPaste(f"no cell had the number {line.cell}: {line.text}")
        index = numbers[line.cell]
        if line.where == "flags":
            flags.append(line.text)
        elif line.where == "first":
            cells[index] = f"{line.text}\n{cells[index]}"
        else:
            cells[index] = _with_statement(cells[index], line, line.line - (index == running))
    return cells, " ".join(flags)


def _with_statement(cell: str, line: PastedText, number: int) -> str:
    statements = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.stmt) and node.lineno == number]
    if not statements:
        raise CannotPaste(f"no statement begins in line {number} of the cell: {line.text}")
    statement = min(statements, key=lambda node: node.col_offset)
    rows = cell.splitlines()
    end = statement.end_lineno or number
    if line.where == "line" and (body := getattr(statement, "body", None)):
        end = body[0].lineno - 1  # of a compound statement its head
    begin = number - 1 if line.where == "line" else end
    rows[begin:end] = [" " * statement.col_offset + row for row in line.text.splitlines()]
    return "\n".join(rows)
