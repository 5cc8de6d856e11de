"""PeerWatch: compares the collective of a rank with those of its peers, on the control page. Runs in ranks."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

from nbaccel.base.events import CollectiveEntered, Event, ExchangeLeft, GroupRenewed, Waiting
from nbaccel.errors import CollectiveMismatch, PeerFailed, RunStopped
from nbaccel.launching.ipc.control import COUNT_BITS, MARK_BITS, NO_MARK, ControlPage

__all__ = ["PeerWatch"]

_IS_LEFT, _IS_COMPARED, _MARKS = range(NO_MARK + 1, NO_MARK + 4)
"""Marks of collectives; others, from `_MARKS` on, are of the call's words."""


class PeerWatch:
    """Rank side of the marks: ends the wait in a collective that can never be complete, and refuses to enter one.

    A rank marks its collective, then reads the marks of its peers: of two ranks that enter different collectives as
    their n-th one, the later one sees that before anything is sent. One that sees that a peer has left its collective
    half-way enters none. Collectives in which the ranks compare what they are about to do have one mark in common.
    """

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._page = page
        self._rank = rank
        self._entered = 0
        self._mark = NO_MARK
        self._excluded_ranks: Sequence[int] = ()
        self._peers = [peer for peer in range(page.world_size) if peer != rank]

    def begin(self, excluded_ranks: Sequence[int]) -> None:
        """Begin another run.

        Args:
            excluded_ranks: Ranks that take no part in it.
        """
        self._entered, self._mark = 0, NO_MARK
        self._excluded_ranks = excluded_ranks

    def refuse_backward(self, event: Event) -> None:
        """Refuse a backward of a prepared model: without all ranks, gradients and then replicas would differ."""
        self._refuse("backward")

    def _refuse(self, call: str) -> None:
        """Raise before the call is made, so that the ranks stay in step."""
        are = "rank {} takes" if len(self._excluded_ranks) == 1 else "ranks {} take"
        raise CollectiveMismatch(
            f"rank {self._rank} of {self._page.world_size} was about to enter a collective ({call}), which all ranks "
            f"must enter, and {are.format(', '.join(map(str, self._excluded_ranks)))} no part in this cell. "
            "Nothing was exchanged. Run the cell without --only, or leave the call out of it."
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, CollectiveEntered):
            if self._excluded_ranks:
                self._refuse(event.call)
            self._entered += 1
            self._mark = _IS_COMPARED if event.is_compared else _mark_of(event.call)
            self._page.count_collectives(self._rank, self._entered, self._mark)
            self._look_at_peers("was about to enter", event.call, self._page.stop_requested)
        elif isinstance(event, ExchangeLeft):
            self._page.count_collectives(self._rank, self._entered, _IS_LEFT)
        elif isinstance(event, GroupRenewed):
            # Ranks that stayed longer in the attempt have entered more collectives: now all have the same count.
            self._entered, self._mark = event.times << COUNT_BITS, NO_MARK
            self._page.count_collectives(self._rank, self._entered)
        elif isinstance(event, Waiting):
            self._look_for_peers(event)
            if not self._page.stop_requested:  # otherwise the kernel's interrupt ends this wait
                self._look_at_peers("waits in", event.call)

    def _look_at_peers(self, does: str, call: str, is_stopping: bool = False) -> None:
        """Raise if a peer has left a collective half-way, or is in another one than this rank."""
        for peer in self._peers:
            exchange = self._page.exchange(peer)
            entered, mark = exchange >> MARK_BITS, exchange & (1 << MARK_BITS) - 1
            is_left = mark == _IS_LEFT and entered >> COUNT_BITS == self._entered >> COUNT_BITS
            is_elsewhere = entered == self._entered and mark not in (self._mark, NO_MARK)
            if not is_left and not is_elsewhere:
                continue
            if is_stopping:
                raise RunStopped(f"stopped before {call}, which rank {peer} does not enter any more")
            here = f"rank {self._rank} of {self._page.world_size} {does} {call}"
            if is_left:
                raise PeerFailed(
                    f"{here}, and rank {peer} has left a collective half-way, by an exception that its program has "
                    "caught: the ranks are out of step, and exchange nothing any more. Let the exception end the cell, "
                    "or end the loop before the same step in all ranks: by %%accelerate -t SECONDS, or by "
                    "accelerator.set_trigger() and check_trigger()."
                )
            raise CollectiveMismatch(
                f"{here}, and rank {peer} is in another collective: the ranks are out of step, and nothing is "
                "exchanged. Every rank must make the same calls: look for an exception that only some ranks catch, a "
                "`break`, or a call under `if is_main_process`. %accelerate why shows the last calls of each rank."
            )

    def _look_for_peers(self, event: Waiting) -> None:
        missing = self._page.finished_before(self._entered)
        if missing:
            sides = "\n".join(f"  rank {rank}: has finished, and will not come" for rank in missing)
            raise CollectiveMismatch(
                f"rank {self._rank} of {self._page.world_size} waits in a collective that can never be complete.\n"
                f"  rank {self._rank}: {event.call}\n{sides}\n  Every rank must make the same calls: look for a "
                "`return`, a `break` or an `if is_main_process` that only some ranks take."
            )


@functools.cache
def _mark_of(call: str) -> int:
    """Return a mark of a collective's words, equal in all processes."""
    return max(_MARKS, zlib.crc32(call.encode()) & (1 << MARK_BITS) - 1)
