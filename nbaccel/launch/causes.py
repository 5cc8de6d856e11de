"""Causes: which rank's failure ended a run. Runs in the kernel.

A rank that fails takes its peers' connections along, and theirs may be seen first. So what may be a consequence
settles for a moment before a run is broken off.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from nbaccel.launch.member import Member

__all__ = ["Causes"]

_SETTLE_S = 0.5  # a lost connection is seen by peers before its cause is seen by us
_ALIKE_S = 5.0  # a debugged run has time, and a busy machine is slow


class Causes:
    """The failures of one run, in the order in which they were seen.

    debugged: the rank that a person wants to look at, if any.
    """

    def __init__(self, members: Sequence[Member], debugged: int | None) -> None:
        self._members = members
        self._debugged = debugged
        self._failed: list[Member] = []
        self._settled_at: float | None = None

    def add(self, member: Member) -> None:
        """`member` reported a failure, or ended without a report."""
        self._failed.append(member)
        # Ranks run one program: the one that a person wants to look at may be about to fail alike.
        alike_s = _ALIKE_S if self._debugged is not None and self._members[self._debugged].is_working else 0.0
        if self._settled_at is None:
            self._settled_at = time.monotonic() + max(alike_s, _SETTLE_S if _is_consequence(member) else 0.0)
        elif not _is_consequence(member):
            self._settled_at = time.monotonic() + alike_s

    def due_in(self, now: float) -> float | None:
        """Seconds until the cause may be known; None while nothing failed."""
        return None if self._settled_at is None else max(0.0, self._settled_at - now)

    def are_known(self, now: float) -> bool:
        is_settled = self._settled_at is not None and now >= self._settled_at
        return is_settled and not any(member.is_looked_at and member.is_working for member in self._members)

    @property
    def first(self) -> int | None:
        """The rank whose failure was the cause, as far as anybody can tell."""
        causes = [member for member in self._failed if not _is_consequence(member)]
        return next((member.rank for member in [*causes, *self._failed]), None)


def _is_consequence(member: Member) -> bool:
    return member.report is not None and member.report.is_consequence
