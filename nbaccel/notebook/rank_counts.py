"""Runs of one cell with different numbers of ranks, compared by their times. Runs in the kernel; pure.

Nothing is estimated: another number of ranks is named where this kernel has run the same text with it, faster. Where
ranks have mostly waited for each other, `--speed` is advised, which measures.
"""

from __future__ import annotations

from collections.abc import Hashable

from nbaccel.base.quantities import duration, plural

__all__ = ["RankCounts"]

_LEAST_GAIN = 1.1
_LEAST_GAIN_S = 1.0
"""How much faster the other run was at least, as a factor and in seconds."""

_MUCH_EXCHANGE = 0.5


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
        self._has_advised = False

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

    def note_exchange(self, share: float | None) -> str:
        """Return a line, once, if exchanges took more than half of the time of a run; else an empty text.

        Args:
            share: The fraction of the ranks' time that they took, waiting included; None if it is unknown.
        """
        if self._has_advised or share is None or share <= _MUCH_EXCHANGE:
            return ""
        self._has_advised = True
        return (
            f"exchange and waiting took {share * 100:.0f} % of the ranks' time: --speed 1min above this cell measures "
            "what is faster, one rank too"
        )
