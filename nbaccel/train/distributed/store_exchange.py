"""StoreExchange: lay short texts of all ranks beside each other in the group's store, without a collective. In ranks.

For what ranks may only compare where a collective would be a risk: a peer that sums gradients at that moment would take
the text for a part of its sum. Here a peer that is elsewhere is waited for, and nothing of the group is touched.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nbaccel.base.events import Waiting, emit
from nbaccel.base.quantities import numbers_in_order
from nbaccel.errors import PeerFailed

__all__ = ["StoreExchange"]

_GLANCE_S = 0.0005
_LONGEST_GLANCE_S = 0.01
_LOOK_UP_S = 0.5
_SAID_AFTER_S = 5.0  # by a line: a program that turns warnings into errors would end by a wait


class StoreExchange:
    """The exchanges of one process group, one after the other: the n-th of one rank meets the n-th of its peers.

    Args:
        store: A store with keys that nobody else uses.
        timeout: How long a peer may stay away, as in a collective of the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta | None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._limit_s = (timeout or dist.default_pg_timeout).total_seconds()
        self._count = 0

    def lay(self, text: str) -> None:
        """Begin an exchange with this rank's text: its peers can read it. `texts` ends it."""
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", text)

    def has_laid(self, rank: int) -> bool:
        """Return whether a peer has begun the present exchange."""
        return bool(self._store.check([f"{self._count}/{rank}"]))

    def all(self, text: str, call: str) -> list[str]:
        """Return the texts of all ranks, see `texts`. Every rank calls it."""
        self.lay(text)
        return self.texts(call)

    def texts(self, call: str) -> list[str]:
        """Return the texts of all ranks, of the exchange that was begun last.

        The wait ends with the texts of all peers; by an interrupt, or a receiver of `Waiting` that knows that a peer
        will never come; and by the time limit of the group's collectives, since a rank that is stuck has no other.

        Args:
            call: What the rank is doing, for messages.

        Raises:
            PeerFailed: A peer did not come in time.
        """
        keys = [f"{self._count}/{rank}" for rank in range(self._world_size)]
        began = time.monotonic()
        glance_s, due_s, is_said = _GLANCE_S, _LOOK_UP_S, False
        while not self._store.check(keys):
            waited_s = time.monotonic() - began
            if waited_s > due_s:
                due_s += _LOOK_UP_S
                emit(Waiting(call, waited_s))
            if waited_s > _SAID_AFTER_S and not is_said:
                is_said = True
                place = f"rank {self._rank} of {self._world_size}"
                sys.stdout.write(f"nbaccel: {place} waits in {call}, until every rank has come there\n")
            if waited_s > self._limit_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise PeerFailed(
                    f"rank {self._rank} of {self._world_size} waited {self._limit_s:g} s for rank "
                    f"{numbers_in_order(missing)} in {call}: every rank must come there"
                )
            time.sleep(glance_s)
            glance_s = min(2 * glance_s, _LONGEST_GLANCE_S)
        texts = [str(self._store.get(key), "utf-8") for key in keys]
        self._forget(self._count - 1)
        return texts

    def _forget(self, count: int) -> None:
        """Delete this rank's text of an earlier exchange: all peers are in a later one, so they have read it."""
        if count > 0:
            self._store.delete_key(f"{count}/{self._rank}")
