"""OrderComparison: checks that the ranks train in the same order, and whether they met in an iteration. In ranks.

An iteration that has run to its end without a meeting is counted by each rank for itself, since no rank may wait for
the others where a loader begins: one rank may look at it alone. If ranks count differently, `OrderComparison` detects
it once they meet in the loop.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d as c10d

from nbaccel.base.world import World
from nbaccel.errors import CollectiveMismatch
from nbaccel.train.data.position import Iteration, digests_of
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.transport import collective_counter

__all__ = ["OrderComparison"]

_PATIENCE_S = 5.0
"""Seconds to wait for the draw of a peer that a collective on a device may have overtaken."""

_POLL_S = 0.02

_OTHER_INDICES = (
    "the ranks draw different indices from {name}: the first ones of rank {mine} are not those of rank {rank}, so some "
    "samples would be trained on twice and others never. A sampler must draw the same in every rank, by a seed that "
    "they share; one that yields the share of its rank says so by its attributes `rank` and `num_replicas`."
)

_OTHER_SAMPLES = (
    "the ranks read different samples from {name}: the first ones of rank {mine} are not those of rank {rank}. Every "
    "rank reads the whole stream and keeps its share, so of a stream that yields the share of its rank most samples "
    "are never seen. Such a stream says so by its attributes `rank` and `world_size`, and is not dealt again."
)

_REMEMBERED = 8
"""Number of draws that a rank writes down at once: a peer may read them a few iterations later."""


class OrderComparison:
    """Compares the draws that the ranks train with, through the store of their process group.

    The number of an iteration mostly follows from what all ranks have done together, and is not compared. A rank for
    which others have run to their ends, or are held, writes it down where it begins, without waiting. Once the ranks
    have met in its loop, by which time the others have written theirs, it looks for its own draw among them. So of two
    ranks that differ at least one detects it, and a loader that is iterated as usual never uses the store.

    Args:
        name: The name of the loader, for the message.

    Attributes:
        is_possible: There are peers, and the backend shows whether the ranks have met.
    """

    def __init__(self, name: str, world: World) -> None:
        count = collective_counter() if world.is_distributed else None
        self.is_possible = count is not None
        # Preparing is collective, so this number is the same on all ranks, and differs between loaders.
        self._key = f"nbaccel/draws/{-1 if count is None else count()}"
        self._name = name
        self._world = world
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)
        self._first: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED)
        self._waits_for: Iteration | None = None
        self._has_warned = False

    def show(self, this: Iteration) -> None:
        """Write down the draw of an iteration that begins, for the peers to find."""
        self._waits_for = this
        self._shown.append(_said(this))
        self._write(self._of(self._world.rank), self._shown)

    def show_first(self, this: Iteration, batches: list[Any]) -> None:
        """Write down a digest of the first batches that this rank has read for all ranks, or of their indices."""
        digest = 0
        for batch in batches:
            every, exact = digests_of(batch)
            digest = zlib.crc32(f"{digest} {exact or every}".encode())
        self._first.append((_said(this), digest))
        self._write(f"{self._of(self._world.rank)}/first", [f"{said}={number}" for said, number in self._first])

    def _write(self, key: str, said: Iterable[str]) -> None:
        with suppress(RuntimeError):  # the peer that held the store has left: nothing to compare with
            c10d._get_default_store().set(key, " ".join(said))

    def compare(self, this: Iteration, *, is_stream: bool) -> None:
        """Look for the draw of an iteration on every other rank. The ranks have met since it began.

        Raises:
            CollectiveMismatch: A rank has not begun the loader as often, or draws other indices.
        """
        if self._waits_for is this:
            self._compare_draws(this)
        mine = dict(self._first).get(_said(this))
        store = c10d._get_default_store()
        for rank in range(self._world.world_size):
            if rank == self._world.rank or mine is None:
                continue
            theirs = dict(said.split("=") for said in self._read(store, f"{self._of(rank)}/first"))
            if theirs.get(_said(this), str(mine)) == str(mine):  # one that has not begun it has written nothing
                continue
            if not is_stream:
                raise CollectiveMismatch(_OTHER_INDICES.format(name=self._name, rank=rank, mine=self._world.rank))
            if not self._has_warned:
                self._has_warned = True
                warn_user(_OTHER_SAMPLES.format(name=self._name, rank=rank, mine=self._world.rank))

    def _compare_draws(self, this: Iteration) -> None:
        store = c10d._get_default_store()
        until = time.monotonic() + _PATIENCE_S
        for rank in range(self._world.world_size):
            if rank == self._world.rank:
                continue
            while _said(this) not in (theirs := self._read(store, self._of(rank))):
                if time.monotonic() > until:
                    raise CollectiveMismatch(self._difference(this, rank, theirs))
                time.sleep(_POLL_S)

    def _of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _read(self, store: Any, key: str) -> list[str]:
        return store.get(key).decode().split() if store.check([key]) else []

    def _difference(self, this: Iteration, rank: int, theirs: list[str]) -> str:
        begin = ".".join(_said(this).split(".")[:2])
        others = [int(said.split(".")[2]) for said in theirs if said.startswith(f"{begin}.")]
        kind = "looked at it" if this.position.is_look else "looped over it"
        counts = {self._world.rank: this.ahead + 1, rank: max(others, default=0) + 1}
        said = ", ".join(f"rank {one}: {counts[one]}" for one in sorted(counts))
        return (
            f"the ranks read {self._name} in different orders: in epoch {this.base} they had {kind} a different "
            f"number of times (rank by rank, with this one: {said}), so some samples would be trained on twice and "
            "others not at all. One rank alone may take some batches, as `next(iter(loader))` does, or loop inside "
            "`with torch.no_grad():`; a loop that runs to its end, or whose iterator is kept, is for every rank. "
            f"`loader.set_epoch({this.base})` on all ranks makes the counts equal."
        )


def _said(this: Iteration) -> str:
    position = this.position
    return f"{this.base}.{'look' if position.is_look else 'loop'}.{this.ahead}.{position.epoch}.{position.draw}"
