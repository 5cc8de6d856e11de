"""What a test left behind: processes, open descriptors, signal handlers. Reads /proc; about a millisecond.

A process is ours when its environment carries our mark (a program that we, or a child of ours, started) or
when its stack begins where ours does (a fork of this very process; the kernel draws that address at each
exec). Both hold for orphans, which no parent number leads back to.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MARK = "NBACCEL_TEST_SESSION"

_PROC = Path("/proc")
_PARENT, _STACK_START = 1, 25  # positions in /proc/*/stat counted from the state, proc(5)
_LIVE_ON = ("multiprocessing.resource_tracker",)
"""Programs that serve the whole test session and end with it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this machine at one moment."""

    pids: frozenset[int]

    @classmethod
    def now(cls) -> Processes:
        return cls(frozenset(int(name) for name in os.listdir(_PROC) if name.isdigit()))

    def end_new_ones(self, patience_s: float) -> list[str]:
        """Processes of ours that were not there before and stay; they are killed, so that the next test is fair."""
        deadline = time.monotonic() + patience_s
        while (left := self._new_ones()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the last resort: a process that is not our child cannot be waited for
        for pid in left:
            _kill(pid)
        return list(left.values())

    def _new_ones(self) -> dict[int, str]:
        """Process id to description."""
        found = {pid: _describe(pid) for pid in Processes.now().pids - self.pids if _is_ours(pid)}
        return {pid: text for pid, text in found.items() if not any(program in text for program in _LIVE_ON)}


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_ours(pid: int) -> bool:
    fields = _stat(pid)
    if not fields:
        return False
    if int(fields[_PARENT]) == os.getpid():
        return True
    if fields[0] == "Z":  # an orphan that has ended already; init will collect it
        return False
    if fields[_STACK_START] == _stat("self")[_STACK_START] != "0":
        return True
    try:
        return f"{MARK}={os.getpid()}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _describe(pid: int) -> str:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"{pid} ({command[:120] or 'ended, never waited for'})"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


_KINDS = (
    ("socket", re.compile(r"socket:")),
    ("pipe", re.compile(r"pipe:")),
    ("memory file", re.compile(r"/memfd:")),
    ("process handle", re.compile(r"anon_inode:\[pidfd\]")),
    ("selector", re.compile(r"anon_inode:\[eventpoll\]")),
)[: None if int(importlib.metadata.version("jupyter_client").split(".")[0]) >= 8 else -1]
"""Without selectors where clients of kernels leave their loops open."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """How many descriptors of each kind this process has open. Files are left out: libraries keep theirs."""

    counts: Counter[str]

    @classmethod
    def now(cls) -> Descriptors:
        counts: Counter[str] = Counter()
        for number in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:  # the folder's own
                continue
            counts.update(kind for kind, pattern in _KINDS if pattern.match(target))
        return cls(counts)

    def left(self, patience_s: float = 5.0) -> list[str]:
        """What was opened since and stays open; objects in reference cycles had their chance to close.

        The pipe of a queue of multiprocessing is closed by a thread of its own, some time after the queue has gone.
        """
        if not Descriptors.now().counts - self.counts:
            return []
        gc.collect()
        deadline = time.monotonic() + patience_s
        while (more := Descriptors.now().counts - self.counts) and time.monotonic() < deadline:
            time.sleep(0.01)  # nothing tells when that is done
        return [f"{count} open {kind}{'s' * (count > 1)}" for kind, count in sorted(more.items())]


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Not SIGCHLD: torch's DataLoader takes it with its first worker, and keeps it."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who handles which signal."""

    by_signal: dict[signal.Signals, object]

    @classmethod
    def now(cls) -> Handlers:
        return cls({number: signal.getsignal(number) for number in _SIGNALS})

    def changed(self) -> list[str]:
        """The signals that are handled otherwise now."""
        return [
            number.name for number, handler in Handlers.now().by_signal.items() if handler != self.by_signal[number]
        ]
