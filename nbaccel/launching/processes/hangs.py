"""Find ranks that make no progress, explain the hang and, if the user set a limit, end it. Runs in the kernel.

A rank makes progress when it enters a step or a collective of the project, or has done a call of a map, as the control
page shows. If that has not happened for a while, the ranks are asked for their stacks. The rank to blame is the one
that has entered fewer collectives or steps than the others; if all are equal, one that is not waiting itself. This is a
guess, and all stacks are shown beside it. A long computation without a step looks the same, so no run is ended unless
the user asked for it.

Two cases are no guesses, and torch would wait for half an hour. A rank works no more, however it came to its end (it
has finished, or an interrupt has ended it alone), and all that are left wait in collectives without using a processor:
that rank will not come. Or all ranks wait so, and not all in the same call of the program: one of them in a backward
that others have left by an exception, or for the rows of a sharded model, in an evaluation or a save under
`if is_main_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbaccel.launching.ipc.control import ControlPage

if TYPE_CHECKING:
    from nbaccel.launching.processes.asked_stacks import Question, Stack, WatchedMember

__all__ = ["Hang", "HangWatch"]

_NOTICE_S = 30.0
_CERTAIN_S = 10.0  # time that ranks wait in vain, without computing in its second half
_IDLE = 0.1  # fraction of a processor


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that made no progress for `seconds`.

    Args:
        rank: The one to blame.
        lines: The place of each rank.
        is_certain: Nobody can go on; else a guess.
        is_alone: That rank waits in a sharded model, and others elsewhere.
        is_elsewhere: It waits in one call, and others in another one. Otherwise, if certain, it has come to its end.
        is_first: No rank has done a step yet, and none computes.
        is_interrupted: An interrupt has ended it, and no other rank.
    """

    rank: int
    seconds: float
    lines: Sequence[str]
    is_certain: bool = False
    is_alone: bool = False
    is_elsewhere: bool = False
    is_first: bool = False
    is_interrupted: bool = False

    def __str__(self) -> str:
        places = "\n".join(f"  {line}" for line in self.lines)
        if self.is_alone:
            return (
                f"rank {self.rank} waits in a sharded model for ranks that wait in another call, for "
                f"{self.seconds:.0f} s, so that none can go on:\n{places}\n  Every forward of a sharded model, in an "
                "evaluation too, its state dict, and a norm, an .item() or a print of its parameters need all ranks. "
                "Call them on every rank, outside of `if accelerator.is_main_process`, and let one rank print or save "
                "what they return."
            )
        if self.is_elsewhere:
            return (
                f"the ranks are out of step: they wait in different calls, for {self.seconds:.0f} s, so that none can "
                f"go on:\n{places}\n  Every rank must make the same calls: look for an exception that only some ranks "
                "catch (a time limit by an alarm: %%accelerate -t SECONDS ends all ranks before the same step), a "
                "`break`, or a call under `if accelerator.is_main_process`."
            )
        if self.is_certain and self.is_interrupted:
            return (
                f"rank {self.rank} was ended by a KeyboardInterrupt, and the others have waited for it in a collective "
                f"for {self.seconds:.0f} s:\n{places}\n  An interrupt of one process, or a KeyboardInterrupt that the "
                "program raises in it, ends that rank alone. Interrupt the cell: that ends all ranks before the same "
                "step. A program ends all of them by another exception, or by accelerator.set_trigger() and "
                "check_trigger()."
            )
        if self.is_certain:
            return (
                f"rank {self.rank} has come to its end, and the others have waited for it in a collective for "
                f"{self.seconds:.0f} s:\n{places}\n  All ranks have to leave a loop after the same step. Where each "
                "decides by numbers of its own, as with early stopping, decide by one: loss = accelerator.reduce(loss, "
                '"mean"), or accelerator.set_trigger() and check_trigger().'
            )
        quiet = f"no rank has entered a step or a collective for {self.seconds:.0f} s"
        if self.is_first:
            return f"{quiet}, and none computes:\n{places}"
        return f"{quiet}; rank {self.rank} seems to hold up the others:\n{places}"


