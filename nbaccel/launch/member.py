"""Member: the kernel's record of one rank of a running group. Runs in the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from nbaccel.failures import Failure as Kind, classify
from nbaccel.launch.guardian import segments_of
from nbaccel.launch.process import RankProcess
from nbaccel.launch.report import Link
from nbaccel.launch.snapshot import Snapshot
from nbaccel.launch.wire.channel import Channel

__all__ = ["Cut", "Member", "Report"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a rank's process groups on a device after a task.

    is_cut: they were aborted.  is_sound: the rank is as its last whole step left it.
    obstacle: the reason why they cannot be formed anew; empty if they can.
    """

    is_cut: bool
    is_sound: bool
    obstacle: str


@dataclass(slots=True)
class Report:
    """The report of a rank when its work was over.

    status: "ok", "stopped" (by the project's stop or an interrupt), "failed" (an exception) or "exited" (SystemExit).
    parcel_fd: memfd of its values; the reader of the report closes it.  snapshot: the state of its stack.
    names: the names of a persistent rank.  sequence: number of collectives that torch has issued in the default process
    group; None without one.  cut: the state of its groups on a device, if it has some.
    """

    status: str
    parcel_fd: int
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    exit_code: Any = None
    snapshot: Snapshot = field(default_factory=Snapshot)
    names: frozenset[str] = frozenset()
    sequence: int | None = None
    cut: Cut | None = None

    @classmethod
    def from_frame(cls, message: dict[str, Any], fds: list[int]) -> Report:
        return cls(
            message["status"],
            fds[0],
            message["missing"],
            message["facts"],
            [Link.from_json(link) for link in message["chain"]],
            message["exit_code"],
            Snapshot.from_json(message["snapshot"]),
            frozenset(message["names"]),
            message["sequence"],
            None if message["cut"] is None else Cut(**message["cut"]),
        )

    @classmethod
    def of_an_outsider(cls) -> Report:
        """Return the report of a rank that took no part."""
        return cls("ok", -1)

    @property
    def is_failure(self) -> bool:
        return self.status in ("failed", "exited")

    @property
    def is_consequence(self) -> bool:
        """Return whether this failure says only that another rank was lost."""
        if self.status != "failed" or not self.links:
            return False
        last = self.links[-1]
        return classify(last.type_name, "\n".join(last.headline)) is Kind.PEER_LOST

    def close(self) -> None:
        if self.parcel_fd >= 0:
            os.close(self.parcel_fd)
            self.parcel_fd = -1


class Member:
    """One rank of a group: its process, its channel and its reports so far.

    stays: it waits for another task after this one, instead of being released.
    """

    def __init__(self, rank: int, process: RankProcess, channel: Channel, stays: bool = False) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.report: Report | None = None
        self.displays: dict[int, dict[str, Any]] = {}  # rich messages whose mark has not been read yet
        self.has_ended = False  # its process is over, though perhaps not reaped yet
        self.was_killed = False  # by the kernel
        self.was_interrupted = False  # by the kernel, with SIGINT
        self.is_looked_at = False  # it failed, and has not reported yet: the user is in its debugger
        self.released_at: float | None = None
        self.segments: set[str] = set()  # NCCL's shared memory, which it can no longer free itself
        self.stays = stays
        self.takes_part = True

    def begin(self, takes_part: bool) -> None:
        """Begin another run of a persistent rank."""
        self.takes_part = takes_part
        self.report = None if takes_part else Report.of_an_outsider()
        self.was_interrupted = False
        self.is_looked_at = False

    @property
    def is_through(self) -> bool:
        """Return whether the run expects nothing more of the rank."""
        return self.has_ended or (self.stays and self.report is not None)

    @property
    def is_working(self) -> bool:
        """Return whether the rank is still busy with the user's code, as far as the kernel knows."""
        return self.report is None and not self.has_ended

    def interrupt(self) -> None:
        if self.is_working and not self.was_interrupted:
            self.was_interrupted = True
            self.process.signal(signal.SIGINT)

    def terminate(self) -> None:
        self._ends_by(signal.SIGTERM)

    def kill(self) -> None:
        self._ends_by(signal.SIGKILL)

    def _ends_by(self, number: signal.Signals) -> None:
        self.was_killed = True
        self.segments |= segments_of([self.process.pid])
        self.process.signal(number)

    def release(self, now: float) -> None:
        """Let a rank that has reported end."""
        if self.released_at is None and not self.has_ended and not self.stays:
            self.released_at = now
            with contextlib.suppress(OSError):
                self.channel.send({"op": "exit"})
