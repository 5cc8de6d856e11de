"""The output of a rank: its two output pipes, and the rich messages and questions that belong among their lines.

Used by the runtime, for the user's prints, displays and debugger. The screen's router is the other end, in the kernel.
The report, which is for the kernel alone, does not use it.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import io
import os
import sys
import threading
from typing import Any

from nbaccel.errors import NoInput
from nbaccel.launching.ipc.channel import PIPE_BYTES, PROMPT, Channel
from nbaccel.launching.ipc.spec import WorkerBoot
from nbaccel.launching.rank.debugger import RunIsOver

__all__ = [
    "RankStreams",
    "mark",
]


class RankStreams:
    """Makes this process print through the rank's pipes, from `install` on."""

    def __init__(self, boot: WorkerBoot) -> None:
        self._boot = boot
        self._rank = boot.world.rank
        self._nonce = boot.run_nonce
        self._message_id = 0
        self._publishing = threading.Lock()
        self._asking = threading.Lock()
        # Made in the kernel, of the pipes that the rank will have as 1 and 2: a rank that makes them copies 30 pages.
        self._stdout = io.FileIO(boot.stdout_fd, "w", closefd=False)
        self._stderr = _ErrorsInOrder(boot.stderr_fd)
        self._texts = _text_stream(self._stdout), _text_stream(self._stderr)

    def install(self, channel: Channel) -> tuple[Any, Any]:
        """Make fd 0 empty, fd 1 and 2 pipes to the kernel, and sys.stdout and sys.stderr write there line by line.

        Args:
            channel: The rank's end, for what is shown among the lines.

        Returns:
            The earlier `sys.stdout` and `sys.stderr`.
        """
        self._pid = os.getpid()
        self._channel = channel
        stdout_fd, stderr_fd = self._boot.stdout_fd, self._boot.stderr_fd
        for fd in (stdout_fd, stderr_fd):
            with contextlib.suppress(OSError):  # over the system's limit for pipes: the default size works too
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        # A separate copy for marks: user code may point fd 1 elsewhere.
        self._mark_fd = fcntl.fcntl(stdout_fd, fcntl.F_DUPFD_CLOEXEC, 3)
        empty = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((empty, 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        old = (sys.stdout, sys.stderr)
        self._stdout.__init__(1, "w", closefd=False)  # type: ignore[misc]
        self._stderr.become_fd_2(self._mark_fd, self._nonce)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = self._texts  # type: ignore[misc]
        return old

    def publish(self, message: dict[str, Any]) -> None:
        """Send a rich message, and mark its place among the lines in the output pipe."""
        with self._publishing, contextlib.suppress(OSError):
            self._message_id += 1
            sys.stdout.flush()
            sys.stderr.flush()
            self._channel.send({"op": "display", "id": self._message_id, "message": message})
            os.write(self._mark_fd, mark(self._nonce, self._message_id))

    def ask(self, prompt: str) -> str:
        """Return the user's input at `prompt`, which is shown after everything that this rank has printed."""
        if os.getpid() != self._pid:
            raise NoInput(
                f"a child process of rank {self._rank} asked for keyboard input, which the rank alone can do: a loader "
                "with num_workers=0 reads its data in the rank, and can be debugged there."
            )
        with self._asking:
            self.publish({"kind": PROMPT, "prompt": prompt})
            frame = self._channel.receive()
        if frame is None or frame[0]["op"] != "answer" or frame[0]["is_over"]:
            raise RunIsOver
        if (typed := frame[0]["text"]) is None:
            raise bdb.BdbQuit
        return str(typed)

    def tell(self, op: str) -> None:
        """Send `op` at once, before the report: the report will be late, or peers are about to miss this rank."""
        with contextlib.suppress(OSError):
            self._channel.send({"op": op})


def mark(nonce: str, what: int | str) -> bytes:
    """Return the bytes that stand in a rank's output pipe for a rich message, or for a change of the stream."""
    return f"\x1e{nonce}:{what}\x1e".encode()


class _ErrorsInOrder(io.FileIO):
    """Fd 2, which writes to the pipe of stdout between marks: two pipes would lose the order of their lines.

    What the program's libraries write to fd 2 themselves goes there, and so does all text while fd 2 is another file.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def become_fd_2(self, pipe_fd: int, nonce: str) -> None:
        """Begin to write.

        Args:
            pipe_fd: The pipe of stdout.
            nonce: See `mark`.
        """
        super().__init__(2, "w", closefd=False)
        self._pipe_fd = pipe_fd
        self._begin, self._end = mark(nonce, "stderr"), mark(nonce, "stdout")
        self._own_files = _identity(2), _identity(pipe_fd)

    def write(self, data: Any) -> int:
        if (_identity(2), _identity(self._pipe_fd)) != self._own_files:  # a child may have closed what it inherited
            return super().write(data)
        rest = memoryview(b"".join((self._begin, data, self._end)))  # in one call: other threads print, too
        while rest:
            rest = rest[os.write(self._pipe_fd, rest) :]
        return len(data)


def _identity(fd: int) -> tuple[int, int]:
    """Return device and number of the file that `fd` is; those of none where it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def _text_stream(raw: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
