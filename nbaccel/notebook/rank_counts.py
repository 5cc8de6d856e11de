"""Runs of one cell with different numbers of ranks, compared by their times. Runs in the kernel; pure.

Nothing is estimated: another number of ranks is named where this kernel has run the same text with it, faster.
"""

from __future__ import annotations

from collections.abc import Hashable

from nbaccel.base.quantities import duration, plural

__all__ = ["RankCounts"]

_LEAST_GAIN = 1.1
_LEAST_GAIN_S = 1.0
"""How much faster the other run was at least, as a factor and in seconds."""


class RankCounts:
    """The fastest run of each work, by its number of ranks.

    Example:
        >>> counts = RankCounts()
        >>> counts.note(("train()", 90), 1, 1.1, "Cell In[3]")
        ''
        >>> counts.note(("train()", 90), 2, 4.3, "Cell In[4]")
        '1 rank has done this cell in 1.1 s (Cell In[3]): -n 1'
    """

    def __init__(self) -> None:
        self._fastest: dict[Hashable, dict[int, tuple[float, str]]] = {}

    def note(self, work: Hashable, ranks: int, seconds: float, cell: str) -> str:
        """Record a training that ended well; return a line if another number of ranks was faster, else an empty text.

        Args:
            work: Equal for equal work: the cell's text, its steps, its flags.
            ranks: The number of ranks.
            seconds: The duration of the whole run.
            cell: The name of the cell.
        """
        runs = self._fastest.setdefault(work, {})
        others = [(*run, number) for number, run in runs.items() if number != ranks]
        runs[ranks] = min(runs.get(ranks, (seconds, cell)), (seconds, cell))
        least, where, number = min(others, default=(seconds, cell, ranks))
        if seconds < max(least * _LEAST_GAIN, least + _LEAST_GAIN_S):
            return ""
        verb = "has" if number == 1 else "have"
        return f"{plural(number, 'rank')} {verb} done this cell in {duration(least)} ({where}): -n {number}"
