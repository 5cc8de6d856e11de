"""Guardian: one tiny process per kernel that buries the ranks when the kernel dies. Standard library only.

Ranks watch the kernel themselves (`watch.py`), but a thread of Python needs its interpreter's lock, and a rank
can hold that for minutes inside C. The guardian is the second line: it waits on the kernel's pidfd and then kills
every session it was told about, with all descendants. It lives in a session of its own, which Jupyter's kill
of the kernel's process group does not reach.

Run as a script (`python -S -E guardian.py PIDFD SOCKET`); `kill_session` is imported by ranks and the kernel too.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable

__all__ = ["kill_session", "remove_segments", "segments_of", "session_members"]

_LOOK_S = 0.1
_SHM = "/dev/shm"


def session_members(leaders: Iterable[int]) -> set[int]:
    """Every live process in the sessions of `leaders`, or descended from one of them.

    Descendants are looked for as well because a child that started a session of its own left ours.
    """
    wanted = set(leaders)
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    # Most often nothing is left. Then nobody can descend from it either, and the parents of all the processes that a
    # machine has, which take twenty times as long to ask for as their sessions, need not be known.
    if not any(_may_be_of(wanted, pid) and _parent_and_session(pid) for pid in pids):
        return set()
    parents: dict[int, int] = {}
    members: set[int] = set()
    for pid in pids:
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


def _may_be_of(sessions: Collection[int], pid: int) -> bool:
    """Whether the process leads one of `sessions` or is in one. It may have ended, as long as nobody has reaped it."""
    try:
        return pid in sessions or os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:  # it is not for us to ask: its entry in /proc may still tell
        return True


def _parent_and_session(pid: int) -> tuple[int, int] | None:
    """Of a live process; None for one that has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
    except OSError:
        return None
    return None if state in (b"Z", b"X") else (int(parent), int(session))


def kill_session(*leaders: int, spare: int = 0, wait_s: float = 1.0) -> None:
    """SIGKILL everything in the sessions of `leaders` (their pids) and everything descended from them.

    spare: a pid that is left alone, for a process that ends itself afterwards.
    Repeats until nothing is left or `wait_s` is over: a process can be born while the others are being killed.
    What they have made of NCCL's shared memory goes with them.
    """
    deadline = time.monotonic() + wait_s
    segments = segments_of(leaders)
    try:
        _kill(leaders, spare, deadline, segments)
    finally:
        remove_segments(segments)


def _kill(leaders: Collection[int], spare: int, deadline: float, segments: set[str]) -> None:
    """segments: what is found of the processes before they are killed is added."""
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


def segments_of(pids: Iterable[int]) -> set[str]:
    """NCCL's segments of shared memory that these processes have open or mapped, and that have a name.

    NCCL unlinks a segment when the last peer has attached to it. Of a process that is killed before, it keeps some 10
    MB of /dev/shm for good. The name does not say whose it is, so only who has it in hand counts.
    """
    try:
        named = {os.path.join(_SHM, name) for name in os.listdir(_SHM) if name.startswith("nccl-")}
    except OSError:
        return set()
    return {path for pid in pids for path in named & _files_of(pid)} if named else set()


def remove_segments(paths: Iterable[str]) -> None:
    """Give the memory back, once those are dead who had them."""
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
    """What the guardian has been told: whose sessions to end and which folders to remove."""

    def __init__(self) -> None:
        self.leaders: set[int] = set()
        self.grace_s = 0.0
        self.folders: set[str] = set()

    def learn(self, line: str) -> None:
        """`+pid` and `-pid` add and drop a session; `/path` and `-/path` a folder; `=20` grants sessions 20 seconds."""
        if line.startswith("/"):
            self.folders.add(line)
        elif line.startswith("-/"):
            self.folders.discard(line[1:])
        elif line.startswith("="):
            self.grace_s = float(line[1:])
        elif line.startswith("+"):
            self.leaders.add(int(line[1:]))
        elif line.startswith("-"):
            self.leaders.discard(int(line[1:]))

    def bury(self) -> None:
        if self.leaders:
            self._wait_for_last_checkpoints()
            kill_session(*self.leaders, wait_s=5.0)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_last_checkpoints(self) -> None:
        """Ranks that save themselves end by themselves; the others watch the kernel too."""
        deadline = time.monotonic() + self.grace_s
        while time.monotonic() < deadline and session_members(self.leaders):
            time.sleep(_LOOK_S)


def main(kernel_pidfd: int, connection: socket.socket) -> None:
    """Wait until the kernel dies, or closes its end with nothing left to guard; then clean up and leave."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = _Watch()
    pending = b""
    poll = select.poll()
    poll.register(kernel_pidfd, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        # What was written before the death counts: read the socket first.
        if connection.fileno() in ready:
            data = connection.recv(1 << 16)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                watch.learn(line.decode())
            if not data:
                poll.unregister(connection)
                if not watch.leaders:
                    watch.bury()
                    return
                continue
        if kernel_pidfd in ready:
            watch.bury()
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
