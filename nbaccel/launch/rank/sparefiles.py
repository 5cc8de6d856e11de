"""Spare descriptors: a rank whose program has opened as many files as allowed can still report. Used by the runtime."""

from __future__ import annotations

import contextlib
import os

__all__ = ["SpareFiles"]


class SpareFiles:
    """Descriptors kept back while the user's code runs, and released for the report."""

    _MOST = 6

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.keep()

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._fds) < self._MOST:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
