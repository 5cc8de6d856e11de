"""The reaper: one small process per kernel that ends the ranks when the kernel dies. Standard library only.

Ranks watch the kernel themselves (`rank/lifetime`), but a Python thread needs its interpreter's lock, and a rank can
hold that for minutes inside C. The reaper is the second safeguard: it waits on the kernel's pidfd and then kills every
session that it was told about, with all descendants. It runs in its own session, which Jupyter's kill of the kernel's
process group does not reach.

It runs as a script (`python -S -E reaper.py PIDFD SOCKET`); ranks and the kernel import `kill_session` too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "kill_session",
    "remove_segments",
    "segments_of",
    "session_members",
]

_LOOK_S = 0.1
_SHM = "/dev/shm"
_STAT_BYTES = 4096
"""More than the line of /proc/PID/stat has: fifty numbers and a name."""


def session_members(leaders: Iterable[int]) -> set[int]:
    """Return every live process in the sessions of `leaders`, or descended from one of them.

    Descendants are searched too because a child that started its own session left that of its rank.
    """
    wanted = set(leaders)
    entries = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    # Most often nothing is left. Then nobody can descend from it either, and the parents of all the processes that a
    # machine has, which take twenty times as long to ask for as their sessions, need not be known.
    if not (any(map(_parent_and_session, wanted)) or _are_others_in(wanted, entries)):
        return set()
    parents: dict[int, int] = {}
    members: set[int] = set()
    for pid in map(int, entries):
        if (ties := _parent_and_session(pid)) is None:
            continue
        parents[pid], session = ties
        if session in wanted or pid in wanted:
            members.add(pid)
    found = True
    while found:
        found = False
        for pid, parent_pid in parents.items():
            if pid not in members and parent_pid in members:
                members.add(pid)
                found = True
    return members


def _are_others_in(sessions: set[int], entries: Sequence[str]) -> bool:
    """Return whether a live process other than their leaders is in one of `sessions`.

    Args:
        entries: The numbers of all processes.
    """
    leaders = {str(pid) for pid in sessions}
    others = [entry for entry in entries if entry not in leaders]
    with contextlib.suppress(OSError):
        if sessions.isdisjoint(map(os.getsid, map(int, others))):
            return False
    return any(_may_be_of(sessions, pid) and _parent_and_session(pid) for pid in map(int, others))


def _may_be_of(sessions: Collection[int], pid: int) -> bool:
    """Return whether the process is in one of `sessions`. It may have ended, if it is not reaped yet."""
    try:
        return os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:  # no permission to ask: its entry in /proc may still say it
        return True


def _parent_and_session(pid: int) -> tuple[int, int] | None:
    """Return the parent and the session of a live process; None for one that has ended, reaped or not."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state, parent, _, session = os.read(file, _STAT_BYTES).rpartition(b")")[2].split(maxsplit=4)[:4]
    except OSError:
        return None
    finally:
        os.close(file)
    return None if state in (b"Z", b"X") else (int(parent), int(session))


def kill_session(*leaders: int, spare: int = 0, wait_s: float = 1.0) -> None:
    """Send SIGKILL to everything in the sessions of `leaders` (their pids) and everything descended from them.

    It repeats until nothing is left or `wait_s` is over: a process can be born while the others are being killed. The
    NCCL shared memory that they made is removed with them.

    Args:
        spare: A pid that is left alone, for a process that ends itself afterwards.
    """
    deadline = time.monotonic() + wait_s
    segments = segments_of(leaders)
    try:
        _kill(leaders, spare, deadline, segments)
    finally:
        remove_segments(segments)


def _kill(leaders: Collection[int], spare: int, deadline: float, segments: set[str]) -> None:
    """Kill the sessions of `leaders`, and add to `segments` those that the processes have before they are killed."""
    # Descendants are remembered: once their parent is dead they belong to init and no longer show whose they were.
    known: set[int] = set()
    while True:
        members = session_members([*leaders, *known]) - {spare}
        if not members:
            return
        known |= members
        segments |= segments_of(members)
        # Leaders last: several killers may be at work, and a living leader is how each of them finds the others.
        is_late = time.monotonic() > deadline
        for pid in members if is_late else (members - set(leaders)) or members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if is_late:
            return
        time.sleep(0.002)


# Machines run full of such segments: https://github.com/llm-d/llm-d/issues/352.
def segments_of(pids: Iterable[int]) -> set[str]:
    """Return NCCL's segments of shared memory that these processes have open or mapped, and that have a name.

    NCCL unlinks a segment when the last peer has attached to it. If a process is killed before that, some 10 MB of
    /dev/shm stay occupied for ever. The name does not say whose it is, so only processes that have it open count.
    """
    try:
        named = {os.path.join(_SHM, name) for name in os.listdir(_SHM) if name.startswith("nccl-")}
    except OSError:
        return set()
    return {path for pid in pids for path in named & _files_of(pid)} if named else set()


def remove_segments(paths: Iterable[str]) -> None:
    """Free the shared memory, once the processes that had it are dead."""
    for path in paths:
        with contextlib.suppress(OSError):  # NCCL has unlinked it meanwhile
            os.unlink(path)


def _files_of(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        found |= {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if _SHM in line}
    return found


class _Watch:
    """The orders that the reaper has received: the sessions to end, the programs to run, and the folders to remove."""

    def __init__(self) -> None:
        self.leaders: set[int] = set()
        self.grace_s = 0.0
        self.folders: set[str] = set()
        self.programs: set[str] = set()

    def learn(self, line: str) -> None:
        """Take one line.

        `+pid`, `-pid` add and drop a session, `/path`, `-/path` a folder, `!argv`, `-!argv` a program (its arguments as
        JSON), and `=20` grants 20 seconds.
        """
        if line.startswith("/"):
            self.folders.add(line)
        elif line.startswith("-/"):
            self.folders.discard(line[1:])
        elif line.startswith("!"):
            self.programs.add(line[1:])
        elif line.startswith("-!"):
            self.programs.discard(line[2:])
        elif line.startswith("="):
            self.grace_s = float(line[1:])
        elif line.startswith("+"):
            self.leaders.add(int(line[1:]))
        elif line.startswith("-"):
            self.leaders.discard(int(line[1:]))

    def reap(self) -> None:
        if self.leaders:
            self._wait_for_last_checkpoints()
            kill_session(*self.leaders, wait_s=5.0)
        for program in self.programs:  # before their folders go
            with contextlib.suppress(OSError, ValueError):
                arguments = json.loads(program)
                os.waitpid(os.posix_spawn(arguments[0], arguments, os.environ), 0)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_last_checkpoints(self) -> None:
        """Wait for ranks that save themselves and then end on their own; the other ranks watch the kernel too."""
        deadline = time.monotonic() + self.grace_s
        while time.monotonic() < deadline and session_members(self.leaders):
            time.sleep(_LOOK_S)


def main(kernel_pidfd: int, connection: socket.socket) -> None:
    """Wait until the kernel dies, or closes its end with no session left; then clean up and end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = _Watch()
    pending = b""
    poll = select.poll()
    poll.register(kernel_pidfd, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        # Lines that were written before the death count: read the socket first.
        if connection.fileno() in ready:
            data = connection.recv(1 << 16)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                watch.learn(line.decode())
            if not data:
                poll.unregister(connection)
                if not watch.leaders:
                    watch.reap()
                    return
                continue
        if kernel_pidfd in ready:
            watch.reap()
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
