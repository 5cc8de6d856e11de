"""Beside: what wants to be looked at while a run goes on, in the kernel's thread that watches it. Runs in the kernel.

A subclass says when it is due and is called then; it must not wait. It can end the run as the user's interrupt does.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Beside"]


class Beside:
    """Nothing to look at; the base of what is."""

    def due_in(self, now: float) -> float | None:
        """Seconds until `tick` may have something to do; None while only the run's own events matter."""
        return None

    def begins(self, press: Callable[[], None]) -> None:
        """Called before what the ranks need is packed for them, where it has to be.

        press: ends the packing, and nothing later; from any thread.
        """

    def tick(self, now: float, press: Callable[[], None]) -> None:
        """Called whenever the run's loop is awake; never before the ranks have been started.

        press: counts as one interrupt of the user's. It may be kept, and called from any thread at any time; once
            the run is over it does nothing.
        """

    def pressed(self, times: int) -> None:
        """The run has been asked to end so often by now, by whomever."""
