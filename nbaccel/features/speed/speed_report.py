"""SpeedReport: the table of a cell with `--speed`, and the lines to paste. Runs in the kernel."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from nbaccel.base.quantities import rate
from nbaccel.features.speed.pasted_lines import PastedLine
from nbaccel.features.speed.speed_comparison import SpeedComparison, SpeedRow

__all__ = ["SpeedReport"]

_HEAD = ("change", "speed", "x", "numbers equal")
_CODE = "white-space:pre-wrap;font-family:var(--jp-code-font-family,monospace)"
_NOTHING, _NOTHING_SURE = "nothing helps", "nothing is sure to help"


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The report.

    comparison: of all rows.  advised: the row whose lines are to be pasted; None if nothing helps.
    lines: these lines.  now: what is tried at present; empty at the end.
    remarks: what else there is to say, a line each.
    """

    comparison: SpeedComparison
    advised: SpeedRow | None = None
    lines: Sequence[PastedLine] = ()
    now: str = ""
    remarks: Sequence[str] = ()

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, without its head; rows without a speed come last."""
        found = self.comparison
        rows = sorted(found.rows, key=lambda row: (not row.speeds, -found.ratio(row)))
        return [self._row(row) for row in (found.base, *rows) if row.trials or row.note or not self.now]

    def _row(self, row: SpeedRow) -> tuple[str, ...]:
        found = self.comparison
        if not row.speeds:
            return str(row.change), row.why_not, "", ""
        speed = rate(found.rate(row), "samples" if found.has_samples else "steps")
        if row is found.base:
            noise = f" (+-{found.noise:.0%})" if len(row.speeds) > 1 else ""
            return str(row.change), f"{speed}{noise}", "1.00", ""
        return str(row.change), speed, f"{found.ratio(row):.2f}", found.numbers(row)

    def below(self) -> list[str]:
        """Return the lines below the table."""
        lines = [f"trying: {self.now}"] if self.now else []
        if not self.now and self.comparison.base.speeds:
            if self.advised is None:
                lines.append(_NOTHING if not self._undecided() else _NOTHING_SURE)
            else:
                lines.append(f"{self.advised.change}: {self.comparison.ratio(self.advised):.2f} x as fast, by")
                lines += [f"  {line}" for line in self.lines]
            if undecided := self._undecided():
                lines.append(f"too few trials to decide about: {'; '.join(undecided)}")
        return [*lines, *self.remarks]

    def _undecided(self) -> list[str]:
        """Return the changes that had too little time; beside one that is advised, those without a trial."""
        found = self.comparison
        rows = [row for row in found.rows if found.is_undecided(row) and found.numbers(row) != "no"]
        return [str(row.change) for row in rows if self.advised is None or not row.trials]

    def __str__(self) -> str:
        table = [_HEAD, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*lines, *self.below()])

    def _repr_html_(self) -> str:
        tags = ["th", *["td"] * len(self.rows())]
        rows = "".join(
            f"<tr{_weight(self._is_advised(row))}>"
            + "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in row)
            + "</tr>"
            for tag, row in zip(tags, [_HEAD, *self.rows()], strict=True)
        )
        below = "".join(f'<div style="{_CODE}">{html.escape(line)}</div>' for line in self.below())
        return f'<div style="font-size:13px"><table>{rows}</table>{below}</div>'

    def _is_advised(self, row: tuple[str, ...]) -> bool:
        return self.advised is not None and row[0] == str(self.advised.change)

    def bundle(self) -> dict[str, str]:
        """Return the report as a notebook shows it."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def _weight(is_bold: bool) -> str:
    return ' style="font-weight:600"' if is_bold else ""
