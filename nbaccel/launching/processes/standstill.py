"""Standstill: a time in which no rank makes progress, explained by the stacks of the ranks. Runs in the kernel.

The ranks are asked for their stacks. The rank to blame is the one that has entered fewer collectives or steps than the
others; if all are equal, one that is not waiting itself. This is a guess, and all stacks are shown beside it. A long
computation without a step looks the same, so no run is ended unless the user asked for it.

Two cases are no guesses, and torch would wait for half an hour. A rank works no more, however it came to its end (it
has finished, or an interrupt has ended it alone), and all that are left wait in collectives without using a processor:
that rank will not come. Or all ranks wait so, and not all in the same call of the program: one of them in a backward
that others have left by an exception, or for the rows of a sharded model, in an evaluation or a save under
`if is_main_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from nbaccel.launching.processes.asked_stacks import Question, Stack, WatchedMember

__all__ = ["Hang", "Standstill", "StandstillLimits"]

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


@dataclass(frozen=True, slots=True)
class StandstillLimits:
    """The seconds after which something is done about ranks that make no progress.

    Args:
        notice_s: What is seen is said.
        certain_s: They have waited in vain, without computing in the second half of that time.
        end_s: The run is ended; None for never.
        ends_waiting: See `RunEnd`.
    """

    notice_s: float
    certain_s: float
    end_s: float | None
    ends_waiting: bool


class Standstill:
    """Examines ranks that make no progress, until one of them does.

    Args:
        members: All ranks.
        beats: Where each of them is, as the control page has it.
        gone: Ranks that work no more.
        store_path: The file in which the ranks meet.
        since: The time from which on nothing has moved.

    Attributes:
        is_busy: A rank would go on and gets no processor: it was no standstill.
    """

    def __init__(
        self,
        members: Sequence[WatchedMember],
        beats: Sequence[tuple[int, int]],
        gone: Sequence[int],
        store_path: str,
        limits: StandstillLimits,
        notice: Callable[[str], None],
        since: float,
    ) -> None:
        self._members = members
        self._beats = beats
        self._gone = gone
        self._store_path = store_path
        self._limits = limits
        self._notice = notice
        self._question: Question | None = None
        self._has_told = False
        self._used: dict[int, float] = {}  # seconds of a processor by rank, when half of `certain_s` was over
        self._used_at = since
        self._is_sure = False  # of these ranks, that it is no certain case
        self.is_busy = False

    def look(self, now: float, quiet: float) -> Hang | None:
        """Return the hang that is to end the run, if there is one.

        Args:
            quiet: Seconds without progress.
        """
        limits, gone = self._limits, self._gone
        working = [member for member in self._members if member.rank not in gone]
        if not self._used and quiet >= limits.certain_s / 2:
            self._used, self._used_at = {member.rank: _seconds_used(member) for member in working}, now
        if not self._is_sure and quiet >= limits.certain_s and self._question is None:
            # Ranks that compute are not even asked.
            self._is_sure = not all(
                _seconds_used(member) - self._used[member.rank] < _IDLE * limits.certain_s / 2 for member in working
            )
            if not self._is_sure and any(map(_wants_a_processor, working)):  # and gets none, on a busy machine
                self.is_busy = True
                return None
        due = min(
            limits.notice_s if not self._has_told else float("inf"),
            limits.end_s or float("inf"),
            float("inf") if self._is_sure else limits.certain_s,
        )
        if quiet < due:
            return None
        if self._question is None:
            self._question = Question(working, self._store_path, now)
        if not self._question.is_over(now):
            return None
        stacks = self._question.answers()
        self._question = None
        if not self._is_sure and quiet >= limits.certain_s:
            self._is_sure = True
            if (found := self._certain(stacks, gone, quiet)) is not None:
                return found
        if limits.end_s is not None and quiet >= limits.end_s:
            return self._hang(stacks, quiet)
        if quiet < limits.notice_s:
            return None
        # A GPU that waits for a peer keeps a processor of its rank busy, and looks like one that computes.
        waits = all(stack.is_in_collective or stack.waits_for_device for stack in stacks.values())
        if limits.ends_waiting and stacks and waits and len(self._members) > 1:
            return self._hang(stacks, quiet, gone)
        self._has_told = True
        if gone or len({self._beats[member.rank] for member in working}) > 1:  # some are ahead, and wait
            self._notice(str(self._hang(stacks, quiet, gone)))
        elif all(entered < 0 for _, entered in self._beats) and self._are_idle(working, now):
            self._notice(str(Hang(working[0].rank, quiet, self._lines(stacks), is_first=True)))
        return None

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the ranks have had their time to answer; None if they are not asked."""
        return None if self._question is None else max(0.0, self._question.due_at - now)

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
        return self._hang(stacks, quiet) if self._limits.ends_waiting else None

    def _are_idle(self, working: Sequence[WatchedMember], now: float) -> bool:
        """Return whether no rank has computed for most of the time that is worth a notice."""
        limits = self._limits
        if now - self._used_at < limits.notice_s / 2:
            return False
        much_s = _IDLE * (limits.notice_s - limits.certain_s / 2)
        return not any(_seconds_used(each) - self._used.get(each.rank, 0.0) >= much_s for each in working)

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


def _seconds_used(member: WatchedMember) -> float:
    """Return the seconds of processors that the rank has used so far."""
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
