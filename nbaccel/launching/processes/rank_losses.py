"""What follows the death of a rank: the end of the run, or a new process for this rank alone. Runs in the kernel.

A rank dies when its process ends without a report: by a signal, by the system's out-of-memory killer, or by an exit in
the middle of its work. In a training its peers wait for it in the next collective, so the run ends (`EndOfRun`). In a
run of ranks that do not need each other (`RunEnd.restarts_ranks`) the rank is started again while the others work
(`restarted_ranks`); the supervisor asks these objects, and acts. A rank that raises an exception has not died.
"""

from __future__ import annotations

from nbaccel.base.events import Event

__all__ = [
    "EndOfRun",
]


class EndOfRun:
    """Ends the run at the first death; the base class of what starts ranks again."""

    restarts = False
    """True if some deaths do not end the run."""

    def feed(self, rank: int, at: float, event: Event) -> None:
        """Ignore the reports of the ranks."""

    def tick(self, now: float) -> None:
        """Do nothing."""

    def allows_restart(self, rank: int) -> bool:
        """Return whether `rank`, whose process is dead and has reported nothing more, is started again."""
        return False

    def line(self, rank: int, exit_code: int) -> str:
        """Return the line about a rank that is started again."""
        return ""

    @property
    def why_not(self) -> str:
        """Return why the latest rank was not started again, as a sentence; empty if that needs no explanation."""
        return ""