class HangWatch:
    """Watches the ranks of one run for hangs.

    Args:
        store_path: The file in which the ranks meet.
        limit_s: Seconds after which a hang ends the run; None for never.
    """

    def __init__(
        self,
        page: ControlPage,
        members: Sequence[WatchedMember],
        store_path: str,
        limit_s: float | None,
        notice: Callable[[str], None],
        now: float,
        ends_waiting: bool = False,
    ) -> None:
        self._ends_waiting = ends_waiting
        self._page = page
        self._members = members
        self._store_path = store_path
        self._limit_s = limit_s
        self._notice = notice
        self._beats: list[tuple[int, int]] = []
        self._calls: list[int] = []
        self._gone: list[int] = []
        self._since = now
        self._question: Question | None = None
        self._has_told = False
        self._used: dict[int, float] = {}  # seconds of a processor by rank, when half of `_CERTAIN_S` was over
        self._used_at = now
        self._is_sure = False  # of these ranks, that it is no certain case

    def tick(self, now: float) -> Hang | None:
        """Check the ranks; return the hang that is to end the run, if there is one."""
        beats = [self._page.beat(member.rank) for member in self._members]
        working = [member for member in self._members if member.is_working]
        gone = [member.rank for member in self._members if not member.is_working]
        calls = [self._page.calls(member.rank) for member in self._members]  # apart: fewer of them are no one's fault
        # One that came to its end had been working.
        if beats != self._beats or calls != self._calls or gone != self._gone or not working:
            self._beats, self._calls, self._gone, self._since, self._question = beats, calls, gone, now, None
            self._has_told = self._is_sure = False
            self._used.clear()
            return None
        quiet = now - self._since
        if not self._used and quiet >= _CERTAIN_S / 2:
            self._used, self._used_at = {member.rank: _seconds_used(member) for member in working}, now
        if not self._is_sure and quiet >= _CERTAIN_S and self._question is None:
            # Ranks that compute are not even asked.
            self._is_sure = not all(
                _seconds_used(member) - self._used[member.rank] < _IDLE * _CERTAIN_S / 2 for member in working
            )
            if not self._is_sure and any(map(_wants_a_processor, working)):  # and gets none, on a busy machine
                self._since, self._question = now, None
                self._used.clear()
                return None
        due = min(
            _NOTICE_S if not self._has_told else float("inf"),
            self._limit_s or float("inf"),
            float("inf") if self._is_sure else _CERTAIN_S,
        )
        if quiet < due:
            return None
        if self._question is None:
            from nbaccel.launching.processes.asked_stacks import Question  # few runs ask

            self._question = Question(working, self._store_path, now)
        if not self._question.is_over(now):
            return None
        stacks = self._question.answers()
        self._question = None
        if not self._is_sure and quiet >= _CERTAIN_S:
            self._is_sure = True
            if (found := self._certain(stacks, gone, quiet)) is not None:
                return found
        if self._limit_s is not None and quiet >= self._limit_s:
            return self._hang(stacks, quiet)
        if quiet < _NOTICE_S:
            return None
        # A GPU that waits for a peer keeps a processor of its rank busy, and looks like one that computes.
        waits = all(stack.is_in_collective or stack.waits_for_device for stack in stacks.values())
        if self._ends_waiting and stacks and waits and len(self._members) > 1:
            return self._hang(stacks, quiet, gone)
        self._has_told = True
        if gone or len({beats[member.rank] for member in working}) > 1:  # some are ahead, and wait
            self._notice(str(self._hang(stacks, quiet, gone)))
        elif all(entered < 0 for _, entered in beats) and self._are_idle(working, now):
            self._notice(str(Hang(working[0].rank, quiet, self._lines(stacks), is_first=True)))
        return None

    def _certain(self, stacks: Mapping[int, Stack], gone: Sequence[int], quiet: float) -> Hang | None:
        """Return the hang if no rank can go on.

        Args:
            gone: Ranks that work no more.
        """
        if not stacks or not all(stack.is_in_collective for stack in stacks.values()):
            return None
        lines = self._lines(stacks)
        if gone:
            return Hang(gone[0], quiet, lines, is_certain=True, is_interrupted=self._is_interrupted(gone[0]))
        if len({stack.call for stack in stacks.values()}) > 1:
            if in_shards := [rank for rank, stack in stacks.items() if stack.is_in_shards]:
                return Hang(in_shards[0], quiet, lines, is_certain=True, is_alone=True)
            if len(stacks) == len(self._members):
                return Hang(self._hang(stacks, quiet).rank, quiet, lines, is_certain=True, is_elsewhere=True)
        return self._hang(stacks, quiet) if self._ends_waiting else None

    def _are_idle(self, working: Sequence[WatchedMember], now: float) -> bool:
        """Return whether no rank has computed for most of the time that is worth a notice."""
        is_long = now - self._used_at >= _NOTICE_S / 2
        return is_long and not any(_has_computed(each, self._used) for each in working)

    def excuse(self, seconds: float) -> None:
        """Exclude the last `seconds`, in which the ranks waited for a person."""
        self._since += seconds

    def due_in(self, now: float) -> float | None:
        """Return the seconds until `tick` may have something to do, besides the half second of telemetry."""
        return None if self._question is None else max(0.0, self._question.due_at - now)

    def _hang(self, stacks: Mapping[int, Stack], seconds: float, gone: Sequence[int] = ()) -> Hang:
        """Return the hang.

        Args:
            gone: Ranks that work no more; they are to blame before all others.
        """
        guilty = min(gone or stacks, key=lambda rank: (self._beats[rank], rank in stacks and stacks[rank].waits, rank))
        return Hang(guilty, seconds, self._lines(stacks))

    def _lines(self, stacks: Mapping[int, Stack]) -> list[str]:
        return [
            f"rank {member.rank}: {stacks[member.rank].words()}"
            if member.rank in stacks
            else f"rank {member.rank}: {'was interrupted' if self._is_interrupted(member.rank) else 'has finished'}"
            for member in self._members
        ]

    def _is_interrupted(self, rank: int) -> bool:
        report = self._members[rank].report
        return report is not None and report.status == "stopped"


def _has_computed(member: WatchedMember, used: Mapping[int, float]) -> bool:
    """Return whether the rank has computed since half of `_CERTAIN_S` was over, when it had `used` so much."""
    return _seconds_used(member) - used.get(member.rank, 0.0) >= _IDLE * (_NOTICE_S - _CERTAIN_S / 2)


def _seconds_used(member: WatchedMember) -> float:
    """Return the seconds of processors that the rank has used so far."""
    import psutil  # takes 10 ms, and is needed only if ranks make no progress

    try:
        times = psutil.Process(member.process.pid).cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(times.user + times.system)


def _wants_a_processor(member: WatchedMember) -> bool:
    """Return whether the rank's main thread is running, or would if a processor were free."""
    try:
        with open(f"/proc/{member.process.pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False
