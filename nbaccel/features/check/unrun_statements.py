"""Statements that a dry run cannot undo, and so does not run: programs and removals. Runs in ranks; imports no torch.

A line of the notebook, or of a module beside it, starts no program: one that does nothing is started in its place, so
that the call returns what it returns for a program without output. A file, or folder, that could not be put back is not
removed or moved. Each such line is recorded once. Calls by libraries are made: they ask git, a driver or a compiler.

Not covered: workers of a loader that are no forks of their rank.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbaccel.features.check.dry_run.rank_records import NOT_RUN
from nbaccel.features.check.redirected_saves import put_everywhere
from nbaccel.features.source.users_functions import is_rewritable

__all__ = ["UnrunStatements", "line_of_user", "skip_programs", "skip_removals"]

_WAYS = (
    *("IPython.", "_pyrepl.", "asyncio.", "concurrent.", "contextlib.", "functools.", "glob.", "google.colab."),
    *("invoke.", "ipykernel.", "nbaccel.features.check.", "nbaccel.launching.libraries.", "os.", "pathlib."),
    *("pexpect.", "plumbum.", "psutil.", "pty.", "ptyprocess.", "sh.", "shutil.", "subprocess.", "tempfile."),
    "threading.",
)
"""Modules by which a program starts programs, or removes files: what counts is who calls them."""

_NOTHING = ("/bin/sh", "-c", ":")
"""A program that does nothing."""

_STARTS: Mapping[str, tuple[Any, ...]] = {
    "system": (":",),
    "posix_spawn": (_NOTHING[0], _NOTHING),
    "posix_spawnp": (_NOTHING[0], _NOTHING),
    "execv": (_NOTHING[0], _NOTHING),
    "execve": (_NOTHING[0], _NOTHING),
}
"""Functions of `os` to which all others lead, with first arguments for such a program; the last is the command."""

_OF_ITS_PROGRAM = frozenset(
    {"executable", "preexec_fn", "shell", "cwd", "env", "user", "group", "extra_groups", "umask", "process_group"}
)
"""Arguments of `subprocess.Popen` that suit no other program."""

_SHOWN = 60
"""Characters of a command that a report shows."""


class UnrunStatements:
    """The statements of this rank that were not run.

    Args:
        write: Appends a record.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        self._write = write
        self._told: set[tuple[str, int]] = set()

    def skips(self, why: str) -> bool:
        """Return whether a line of the user's makes the call that asks, and then must not.

        Args:
            why: A sentence.
        """
        place = line_of_user()
        if place is not None:
            self._note(place, why)
        return place is not None

    def refuse(self, why: str) -> None:
        """Record a call that is refused, whoever makes it, under the line of the user's that has led to it."""
        self._note(line_of_user(through_libraries=True) or ("", 0), why)

    def _note(self, place: tuple[str, int], why: str) -> None:
        if place not in self._told:
            self._told.add(place)
            self._write({"kind": NOT_RUN, "file": place[0], "line": place[1], "why": why})


def line_of_user(through_libraries: bool = False) -> tuple[str, int] | None:
    """Return file and line of the caller if that is code of the notebook or of a module beside it; else None.

    Args:
        through_libraries: Look further, for the line of theirs that has led to this call.
    """
    thread = threading.main_thread()
    # What an event loop of IPython does, as for %%bash, has no caller in its own thread.
    for frame in (sys._getframe(1), sys._current_frames().get(thread.ident or 0)):
        while frame is not None:
            if not f"{frame.f_globals.get('__name__')}.".startswith(_WAYS):
                if _is_theirs(frame.f_code.co_filename):
                    return frame.f_code.co_filename, frame.f_lineno
                if not through_libraries:
                    return None
            frame = frame.f_back
    return None


_is_theirs = functools.cache(is_rewritable)


def skip_programs(unrun: UnrunStatements) -> None:
    """Begin to start a program that does nothing where the user's lines start one. Called once per process."""
    real = subprocess.Popen.__init__
    signature = inspect.signature(real)

    @functools.wraps(real)
    def start(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        if unrun.skips(_starts(call.arguments["args"])):
            for name in _OF_ITS_PROGRAM & call.arguments.keys():
                del call.arguments[name]
            call.arguments["args"] = _NOTHING
        real(*call.args, **call.kwargs)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    put_everywhere(
        {getattr(os, name): _starting(getattr(os, name), unrun, nothing) for name, nothing in _STARTS.items()}
    )


def _starting(real: Callable[..., Any], unrun: UnrunStatements, nothing: tuple[Any, ...]) -> Callable[..., Any]:
    @functools.wraps(real)
    def start(*args: Any, **kwargs: Any) -> Any:
        args += tuple(kwargs.pop(name) for name in ("command", "path", "argv") if name in kwargs)
        if len(args) >= len(nothing) and unrun.skips(_starts(args[len(nothing) - 1])):
            args = (*nothing, *args[len(nothing) :])
        return real(*args, **kwargs)

    return start


def _starts(command: Any) -> str:
    parts: Sequence[Any] = [command] if isinstance(command, (str, bytes, os.PathLike)) else command
    text = " ".join(" ".join(map(os.fsdecode, parts)).split())
    return f"it starts a program ({text if len(text) <= _SHOWN else f'{text[: _SHOWN - 1]}…'})"


def skip_removals(unrun: UnrunStatements, why_not: Callable[[str, bool], str]) -> None:
    """Begin to leave files alone that could not be put back. Called once per process.

    Args:
        why_not: Returns the reason for a path, and whether it is moved; an empty text where it can be put back.
    """
    removals = (os.remove, os.unlink, os.rmdir, os.rename, os.replace, shutil.rmtree)
    put_everywhere({real: _removing(real, unrun, why_not) for real in removals})


def _removing(
    real: Callable[..., Any], unrun: UnrunStatements, why_not: Callable[[str, bool], str]
) -> Callable[..., Any]:
    moves = real in (os.rename, os.replace)

    @functools.wraps(real)
    def remove(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get("path", kwargs.get("src"))
        is_path = isinstance(given, (str, bytes, os.PathLike)) and not any("dir_fd" in name for name in kwargs)
        if is_path and (why := why_not(os.fsdecode(given), moves)) and unrun.skips(why):
            return None
        return real(*args, **kwargs)

    return remove
