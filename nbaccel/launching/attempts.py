"""Attempts: what is noted of each start of a run's ranks, for what follows if it fails. Runs in the kernel.

`RunRecorder` receives the ranks' events, which outlive the ranks. `OomKillWatch` finds out whether the system's
out-of-memory killer ended a rank, which reports nothing then: it compares the control group's own count before and
after. `raise_oom_score` has it choose a rank before the notebook.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nbaccel.base.events import Checkpoint, Event, LoopEntered, Memory, Opened, OutOfMemory, Progress
from nbaccel.base.hardware import out_of_memory_kills, usable_memory
from nbaccel.base.quantities import in_gb
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.processes.rank_results import RankResults

__all__ = ["KillsElsewhere", "LaunchAttempt", "OomKillWatch", "RunRecorder"]


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """One ended run of a spec, and the observations of it."""

    spec: LaunchSpec
    ended: RankResults
    recorder: RunRecorder
    host: OomKillWatch | KillsElsewhere


class RunRecorder:
    """Records the loop of each rank, its latest memory use, and the files that the run has written.

    Attributes:
        opened: Trackers and checkpoints, by the names that a person would look for.
        checkpoint: The newest complete one; empty for none.
        announces_epochs: The program can begin in a later epoch.
        goes_on: The program goes on from that checkpoint wherever it was.
        smallest: Samples of the micro-batch that `forward_backward` could not make smaller; 0 if that never happened.
    """

    def __init__(self) -> None:
        self._loops: dict[int, LoopEntered] = {}
        self._memory: dict[int, Memory] = {}
        self.opened: list[str] = []
        self.checkpoint = ""
        self.announces_epochs = self.goes_on = False
        self.smallest = 0

    def feed(self, rank: int, at: float, event: Event) -> None:
        if isinstance(event, LoopEntered):
            self._loops[rank] = event
        elif isinstance(event, Memory):
            self._memory[rank] = event
        elif isinstance(event, Opened):
            self._note(event.what)
        elif isinstance(event, Checkpoint):
            self.checkpoint, self.goes_on = event.path, event.goes_on
            self._note(f"checkpoint {event.path}")
        elif isinstance(event, Progress):
            self.announces_epochs |= event.epochs is not None
        elif isinstance(event, OutOfMemory) and not event.next_size:
            self.smallest = max(self.smallest, event.micro_batch_size)  # 0 from an optimizer

    def tick(self, now: float) -> None:
        """Do nothing."""

    def _note(self, what: str) -> None:
        if what not in self.opened:
            self.opened.append(what)

    def loop(self, rank: int) -> LoopEntered | None:
        """Return the loop over a prepared loader that `rank` was in, or ended last; None before the first one."""
        return self._loops.get(rank)

    def memory(self, rank: int) -> Memory | None:
        """Return the latest memory report of `rank`."""
        return self._memory.get(rank)


class KillsElsewhere:
    """Knows nothing of processes that were killed on other machines."""

    kills: int | None = None

    def explain_kill(self) -> str:
        """Explain why a rank got a SIGKILL that the kernel did not send."""
        return "if you did not do that yourself, a guess is the memory of its node"


class OomKillWatch:
    """The state of the machine's memory when a run began, and what has changed since.

    Args:
        root: Replaces the root of the file system, in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = out_of_memory_kills(root)
        self._available_bytes = usable_memory(root).available_bytes

    @property
    def kills(self) -> int | None:
        """Return the number of processes killed for memory since then; None if that is not counted."""
        now = out_of_memory_kills(self._root)
        return None if now is None or self._kills is None else now - self._kills

    def explain_kill(self) -> str:
        """Explain why a rank got a SIGKILL that the kernel did not send; a guess is named as such."""
        kills = self.kills
        available = f"{in_gb(self._available_bytes)} were available when the run began"
        if kills is None:
            return f"probably for host memory, but that is a guess: this system does not count such kills; {available}"
        if kills > 0:
            return (
                f"the machine ran out of memory (the control group's oom_kill count rose by {kills}, from "
                f"{self._kills}; {available})"
            )
        return (
            "if you did not do that yourself, a guess is host memory, though the control group's oom_kill count did "
            f"not rise; {available}"
        )
