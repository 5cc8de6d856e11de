"""Beside: a task that the kernel's thread checks while it watches a run. Runs in the kernel.

A subclass says when it is due and is called then; it must not wait. It can end the run as the user's interrupt does.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Beside"]


class Beside:
    """Base class of the tasks; it does nothing."""

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `tick` may have something to do; None while only the run's own events matter."""
        return None

    def begins(self, press: Callable[[], None]) -> None:
        """Prepare for the packing of the names that the ranks need; called before it, in runs that pack.

        press: a function for any thread that ends the packing, and nothing after it.
        """

    def tick(self, now: float, press: Callable[[], None]) -> None:
        """Do what is due; called whenever the run's loop is awake, never before the ranks have been started.

        press: a function that counts as one interrupt by the user. It may be kept, and called from any thread at any
        time; once the run is over it does nothing.
        """

    def pressed(self, times: int) -> None:
        """Take note that the run has been asked to end `times` times by now, by anyone."""
