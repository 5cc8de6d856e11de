"""Keeper: the kernel's resources that outlive a single run: the reaper, the zygote, the folder of logs.

Runs in the kernel. There is one per process that launches. It is closed when the process ends; if the process is
killed, the reaper does what closing would have done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from nbaccel.launch import guardian
from nbaccel.launch.zygote import Zygote

__all__ = ["Keeper"]

_GUARDIAN_S = 1.0


class Keeper:
    """Starts the reaper and the zygote when they are first needed and ends them with the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.kernel_pidfd = os.pidfd_open(self.pid)
        self._guarded: set[str] = set()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._zygote: Zygote | None = None
        self._folder: str | None = None
        self._runs = 0
        atexit.register(self.close)

    def guard(self, line: str) -> None:
        """Send a line to the reaper, starting it if needed; see `guardian._Watch.learn` for the possible lines."""
        if line.startswith("-"):
            self._guarded.discard(line[1:] if line.startswith("-/") else f"+{line[1:]}")
        else:
            if line.startswith("="):
                self._guarded = {said for said in self._guarded if not said.startswith("=")}
            self._guarded.add(line)
        if self._guardian is None or self._guardian.poll() is not None:
            self._start_guardian()
            line = "\n".join(self._guarded)  # repeat to the new one what the dead one was told
        assert self._line is not None
        with contextlib.suppress(BrokenPipeError):
            self._line.sendall(line.encode() + b"\n")

    def zygote(self) -> Zygote:
        """Return the zygote; start one if there is none, or none that fits the installed torch."""
        if self._zygote is not None and not self._zygote.is_usable:
            self._end_zygote()
        if self._zygote is None:
            self._zygote = Zygote(self.kernel_pidfd, has_shell="IPython" in sys.modules)
            self.guard(f"+{self._zygote.pid}")
        return self._zygote

    def new_log(self) -> str:
        """Return the path of the next run's log; the folder is removed with the process."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="nbaccel-logs-")  # mode 0700
            self.guard(self._folder)
        self._runs += 1
        return os.path.join(self._folder, f"run-{self._runs}.log")

    def helpers(self) -> dict[int, str]:
        """Return the purpose of each process that was started, by process id."""
        named = {}
        if self._guardian is not None:
            named[self._guardian.pid] = "reaper, which ends ranks if the kernel dies"
        if self._zygote is not None:
            named[self._zygote.pid] = "zygote, a clean process to start ranks from"
        return named

    def fds(self) -> list[int]:
        """Return the descriptors that a forked rank must not hold."""
        held = [] if self._line is None else [self._line.fileno()]
        return held if self._zygote is None else [*held, self._zygote.fileno()]

    def close(self) -> None:
        """End the processes that were started.

        Do nothing the second time, or in a process that inherited this object by fork.
        """
        if os.getpid() != self.pid or self.kernel_pidfd < 0:
            return
        atexit.unregister(self.close)
        self._end_zygote()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._guardian is not None and self._line is not None:
            # A child that the user forked holds a copy of the socket: closing this one alone would not end it.
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
            self._line.close()
            # It stays while there are ranks (a launch in a daemon thread), and ends them once this process is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(_GUARDIAN_S)
            self._guardian = self._line = None
        os.close(self.kernel_pidfd)
        self.kernel_pidfd = -1  # the number may be reused by now

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.close()
            self.guard(f"-{zygote.pid}")

    def _start_guardian(self) -> None:
        if self._line is not None:
            self._line.close()
        mine, theirs = socket.socketpair()
        with theirs:
            self._guardian = subprocess.Popen(
                [sys.executable, "-S", "-E", guardian.__file__, str(self.kernel_pidfd), str(theirs.fileno())],
                pass_fds=[self.kernel_pidfd, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        self._line = mine
