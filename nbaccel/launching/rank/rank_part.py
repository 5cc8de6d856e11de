"""RankPart: what a feature adds to the ranks of its runs. Runs in ranks.

A `LaunchSpec` names the parts of its run, each by a string and by one argument; the rank makes them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbaccel.launching.ipc.spec import PartName, Task, load_named

__all__ = ["RankPart", "parts_of"]


class RankPart:
    """A part that does nothing.

    Args:
        argument: What the kernel says to it.
    """

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def enter(self, make_task: Callable[[], Task]) -> Callable[[], Task]:
        """Change this process before it has a thread; return what makes its task, as a rule `make_task`."""
        return make_task

    def install(self) -> None:
        """Watch or change what the user's code will use, before any of it runs. Called once."""


def parts_of(names: Sequence[PartName]) -> list[RankPart]:
    """Load the named parts and make them."""
    return [load_named(name)(argument) for name, argument in names]
