"""Curves that share a plot, and smoothing of noisy ones. Pure; runs in the kernel.

Two names share a plot if their metrics are equal and one is of training, the other of held-out data (`display/splits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from nbaccel.display.series import Line
from nbaccel.display.splits import metric_and_part

__all__ = ["held_out_beside", "plots_of", "smoothed"]

_MOST_BESIDE = 2


def held_out_beside(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are drawn in the plot of `name`: the same metric on held-out data, two at most.

    Example:
        >>> held_out_beside("loss", ["loss", "acc", "val_loss", "eval_acc"])
        ['val_loss']
    """
    metric, held_out = metric_and_part(name)
    if held_out:
        return []
    return [other for other in names if metric_and_part(other) == (metric, True)][:_MOST_BESIDE]


def plots_of(shown: Sequence[str], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the plots to draw: for each the name of its main curve, and those that share it.

    Args:
        shown: The curves that are to be drawn.
        names: All curves of the run.

    Example:
        >>> plots_of(["loss", "val_loss", "lr"], ["loss", "lr", "val_loss"])
        [('loss', ['val_loss']), ('lr', [])]
    """
    beside = {name: held_out_beside(name, names) for name in shown}
    taken = {other for others in beside.values() for other in others}
    return [(name, beside[name]) for name in shown if name not in taken]


_FEWEST = 24
"""Number of points from which a curve may be smoothed; every point of a shorter one can be seen."""
_TURNS, _WAY = 0.3, 3.0
_WIDTH, _NEAREST = 0.025, 3.0
"""The weight of a neighbour falls to a half within this part of a curve's points, or within three if that is more."""


def smoothed(line: Line) -> Line | None:
    """Return a smooth curve through a noisy `line`, and None if it is not noisy.

    A line is noisy if it turns at more than 30 % of its points, and if the way up and down that it goes is more than
    three times the height of its plot. Each point becomes a mean of its neighbours on both sides, so that the curve
    does not lag behind; the weights fall exponentially.

    Example:
        >>> noise = tuple(float(step % 2) for step in range(40))
        >>> [round(value, 1) for value in smoothed(Line(tuple(range(40)), noise, noise, noise)).mean[18:20]]
        [0.5, 0.5]
        >>> smoothed(Line(tuple(range(40)), *[tuple(map(float, range(40)))] * 3)) is None
        True
    """
    values = line.mean
    if len(values) < _FEWEST:
        return None
    moves = [after - before for before, after in pairwise(values)]
    turns = sum(one * other < 0 for one, other in pairwise(moves))
    height = max(values) - min(values)
    if turns < _TURNS * len(values) or sum(map(abs, moves)) < _WAY * height:
        return None
    keep = 0.5 ** (1.0 / max(_NEAREST, _WIDTH * len(values)))
    ahead, behind = _averaged(values, keep), _averaged(values[::-1], keep)[::-1]
    smooth = tuple(
        (left[0] + right[0] - value) / (left[1] + right[1] - 1.0)
        for left, right, value in zip(ahead, behind, values, strict=True)
    )
    return Line(line.step, smooth, smooth, smooth)


def _averaged(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return for each value the weighted sum of it and of those before, and the sum of the weights."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1.0
        sums.append((total, weight))
    return sums
