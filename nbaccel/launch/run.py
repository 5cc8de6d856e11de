"""Run: what a finished `launch` gives back. Pure data and pictures of it; runs in the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbaccel.view.figure import draw, picture
from nbaccel.view.history import History
from nbaccel.view.picture import Picture
from nbaccel.view.state import Facts
from nbaccel.view.text import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """A finished `launch`.

    values: what the function returned, by rank; None for a rank that failed.
    history: the curves of all ranks, and in `history.rows` what rank 0 logged.
    error: what went wrong, None if nothing did.  start_method, start_reason: how the ranks started, and why.
    log_path: everything the ranks printed; the file lives as long as this process.
    seconds: wall time from the start of the ranks to the end of the last, with all attempts.
    stopped: how it ended at the time limit that its Accelerator had set; empty if it did not.
    restarts: a line for each time that memory ran out and the run was started again; values are of the last attempt.
    """

    values: list[Any]
    history: History
    error: BaseException | None
    start_method: str
    start_reason: str
    log_path: str
    seconds: float
    restarts: list[str] = field(default_factory=list)
    stopped: str = ""

    @property
    def value(self) -> Any:
        """What rank 0 returned."""
        return self.values[0]

    def figure(self, *names: str, size: tuple[float, float] | None = None) -> Figure:
        """A new `matplotlib.figure.Figure` of the run: curves by rank and their mean, memory, speed.

        names: the curves to draw; by default the loss.  size: in inches.

        Raises:
            KeyError: no curve has that name.
        """
        return draw(self.history, names=names or None, size=size)

    def plot(self, *names: str) -> Picture:
        """The figure as a notebook shows it.

        Raises:
            KeyError: no curve has that name.
        """
        return picture(self.figure(*names), text(self.history, Facts(), self.seconds))
