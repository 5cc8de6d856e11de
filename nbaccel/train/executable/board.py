"""Board: messages between the ranks of one attempt outside of their process group, through a store. Runs in ranks.

Everything here works while a peer computes, is stuck in a collective, or has left its group. An attempt that failed
first sets the *flag*, which watchers poll. If there is also an *error*, the attempt is not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from nbaccel.events import Waiting, emit

__all__ = ["Board", "Failed"]

_GLANCE_S = 0.01
_LOOK_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of the program that ends the call on all ranks.

    rank: where it was raised first.  text: its class and message.
    """

    rank: int
    text: str


class Board:
    """Messages of one attempt in the store.

    store: empty, and used by this board alone.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def raise_flag(self) -> None:
        """Set the flag: the attempt is over. Return when the store has it: peers are woken next, and must find it."""
        self.store.compare_set("flag", "", "up")  # `set` returns before a TCPStore's server has the value

    @property
    def is_flagged(self) -> bool:
        return bool(self.store.check(["flag"]))

    def fail(self, text: str) -> None:
        """End the call: store this rank's error, if it is the first one, and set the flag."""
        self.store.compare_set("error", "", json.dumps(asdict(Failed(self.rank, text))))
        self.raise_flag()

    @property
    def failed(self) -> Failed | None:
        """The error that ends the call, if there is one."""
        return Failed(**json.loads(self.store.get("error"))) if self.store.check(["error"]) else None

    def post(self, kind: str, value: Any) -> None:
        """Store this rank's `value` (JSON) of that `kind` for all ranks."""
        self.store.set(f"{kind}/{self.rank}", json.dumps(value))

    def posted(self, kind: str) -> list[int]:
        """Return the ranks that have posted."""
        return [rank for rank in range(self.world_size) if self.store.check([f"{kind}/{rank}"])]

    def read(self, kind: str, rank: int) -> Any:
        """Return what `rank` posted; it must have posted."""
        return json.loads(self.store.get(f"{kind}/{rank}"))

    def wait(self, kind: str, call: str, is_enough: Callable[[float], bool]) -> bool:
        """Wait for all ranks. Return True once every rank has posted, False once `is_enough`, given the seconds so far.

        call: what the rank is doing, for messages. Ended by the posts, by `is_enough` (called 100 times a second), by
        an interrupt, and by a receiver of `Waiting` that knows that a peer will never come.
        """
        everyone = [f"{kind}/{rank}" for rank in range(self.world_size)]
        began = time.monotonic()
        due_s = _LOOK_UP_S
        while not self.store.check(everyone):
            waited_s = time.monotonic() - began
            if is_enough(waited_s):
                return False
            if waited_s > due_s:
                due_s += _LOOK_UP_S
                emit(Waiting(call, waited_s))
            time.sleep(_GLANCE_S)  # the store's own wait logs to stderr whenever its time limit is over
        return True
