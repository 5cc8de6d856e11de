"""Pace: the present speed of a training, and the time it will take. Pure; the caller passes the time."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

_WINDOW_S = 15.0
_EVERY_S = 0.25

_Sample = tuple[float, int, float | None]


class Pace:
    """Steps and epochs per second, over the last 15 seconds; a step that takes longer is measured alone.

    >>> pace = Pace()
    >>> for step in range(11):
    ...     pace.add(at_s=step * 0.5, step=step, place=step / 40)
    >>> pace.steps_per_s, pace.seconds_for(0.75)
    (2.0, 15.0)
    """

    __slots__ = ("_newest", "_samples")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._newest: _Sample | None = None

    def add(self, at_s: float, step: int, place: float | None = None) -> None:
        """Record that `step` steps and `place` epochs were done at `at_s`.

        If either falls, the measurement starts again.

        Time without a step counts, for example that of a save: it is part of the duration. The caller leaves out times
        that are to be counted separately.
        """
        newest = self._newest
        if newest is not None and (step < newest[1] or (place or 0.0) < (newest[2] or 0.0)):
            self._samples.clear()
        self._newest = (at_s, step, place)
        samples = self._samples
        if samples and at_s - samples[-1][0] < _EVERY_S:
            return
        samples.append(self._newest)
        while len(samples) > 2 and at_s - samples[1][0] > _WINDOW_S:
            samples.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """Return the speed; None until two reports with different steps and times are known."""
        if self._newest is None or not self._samples:
            return None
        seconds = self._newest[0] - self._samples[0][0]
        steps = self._newest[1] - self._samples[0][1]
        return steps / seconds if seconds > 0 and steps > 0 else None

    def seconds_for(self, epochs: float) -> float | None:
        """Return the seconds that `epochs` epochs take at this pace; None while that is unknown."""
        if epochs <= 0:
            return 0.0
        if self._newest is None or not self._samples:
            return None
        (began_s, _, before), (at_s, _, now) = self._samples[0], self._newest
        if before is None or now is None or now <= before or at_s <= began_s:
            return None
        return epochs / (now - before) * (at_s - began_s)
