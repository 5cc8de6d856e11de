"""Member: what the kernel knows about one rank of a running group. Runs in the kernel."""

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
    """What has become of a rank's groups on a device.

    is_cut: they were aborted.  is_sound: the rank is as its last whole step left it.
    obstacle: why they cannot be formed anew; empty if they can.
    """

    is_cut: bool
    is_sound: bool
    obstacle: str


@dataclass(slots=True)
class Report:
    """What a rank said when its work was over.

    status: "ok", "stopped" (by our stop or an interrupt), "failed" (an exception) or "exited" (SystemExit).
    parcel_fd: memfd of its values; whoever takes the report closes it.  snapshot: what it was doing.
    names: the rank's, where it stays.  sequence: how many collectives torch has issued in the default process group;
    None without one.  cut: of its groups on a device, where it has some.
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
        """Stands for a rank that took no part."""
        return cls("ok", -1)

    @property
    def is_failure(self) -> bool:
        return self.status in ("failed", "exited")

    @property
    def is_consequence(self) -> bool:
        """Whether this failure says only that another rank was lost."""
        if self.status != "failed" or not self.links:
            return False
        last = self.links[-1]
        return classify(last.type_name, "\n".join(last.headline)) is Kind.PEER_LOST

    def close(self) -> None:
        if self.parcel_fd >= 0:
            os.close(self.parcel_fd)
            self.parcel_fd = -1


class Member:
    """One rank of a group: its process, its channel and what it has said so far.

    stays: it waits for another task after this one, instead of being released.
    """

    def __init__(self, rank: int, process: RankProcess, channel: Channel, stays: bool = False) -> None:
        self.rank = rank
        self.process = process
        self.channel = channel
        self.report: Report | None = None
        self.displays: dict[int, dict[str, Any]] = {}  # rich messages whose mark has not been read yet
        self.has_ended = False  # its process is over, though perhaps not reaped yet
        self.was_killed = False  # by us
        self.was_interrupted = False  # by us, with SIGINT
        self.is_looked_at = False  # it failed, and has not reported yet: somebody looks at it in the debugger
        self.released_at: float | None = None
        self.segments: set[str] = set()  # of NCCL's shared memory, which it can no longer give back itself
        self.stays = stays
        self.takes_part = True

    def begin(self, takes_part: bool) -> None:
        """Another run of a rank that stays."""
        self.takes_part = takes_part
        self.report = None if takes_part else Report.of_an_outsider()
        self.was_interrupted = False
        self.is_looked_at = False

    @property
    def is_through(self) -> bool:
        """Whether the run has nothing more to expect of it."""
        return self.has_ended or (self.stays and self.report is not None)

    @property
    def is_working(self) -> bool:
        """Still busy with the user's code, as far as we know."""
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
        """Let a rank that has reported leave."""
        if self.released_at is None and not self.has_ended and not self.stays:
            self.released_at = now
            with contextlib.suppress(OSError):
                self.channel.send({"op": "exit"})
