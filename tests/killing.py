"""Processes that die in the middle of writing: before each call that changes the disk for good, in turn."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CALLS = ((os, "fsync"), (os, "rename"), (os, "truncate"), (shutil, "rmtree"), (Path, "write_text"))


class Points:
    """Every call by which a save changes the disk for good, by name; the process dies before the chosen one."""

    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at
        self.passed: list[str] = []

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for module, name in _CALLS:
            patch.setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if len(self.passed) == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.passed.append(name)
            return function(*args, **options)

        return watched


def points_passed(write: Callable[[], object]) -> list[str]:
    """The points that `write` passes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        points = Points(die_at=None)
        points.watch(patch)
        write()
    return points.passed


def die_at(point: int, write: Callable[[], object]) -> None:
    """Run `write` in a child that is killed with SIGKILL at `point`."""
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Points(point).watch(patch)
                write()
        finally:
            os._exit(1)  # it lived to the end
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
