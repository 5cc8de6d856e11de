"""Stacks of ranks that are asked for them: where each is, and whether it waits for the others. Runs in the kernel.

`standstill` asks when ranks make no progress. The answers are files of text, which the ranks write.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.ipc.user_code import ASK, cell_name, is_users, question_path, stack_path

__all__ = ["Question", "Stack", "WatchedMember", "ask_for_stack"]

_ANSWER_S = 0.6  # a rank needs a millisecond; a machine that swaps may need this
_PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAITS = (
    os.path.join(os.sep, "nbaccel", "train", "distributed", ""),  # not imported: launch does not know train
    os.path.join(os.sep, "torch", "distributed", ""),
)
_COLLECTIVES = (
    _WAITS[0],
    *(
        os.path.join("torch", "distributed", name)
        for name in ("distributed_c10d.py", "utils.py", "_functional_collectives.py")
    ),
    os.path.join("torch", "nn", "parallel", "distributed.py"),
)
_OF_SHARDS = (
    *(os.path.join("torch", "distributed", part, "") for part in ("fsdp", "tensor")),
    os.path.join(os.sep, "nbaccel", "train", "checkpoint", "save_agreement.py"),
    os.path.join(os.sep, "nbaccel", "features", "sharded", ""),
)
_CALLERS = (os.path.join(os.sep, "torch", "_ops.py"), os.path.join(os.sep, "torch", "_library", ""))
"""They call every operator of torch, collectives among them: who calls them says which."""
_WAITS_FOR_DEVICE = os.path.join(os.sep, "torch", "cuda", "")
_WAITS_IN = ("_engine_run_backward",)  # DDP's own sums are waited for at the end of backward


class _MembersProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def signal(self, number: int) -> None: ...


class WatchedMember(Protocol):
    """A rank that is watched: a `WorkerHandle`, or a script's."""

    rank: int
    report: RankReport | None

    @property
    def process(self) -> _MembersProcess: ...

    @property
    def is_working(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Stack:
    """Places of a rank's main thread, innermost first: file, line, function."""

    places: Sequence[tuple[str, int, str]]

    @classmethod
    def read(cls, path: str) -> Stack:
        """Read the latest answer in `path`; empty if there was none."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                head, _, text = file.read().partition("\n")
        except OSError:
            return cls(())
        _, found, rest = text.rpartition(f"hread {head.removeprefix('main ')}")
        places = []
        for line in rest.splitlines()[1:] if found else []:
            match = _PLACE.fullmatch(line)
            if match is None:
                break
            places.append((match[1], int(match[2]), match[3]))
        return cls(places)

    @property
    def waits(self) -> bool:
        """Return whether the rank is inside a collective, as far as the stack shows."""
        return any(part in file for file, _, _ in self.places for part in _WAITS) or any(
            function in _WAITS_IN for _, _, function in self.places
        )

    @property
    def is_in_collective(self) -> bool:
        """Return whether the innermost function is a collective: nothing else holds the rank up. See `waits`."""
        file, _, function = self._operator
        is_called = self.places[:1] != [self._operator]
        return (
            any(part in file for part in (*_COLLECTIVES, *(() if is_called else _OF_SHARDS))) or function in _WAITS_IN
        )

    @property
    def waits_for_device(self) -> bool:
        """Return whether the rank waits for its GPU, as those of a dry run do at the end of each round."""
        return bool(self.places) and _WAITS_FOR_DEVICE in self.places[0][0] and self.places[0][2] == "synchronize"

    @property
    def is_in_shards(self) -> bool:
        """Return whether the rank needs the rows that other ranks have of a model or a tensor."""
        return any(part in file for file, _, _ in self.places for part in _OF_SHARDS)

    @property
    def call(self) -> tuple[tuple[str, int] | None, str]:
        """Return the user's innermost line, and the innermost function: one line may do a forward and a backward."""
        line = next(((file, line) for file, line, _ in self.places if is_users(file)), None)
        return line, self._operator[2]

    @property
    def _operator(self) -> tuple[str, int, str]:
        """Return the innermost place, or the one that has called an operator of torch, if that is innermost."""
        own = (place for place in self.places if not any(part in place[0] for part in _CALLERS))
        return next(own, ("", 0, ""))

    def words(self) -> str:
        """Return the user's innermost line, and the function that it is waiting in."""
        if not self.places:
            return "does not answer: it is stopped, has just begun, or is in C code that lets no Python run"
        inner = self.places[0]
        file, line, function = next((place for place in self.places if is_users(place[0])), inner)
        source = linecache.getline(file, line).strip()
        where = f"{cell_name(file) or file}, line {line}{'' if function == '<module>' else f', in {function}'}"
        below = "" if file == inner[0] else f" (inside {inner[2]} of {os.path.basename(inner[0])})"
        return f"{where}{f': {source}' if source else ''}{below}"


class Question:
    """One request for the stacks of `members`.

    It goes to a thread of each rank. Ranks that have not answered in time are asked by the signal, if they have a
    handler for it. It cannot be seen from here whose handler that is.
    """

    def __init__(self, members: Sequence[WatchedMember], store_path: str, now: float) -> None:
        self._members = members
        self._store_path = store_path
        self._sizes = {member.rank: _size(self._path(member)) for member in members}
        self._has_signalled = False
        self.due_at = now + _ANSWER_S
        for member in members:
            ask_for_stack(question_path(store_path, member.rank))

    def is_over(self, now: float) -> bool:
        """Return whether all have answered, or their time is over."""
        if now < self.due_at:
            return False
        if not self._has_signalled:
            self._has_signalled = True
            deaf = [member for member in self._members if not self._has_answered(member)]
            able = [member for member in deaf if _catches(member.process.pid, ASK)]
            for member in able:
                member.process.signal(ASK)
            if able:
                self.due_at = now + _ANSWER_S
                return False
        return True

    def answers(self) -> dict[int, Stack]:
        """Return the stack of each rank that still works; an empty one for a rank that has not answered."""
        return {
            member.rank: Stack.read(self._path(member)) if self._has_answered(member) else Stack(())
            for member in self._members
            if member.is_working
        }

    def _has_answered(self, member: WatchedMember) -> bool:
        return _size(self._path(member)) > self._sizes[member.rank]

    def _path(self, member: WatchedMember) -> str:
        return stack_path(self._store_path, member.rank)


def ask_for_stack(path: str) -> None:
    """Ask a rank for its stack: write a byte into the FIFO at `path`, if a process reads it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the rank has just begun, or has ended
        return
    try:
        os.write(fd, b"?")
    except OSError:  # it is full of questions
        pass
    finally:
        os.close(fd)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal, and its main thread does not block it.

    It is False if the system does not tell. A blocked signal would be given to code that waits for signals there.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            sets = dict(re.findall(r"^(SigCgt|SigBlk):\s*([0-9a-f]+)$", file.read(), re.MULTILINE))
    except OSError:
        return False
    bit = 1 << (number - 1)
    return bool(int(sets.get("SigCgt", "0"), 16) & bit) and not int(sets.get("SigBlk", "0"), 16) & bit
