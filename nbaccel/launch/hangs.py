"""Hangs: no rank gets on any more. Noticed, explained and, if the user set a limit, ended. Runs in the kernel.

A rank gets on when it enters a step or a collective of ours, which the control page tells. When that has not happened
for a while the ranks are asked by a signal where they are. Which one is to blame: the rank that has entered fewer
collectives or steps than the others; where all stand alike, one that is not waiting itself. It is a guess, and all
stacks are shown beside it. A long computation without a step looks the same: so nothing is ended unless asked for.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbaccel.launch.member import Member
from nbaccel.launch.rank.jupyter import cell_name
from nbaccel.launch.rank.look import is_users
from nbaccel.launch.wire.control import ControlPage

__all__ = ["ASK", "Hang", "HangWatch", "stack_path"]

ASK = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""Asks a rank for its stacks. No common program uses it, as some do SIGUSR1."""

_NOTICE_S = 30.0
_ANSWER_S = 0.6  # the handler needs none; a machine that swaps may
_PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAITS = (f"{os.sep}nbaccel{os.sep}train{os.sep}talk{os.sep}", f"{os.sep}torch{os.sep}distributed{os.sep}")
_WAITS_IN = ("_engine_run_backward",)  # DDP's own sums are waited for at the end of backward


def stack_path(store_path: str, rank: int) -> str:
    """Where a rank writes its stacks: beside the file in which the ranks meet."""
    return os.path.join(os.path.dirname(store_path), f"stacks-{rank}")


@dataclass(frozen=True, slots=True)
class _Stack:
    """Places of a rank's main thread, innermost first: file, line, function."""

    places: Sequence[tuple[str, int, str]]

    @classmethod
    def read(cls, path: str) -> _Stack:
        """The latest answer in `path`; empty if there was none."""
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

    @staticmethod
    def is_told_by(path: str) -> bool:
        """Whether the rank that writes to `path` has its handler by now: without one the signal would end it."""
        try:
            return os.path.getsize(path) > 0
        except OSError:
            return False

    @property
    def waits(self) -> bool:
        """Whether it is inside a collective, as far as the stack tells."""
        return any(part in file for file, _, _ in self.places for part in _WAITS) or any(
            function in _WAITS_IN for _, _, function in self.places
        )

    def words(self) -> str:
        """The user's innermost line, and what it is inside of."""
        if not self.places:
            return "does not say where it is"
        inner = self.places[0]
        file, line, function = next((place for place in self.places if is_users(place[0])), inner)
        source = linecache.getline(file, line).strip()
        where = f"{cell_name(file) or file}, line {line}{'' if function == '<module>' else f', in {function}'}"
        below = "" if file == inner[0] else f" (inside {inner[2]} of {os.path.basename(inner[0])})"
        return f"{where}{f': {source}' if source else ''}{below}"


@dataclass(frozen=True, slots=True)
class Hang:
    """No rank got on for `seconds`.  rank: the one to blame, as a guess.  lines: where each rank is."""

    rank: int
    seconds: float
    lines: Sequence[str]

    def __str__(self) -> str:
        places = "\n".join(f"  {line}" for line in self.lines)
        quiet = f"no rank has entered a step or a collective for {self.seconds:.0f} s"
        return f"{quiet}; rank {self.rank} seems to hold up the others:\n{places}"


class HangWatch:
    """Watches the ranks of one run.

    store_path: where the ranks meet.  limit_s: after how long a hang ends the run; None for never.
    """

    def __init__(
        self,
        page: ControlPage,
        members: Sequence[Member],
        store_path: str,
        limit_s: float | None,
        notice: Callable[[str], None],
        now: float,
    ) -> None:
        self._page = page
        self._members = members
        self._store_path = store_path
        self._limit_s = limit_s
        self._notice = notice
        self._beats: list[tuple[int, int]] = []
        self._since = now
        self._asked_at: float | None = None
        self._has_told = False

    def tick(self, now: float) -> Hang | None:
        """Look at the ranks; the hang that ends the run, if it does."""
        beats = [self._page.beat(member.rank) for member in self._members]
        working = [member for member in self._members if member.is_working]
        if beats != self._beats or not working:
            self._beats, self._since, self._asked_at, self._has_told = beats, now, None, False
            return None
        quiet = now - self._since
        due = min(_NOTICE_S if not self._has_told else float("inf"), self._limit_s or float("inf"))
        if quiet < due:
            return None
        if self._asked_at is None:
            self._asked_at = now
            for member in working:
                if _Stack.is_told_by(self._path(member.rank)):
                    member.process.signal(ASK)
        if now < self._asked_at + _ANSWER_S:
            return None
        hang = self._hang(working, quiet)
        self._asked_at = None
        if self._limit_s is not None and quiet >= self._limit_s:
            return hang
        self._has_told = True
        if len({beats[member.rank] for member in working}) > 1:  # some are ahead, and wait
            self._notice(str(hang))
        return None

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds`: the ranks waited for a person."""
        self._since += seconds

    def due_in(self, now: float) -> float | None:
        """Seconds until `tick` may have something to do, beyond the half second of telemetry."""
        return None if self._asked_at is None else max(0.0, self._asked_at + _ANSWER_S - now)

    def _path(self, rank: int) -> str:
        return stack_path(self._store_path, rank)

    def _hang(self, working: Sequence[Member], seconds: float) -> Hang:
        stacks = {member.rank: _Stack.read(self._path(member.rank)) for member in working}
        guilty = min(stacks, key=lambda rank: (self._beats[rank], stacks[rank].waits, rank))
        lines = [
            f"rank {member.rank}: {stacks[member.rank].words()}"
            if member.rank in stacks
            else f"rank {member.rank}: has finished"
            for member in self._members
        ]
        return Hang(guilty, seconds, lines)
