"""RankPart: what is done in a rank beside the user's code, from task to task. Runs in ranks.

`rank/parts` lists those of every rank, in their order. A `LaunchSpec` names those that a feature adds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.launching.ipc.spec import Results, Task, TaskWatch

if TYPE_CHECKING:
    from nbaccel.features.flag_effects.flag_watch import FlagWatch

__all__ = ["RankPart", "RankTask", "watch_of_flags"]


@dataclass(frozen=True, slots=True)
class RankTask:
    """A task that a rank begins.

    Args:
        task: The task.
        watch: Made by the setup of the run, if it makes one.
        excluded_ranks: Ranks without a part in the task.
        renewal: The arguments of `aborting.renew`, if process groups have to be formed anew.
    """

    task: Task
    watch: TaskWatch | None = None
    excluded_ranks: Sequence[int] = ()
    renewal: tuple[int, int] | None = None

    @property
    def equal_watch(self) -> TaskWatch | None:
        """Return the watch if it keeps this task equal in all ranks: it does not if some have no part in it."""
        return None if self.excluded_ranks else self.watch


class RankPart:
    """Base class of the parts of a rank: it does nothing. A part overrides the methods that it needs.

    Args:
        argument: The text that the kernel sends to a part that it names.
    """

    def __init__(self, argument: str = "") -> None:
        self.argument = argument

    def install(self) -> None:
        """Watch or change what the user's code will use, before any of it runs. Called once."""

    def begin(self, running: RankTask) -> None:
        """Begin a task. It is called in the task: an interrupt may come, and an error here is the error of the task.

        Args:
            running: The task.
        """

    def end(self) -> None:
        """End a task that finished. It may wait for peers; what is raised is the task's error."""

    def stop(self, error: BaseException) -> None:
        """End a task that did not finish, also before `begin`. Waits for no rank, and never raises.

        Args:
            error: What ended it.
        """

    def facts(self, status: str, results: Results) -> Mapping[str, Any]:
        """Return small facts about the task for the kernel, which JSON can hold; also if it could not be begun.

        Args:
            status: How it ended: "ok", "stopped", "exited" or "failed".
            results: What it sends back.
        """
        return {}


def watch_of_flags(rank: int = 0, wrappers: Collection[Any] = (), is_dry: bool = False) -> FlagWatch | None:
    """Return what says which flags have no effect in a rank; None if its folder is not there: then nothing is said.

    Args:
        rank: The rank.
        wrappers: Models that the program has wrapped for several ranks.
        is_dry: See `FlagWatch`.
    """
    with suppress(FeatureMissing):
        watch: FlagWatch = feature("flags without an effect")(rank, wrappers, is_dry)
        return watch
    return None
