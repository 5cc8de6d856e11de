"""Call watch: ends this process at a call of a map's function that takes too long. Runs in ranks of `nbaccel.map`.

As after any death, the launcher starts the rank again, and the items come in ever smaller calls until the one that
hangs is alone. This process leaves word of it in a file, which the next one reads.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from nbaccel.base.events import CallTimedOut, emit
from nbaccel.base.notices import is_users
from nbaccel.base.quantities import plural

__all__ = ["CallWatch", "Unwatched", "watch_of_calls"]

_PLACE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OUR_CALL = f'File "{Path(__file__).with_name("item_call.py")}"'
_CELL = re.compile(r"[/\\]ipykernel_\d+[/\\]")
"""In the names that IPython's kernel gives to the text of cells."""

_TOLD = ".told"


class CallWatch(Protocol):
    """Limits the time of calls."""

    def over(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        """Return a block for one call.

        Args:
            indices: Its items.
        """

    def explain(self, index: int, deaths: int) -> str:
        """Return why processes ended that worked on this item alone, if calls took too long; else empty."""

    def close(self) -> None: ...


class Unwatched:
    """Calls may take as long as they like."""

    def over(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def explain(self, index: int, deaths: int) -> str:
        return ""

    def close(self) -> None:
        pass


class _LimitedCalls:
    """Ends this process where a call takes longer than a limit.

    The watch is faulthandler's thread, which needs no lock of Python's: a regular expression that searches for ever
    holds that lock. It writes all stacks into the file of this process, after a line with the items of the call, and
    ends the process with exit code 1.

    Args:
        folder: The folder of such files; one process has one, ``RANK-...``.
    """

    def __init__(self, folder: Path, limit_s: float, rank: int, counts: bool) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._limit_s = limit_s
        self._tell(rank, counts)
        self._path = folder / f"{rank}-{uuid.uuid4().hex[:12]}"
        self._fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def _tell(self, rank: int, counts: bool) -> None:
        """Say of the process before, if a call was its end.

        Args:
            counts: Its death is not to end the run.
        """
        for path in self._folder.glob(f"{rank}-*"):
            _, count, stacks = _read(path)
            if stacks and path.suffix != _TOLD:
                with suppress(FileNotFoundError):  # another notebook's rank of this number was first
                    path.rename(path.with_suffix(_TOLD))
                sys.stderr.write(
                    f"a call with {plural(count, 'item')} took longer than {self._limit}{_place(stacks)}: "
                    f"the process of rank {rank} before this one was ended\n"
                )
                sys.stderr.flush()
                if counts:
                    emit(CallTimedOut())

    @property
    def _limit(self) -> str:
        return f"hang_timeout_s={self._limit_s:g}"

    @contextmanager
    def over(self, indices: Sequence[int]) -> Iterator[None]:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.write(self._fd, f"{indices[0]} {len(indices)}\n".encode())
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._fd)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def explain(self, index: int, deaths: int) -> str:
        for first, count, stacks in map(_read, self._folder.iterdir()):
            if (first, count) == (index, 1):
                return f"TimeoutError: took longer than {self._limit}, {plural(deaths, 'time')}{_place(stacks)}"
        return ""

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _read(path: Path) -> tuple[int, int, str]:
    """Return the first item of the last call of a process, their number, and the stacks if it took too long."""
    text = ""
    with suppress(FileNotFoundError):  # its process has left
        text = path.read_text(errors="replace")
    head, _, stacks = text.partition("\n")
    first, _, count = head.partition(" ")
    return (int(first), int(count), stacks) if stacks else (-1, 0, "")


def _place(stacks: str) -> str:
    """Return where the user's function was, as ", in parse, line 3 of text.py"; empty if the stacks do not show it.

    Example:
        >>> _place('  File "/tmp/ipykernel_7/8.py", line 3 in parse\\n  ' + _OUR_CALL + ", line 9 in __call__")
        ', in parse, line 3 of its cell'
    """
    for stack in stacks.split("\n\n"):
        if _OUR_CALL in stack:
            frames = _PLACE.findall(stack)
            path, line, name = next((frame for frame in frames if is_users(frame[0])), frames[0])
            file = "its cell" if _CELL.search(path) else Path(path).name
            return f", in {name}, line {line} of {file}"
    return ""


def watch_of_calls(folder: Path, limit_s: float | None, rank: int, counts: bool) -> CallWatch:
    """Return the watch of a worker.

    Args:
        folder: The folder of the map.
        limit_s: The longest that a call may take; None for no limit.
        counts: The map has answers, so that a process which was ended by a call counts as progress of its rank.
    """
    return Unwatched() if limit_s is None else _LimitedCalls(folder / "hangs", limit_s, rank, counts)
