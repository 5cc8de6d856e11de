"""Causes: decides which rank's failure ended a run. Runs in the kernel.

A rank that fails breaks the connections of its peers, and their failures may be seen first. So a failure that may be a
consequence is held back for a moment before the run is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from nbaccel.launch.member import Member

__all__ = ["Causes"]

_SETTLE_S = 0.5  # peers notice a lost connection before the kernel notices its cause
_ALIKE_S = 5.0  # a debugged run is not in a hurry, and a busy machine is slow


class Causes:
    """The failures of one run, in the order in which they were seen.

    debugged: the rank whose failure is to be debugged, if any.
    """

    def __init__(self, members: Sequence[Member], debugged: int | None) -> None:
        self._members = members
        self._debugged = debugged
        self._failed: list[Member] = []
        self._settled_at: float | None = None

    def add(self, member: Member) -> None:
        """Record that `member` reported a failure, or ended without a report."""
        self._failed.append(member)
        # Ranks run one program: the debugged rank may be about to fail in the same way.
        alike_s = _ALIKE_S if self._debugged is not None and self._members[self._debugged].is_working else 0.0
        if self._settled_at is None:
            self._settled_at = time.monotonic() + max(alike_s, _SETTLE_S if _is_consequence(member) else 0.0)
        elif not _is_consequence(member):
            self._settled_at = time.monotonic() + alike_s

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the cause may be known; None while nothing failed."""
        return None if self._settled_at is None else max(0.0, self._settled_at - now)

    def are_known(self, now: float) -> bool:
        is_settled = self._settled_at is not None and now >= self._settled_at
        return is_settled and not any(member.is_looked_at and member.is_working for member in self._members)

    @property
    def first(self) -> int | None:
        """Return the rank whose failure was the cause, as far as it can be known."""
        causes = [member for member in self._failed if not _is_consequence(member)]
        return next((member.rank for member in [*causes, *self._failed]), None)


def _is_consequence(member: Member) -> bool:
    return member.report is not None and member.report.is_consequence
