"""Draws: count how often a loader was begun, and check that the ranks train in the same order. Runs in ranks.

A shuffled loader has a new order every time it is begun. The number of the order within the epoch, the *draw*, is
counted by each rank for itself, since no rank may wait for the others where a loader begins: one rank may look at it
alone. Loops and looks are counted separately, so such a look does not change the order of the training loop. If ranks
count differently nonetheless, `Comparison` detects it once they meet in the loop.
"""

from __future__ import annotations

import dis
import itertools
import time
from collections import deque
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d as c10d

from nbaccel.errors import CollectiveMismatch
from nbaccel.train.data.position import LoaderPosition
from nbaccel.train.distributed.transport import collective_counter
from nbaccel.world import World

__all__ = ["Comparison", "Meetings", "takes_one_batch"]

_PATIENCE_S = 5.0
"""Seconds to wait for the draw of a peer that a collective on a device may have overtaken."""

_POLL_S = 0.02

_REMEMBERED = 8
"""Number of draws that a rank writes down at once: a peer may read them a few iterations later."""


def takes_one_batch(frame: FrameType) -> bool:
    """Return whether `frame` is about to call ``next(iter(loader))``: one batch is taken, and the iterator is dropped.

    Determined from the code that runs, so it is the same on every rank. False where the code has no positions.
    """
    code, at = frame.f_code, frame.f_lasti
    if code.co_code[at] == dis.opmap["GET_ITER"] or "next" not in code.co_names:
        return False
    instructions = list(dis.get_instructions(code))
    number = next((number for number, one in enumerate(instructions) if one.offset == at), None)
    if number is None:
        return False
    # In Python 3.11 a call is two instructions, and either of them may be the one that runs. A constant that follows
    # is the default in next(iter(loader), None).
    own = instructions[number].positions
    rest = itertools.dropwhile(lambda one: one.positions == own, instructions[number:])
    after = next((one for one in rest if not one.opname.startswith("LOAD_")), None)
    if after is None or after.opname not in ("PRECALL", "CALL") or _begin(after) is None:
        return False
    return any(one.argval == "next" and _begin(one) == _begin(after) for one in instructions)


def _begin(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Return line and column where the source of `instruction` begins."""
    positions = instruction.positions
    if positions is None or positions.lineno is None or positions.col_offset is None:
        return None
    return positions.lineno, positions.col_offset


class Meetings:
    """Tells whether the ranks met in a collective since this object was made.

    counts_anyway: also if they did not; the others may have met in batches that this rank does not have.
    are_counted: False in one process, and where the backend does not count collectives.
    """

    __slots__ = ("_before", "_count", "are_counted", "were_held")

    def __init__(self, world: World, counts_anyway: bool) -> None:
        self._count = collective_counter() if world.is_distributed else None
        self.are_counted = self._count is not None
        self.were_held = counts_anyway or not self.are_counted
        self._before = -1 if self._count is None else self._count()

    def look(self) -> bool:
        """Return whether they have met by now."""
        if not self.were_held and self._count is not None:
            self.were_held = self._count() != self._before
        return self.were_held


class Comparison:
    """Compares the draws that the ranks train with, through the store of their process group.

    The first loop of an epoch, and the first look, follow from what all ranks have done together, and are not
    compared. A rank that is at a later draw writes it down where it begins, without waiting. Once the ranks have met in
    its loop, by which time the others have written theirs, it looks for its own draw among them. So of two ranks that
    differ at least one detects it, and a loader that is iterated as usual never uses the store.

    name: of the loader, for the message.
    is_possible: there are peers, and the backend shows whether the ranks have met.
    """

    def __init__(self, name: str, world: World) -> None:
        count = collective_counter() if world.is_distributed else None
        self.is_possible = count is not None
        # Preparing is collective, so this number is the same on all ranks, and differs between loaders.
        self._key = f"nbaccel/draws/{-1 if count is None else count()}"
        self._name = name
        self._world = world
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)

    def show(self, position: LoaderPosition) -> None:
        """Write down the draw that begins at `position`, for the peers to find."""
        self._shown.append(_said(position))
        with suppress(RuntimeError):  # the peer that held the store has left: nothing to compare with
            c10d._get_default_store().set(self._of(self._world.rank), " ".join(self._shown))

    def compare(self, position: LoaderPosition) -> None:
        """Look for the draw of `position` on every other rank. The ranks have met since it began.

        Raises:
            CollectiveMismatch: a rank has not begun the loader as often.
        """
        store = c10d._get_default_store()
        until = time.monotonic() + _PATIENCE_S
        for rank in range(self._world.world_size):
            if rank == self._world.rank:
                continue
            while _said(position) not in (theirs := self._read(store, rank)):
                if time.monotonic() > until:
                    raise CollectiveMismatch(self._difference(position, rank, theirs))
                time.sleep(_POLL_S)

    def _of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _read(self, store: Any, rank: int) -> list[str]:
        return store.get(self._of(rank)).decode().split() if store.check([self._of(rank)]) else []

    def _difference(self, position: LoaderPosition, rank: int, theirs: list[str]) -> str:
        others = [int(said.split(".")[1]) for said in theirs if said.startswith(f"{position.epoch}.")]
        kind = "looked at it" if position.is_look else "begun to loop over it"
        counts = {self._world.rank: _times(position.draw), rank: max(map(_times, others), default=1)}
        said = ", ".join(f"rank {one}: {counts[one]}" for one in sorted(counts))
        return (
            f"the ranks read {self._name} in different orders: in epoch {position.epoch} they had {kind} a different "
            f"number of times ({said}), so some samples would be trained on twice and others not at all. One rank "
            "alone may look with `next(iter(loader))`, or loop inside `with torch.no_grad():`; a loop that may train "
            f"is for every rank. `loader.set_epoch({position.epoch})` on all ranks makes the counts equal."
        )


def _said(position: LoaderPosition) -> str:
    return f"{position.epoch}.{position.draw}"


def _times(draw: int) -> int:
    """Return how often a loader was begun, including the iteration of this draw."""
    return draw + 1 if draw >= 0 else -draw
