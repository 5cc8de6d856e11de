"""Standing: the position of each persistent rank in the sequence of collectives. Pure; runs in the kernel.

Collectives have no names: the next one that a rank enters meets the next one of its peers. So after one rank has failed
or was stopped between two collectives, the ranks must not enter another one, or they hang or mix up bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Standing", "out_of_step"]


@dataclass(frozen=True, slots=True)
class Standing:
    """The position of one rank.

    issued: collectives that torch has issued in the default process group (gloo counts those of DDP too); None without
        a group.
    entered: collectives of the project that the rank has entered in its last task.  step: the step that it has not
    finished; -1: none.

    >>> str(Standing(12, 3)), str(Standing(None)), str(Standing(4, 1, 7))
    ('12 collectives', 'no process group', '4 collectives, inside step 7')
    """

    issued: int | None = None
    entered: int = 0
    step: int = -1

    def __str__(self) -> str:
        plural = "" if self.issued == 1 else "s"
        group = "no process group" if self.issued is None else f"{self.issued} collective{plural}"
        return group if self.step < 0 else f"{group}, inside step {self.step}"


def out_of_step(standings: Mapping[int, Standing]) -> str:
    """Return the position of each rank, if they differ; else an empty text.

    >>> out_of_step({0: Standing(4), 1: Standing(4)})
    ''
    >>> out_of_step({0: Standing(4), 1: Standing(3)})
    'rank 0: 4 collectives; rank 1: 3 collectives'
    """
    if len(set(standings.values())) < 2:
        return ""
    return "; ".join(f"rank {rank}: {standing}" for rank, standing in sorted(standings.items()))
