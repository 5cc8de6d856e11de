"""Page of memory that the kernel and all ranks of a run share, so that all ranks stop at one step. Used by both.

A simple stop flag would leave ranks alone in a collective: one rank reads the flag a moment before its peer enters the
step. So the ranks and the kernel use a handshake, without a collective: see `ControlPage`. The page also counts the
collectives that each rank has entered, with a mark of the latest, and marks the ranks that have finished. From these
`PeerWatch` sees that a collective can never end: a rank has finished without it, is in another one, or has left it
half-way. The page also holds the step before which all ranks save, set by rank 0, and each rank's own time limit, if
its program sets one.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbaccel.base.events import (
    CallEntered,
    CallsEnded,
    Event,
    SaveAsked,
    SaveDue,
    SavingAtStop,
    StepEntered,
    StepsEnded,
    TimeLimit,
    Writing,
)
from nbaccel.errors import RunStopped

__all__ = [
    "COUNT_BITS",
    "MARK_BITS",
    "NO_MARK",
    "SAVE_GRACE_S",
    "ControlPage",
    "RankPosition",
    "StepGate",
    "position_number",
]

_HEADER = 64
_SLOT = 136
_STOP = 0  # u8: the kernel asks every rank to stop
_ANSWERED = 1  # u8: _STOP_AFTER holds the answer
_SAVES_ITSELF = 2  # u8: a rank saves itself at a stop
_STOP_WANTED = 3  # u8: a rank asks for a stop
_IS_CUT = 4  # u8: waits of ranks in their devices can never end
_FREES_HUNG = 5  # u8: such waits may never end
_HAS_LOST_A_RANK = 6  # u8: a rank has died, and was or is being started again alone
_HANDS_OVER = 7  # u8: at the answer's step ranks call their program's own handler of SIGINT, and go on
_STOP_AFTER = struct.Struct("@q")
_STOP_AFTER_AT = 8
_SAVE_BEFORE = struct.Struct("@q")  # an optimizer step; 0: none was announced
_SAVE_BEFORE_AT = 16
_SPANS_NODES = 24  # u8: some ranks are on other machines, each with a copy of the page
_SETTLED = 25  # u8: the copies of the other machines have been asked to stop, and the page has where they are
_SAVE_WANTED = 26  # u8: rank 0 asks all ranks, some of them on other machines, to save
_ORDERS = ((0, 2), (4, 24))  # what the kernel writes in the header
_REPORTS = ((2, 4), (26, 27))  # what ranks write in the header
_RANK = struct.Struct("@qqddBB")  # entered, previous, entered_at, last_step_s, parked, in_step
_COLLECTIVES = struct.Struct("@q")  # how many the rank has entered, and a mark of the latest: one number, one store
_COLLECTIVES_AT = 40  # in the rank's slot, behind its position
MARK_BITS, COUNT_BITS = 16, 32
"""Lowest bits of that number: the mark; then the count. Those above count renewals of the group."""

NO_MARK = 0

_HAS_FINISHED_AT = 48  # u8
_IS_SAVING_AT = 49  # u8
_HEARS_CUTS_AT = 50  # u8
_IS_CALLING_AT = 51  # u8
_CALLS = struct.Struct("@I")  # calls of a map that are over
_CALLS_AT = 52
_TIME_LIMIT = struct.Struct("@dd")  # when it is over, and how long it was, in seconds; 0: there is none
_TIME_LIMIT_AT = 56
_STOPPED = struct.Struct("@q")  # training steps that were complete when it left, and one more; 0: it has not
_STOPPED_AT = 72
_LAID = struct.Struct("@qq")  # what is compared, and the rank's fingerprint of it; 0: nothing
_LAID_NUMBER = struct.Struct("@q")
_LAID_AT = 80
_LAID_COUNT = 3
_HAS_HANDLER_AT = 128  # u8: its program has a handler of SIGINT
_HAS_HEARD_AT = 129  # u8: that was called
_IS_WRITING_AT = 130  # u8
_SUBSTEPS = 1 << 24
SAVE_GRACE_S = 20.0
"""Seconds for the last checkpoint of a stopped run. Hosted sessions grant about 30 s between SIGTERM and SIGKILL."""

_VISIBLE_S = 0.001  # far longer than a store takes to leave a core's buffer (nanoseconds)
_PARKED_POLL_S = 0.0005


def position_number(step: int, substep: int = 0) -> int:
    """Return one number for a position in the program, ordered first by training step, then by batches since."""
    return step * _SUBSTEPS + (substep if substep < _SUBSTEPS else _SUBSTEPS - 1)


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank: about to enter `entered` (parked), inside it (in_step), or in no step at all.

    Args:
        previous: The position before, of a parked rank and of one in no step; -1 if there was none.
        last_step_s: Duration of the last whole step.
    """

    entered: int
    previous: int
    entered_at: float
    last_step_s: float
    parked: bool
    in_step: bool

    @property
    def reached(self) -> int:
        """Return the last position that this rank has really entered."""
        return self.previous if self.parked else self.entered

    @property
    def step(self) -> int:
        return self.entered // _SUBSTEPS


_NOWHERE = RankPosition(-1, -1, 0.0, 0.0, parked=False, in_step=False)
"""The position of a rank that has entered nothing yet."""


class ControlPage:
    """The shared page. The kernel creates it; ranks map it by its descriptor.

    A run stops at one step by a handshake:

    1. At a step boundary a rank writes the step it is about to enter, then reads the stop flag. If it is set, the rank
       parks and waits for the answer.
    2. The kernel sets the flag, waits until every store of a rank that did not see it must be visible, and reads where
       each rank is: parked before a step, or inside one.
    3. It answers "stop after S", S being the highest step any rank has entered. A rank that parked before a step <= S
       goes on through S; every rank leaves at its first boundary past S. All end after the same step.

    Steps are positions (training step, batches since) packed into one number, so that they compare in order.

    Attributes:
        flags, words, seconds: The page as bytes, and as numbers of eight: for what a rank does in every step.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self.fd = fd
        self.world_size = world_size
        self._map = mmap.mmap(fd, _HEADER + _SLOT * world_size)
        self.flags = memoryview(self._map)
        self.words, self.seconds = self.flags.cast("q"), self.flags.cast("d")

    @classmethod
    def create(cls, world_size: int) -> ControlPage:
        fd = os.memfd_create("nbaccel-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEADER + _SLOT * world_size)
        page = cls(fd, world_size)
        for rank in range(world_size):
            page.write(rank, _NOWHERE)
        return page

    def begin(self, excluded_ranks: Sequence[int] = ()) -> None:
        """Reset the page for a new run. The kernel calls it while no rank works.

        Args:
            excluded_ranks: Ranks that take no part in the run. They count as finished ranks: they answer no collective.
        """
        # One flag is set once and for good; idle ranks read the other, too.
        saves_itself, is_cut, spans_nodes = self.saves_itself, self.is_cut, self.spans_nodes
        self._map[:] = bytes(len(self._map))
        self.saves_itself, self.is_cut, self.spans_nodes = saves_itself, is_cut, spans_nodes
        for rank in range(self.world_size):
            self.write(rank, _NOWHERE)
        for rank in excluded_ranks:
            self.finish(rank)

    def close(self) -> None:
        self.unmap()
        os.close(self.fd)

    def unmap(self) -> None:
        """Release this object's memory; the descriptor stays open."""
        for view in (self.words, self.seconds, self.flags):
            view.release()
        self._map.close()

    def read(self, rank: int) -> RankPosition:
        entered, previous, at, last, parked, in_step = _RANK.unpack_from(self._map, _HEADER + rank * _SLOT)
        return RankPosition(entered, previous, at, last, bool(parked), bool(in_step))

    def write(self, rank: int, position: RankPosition) -> None:
        start = _HEADER + rank * _SLOT
        self._map[start : start + _RANK.size] = _RANK.pack(
            position.entered,
            position.previous,
            position.entered_at,
            position.last_step_s,
            position.parked,
            position.in_step,
        )

    def positions(self) -> list[RankPosition]:
        return [self.read(rank) for rank in range(self.world_size)]

    def collectives(self, rank: int) -> int:
        """Return the number of the project's collectives that `rank` has entered."""
        return self.exchange(rank) >> MARK_BITS

    def exchange(self, rank: int) -> int:
        """Return that number and the mark of the latest collective, as one number."""
        return int(_COLLECTIVES.unpack_from(self._map, _HEADER + rank * _SLOT + _COLLECTIVES_AT)[0])

    def count_collectives(self, rank: int, entered: int, mark: int = NO_MARK) -> None:
        start = _HEADER + rank * _SLOT + _COLLECTIVES_AT  # not `pack_into`: peers would find another count for a moment
        self._map[start : start + _COLLECTIVES.size] = _COLLECTIVES.pack(entered << MARK_BITS | mark)

    def calls(self, rank: int) -> int:
        """Return the number of calls that `rank` has done of a map, in which it waits for no other rank."""
        return int(_CALLS.unpack_from(self._map, _HEADER + rank * _SLOT + _CALLS_AT)[0])

    def count_calls(self, rank: int, done: int) -> None:
        _CALLS.pack_into(self._map, _HEADER + rank * _SLOT + _CALLS_AT, done)

    def set_calling(self, rank: int, is_calling: bool) -> None:
        """Mark whether `rank` makes such calls: what it is in is no step then."""
        self._map[_HEADER + rank * _SLOT + _IS_CALLING_AT] = is_calling

    def is_calling(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _IS_CALLING_AT])

    def beat(self, rank: int) -> tuple[int, int]:
        """Return the progress of `rank`: collectives, and the position entered.

        It changes while the rank makes progress.
        """
        at = (_HEADER + rank * _SLOT) // 8  # the position entered is the first number there
        return self.words[at + _COLLECTIVES_AT // 8] >> MARK_BITS, self.words[at]

    def renew(self, rank: int) -> None:
        """Clear the place of `rank`, whose process is dead, for a new process of it; kernel side."""
        start = _HEADER + rank * _SLOT
        self._map[start : start + _SLOT] = bytes(_SLOT)
        self.write(rank, _NOWHERE)

    def finish(self, rank: int) -> None:
        """Mark that `rank` has done its work: it will enter no more collectives."""
        self._map[_HEADER + rank * _SLOT + _HAS_FINISHED_AT] = 1

    def has_finished(self, rank: int) -> bool:
        """Return whether `rank` has done its work. Its report may not have arrived yet."""
        return bool(self._map[_HEADER + rank * _SLOT + _HAS_FINISHED_AT])

    def set_saving(self, rank: int, is_saving: bool) -> None:
        """Mark whether `rank`, which is being stopped, writes its last checkpoint."""
        self._map[_HEADER + rank * _SLOT + _IS_SAVING_AT] = is_saving

    def is_saving(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _IS_SAVING_AT])

    def set_writing(self, rank: int, is_writing: bool) -> None:
        """Mark whether `rank` writes a checkpoint for which it needs no other rank."""
        self._map[_HEADER + rank * _SLOT + _IS_WRITING_AT] = is_writing

    def is_writing(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _IS_WRITING_AT])

    def leave(self, rank: int, steps: int) -> None:
        """Mark that `rank` leaves at a step boundary, with `steps` training steps complete."""
        _STOPPED.pack_into(self._map, _HEADER + rank * _SLOT + _STOPPED_AT, steps + 1)

    def lay(self, rank: int, count: int, key: int, value: int) -> None:
        """Write the fingerprint `value` of `key` for the other ranks.

        The last three of each rank are kept.

        Args:
            count: Number of earlier ones of `rank`.
        """
        where = _HEADER + rank * _SLOT + _LAID_AT + count % _LAID_COUNT * _LAID.size
        for at, number in ((0, 0), (8, value), (0, key)):  # `pack_into` would wipe a place before it writes
            self._map[where + at : where + at + 8] = _LAID_NUMBER.pack(number)

    def laid(self, rank: int) -> dict[int, int]:
        """Return the latest fingerprints of `rank`, by key."""
        start = _HEADER + rank * _SLOT + _LAID_AT
        places = range(start, start + _LAID_COUNT * _LAID.size, _LAID.size)
        entries = [(place, *_LAID.unpack_from(self._map, place)) for place in places]
        # The key is read again: the rank may have written another one while the value was read.
        return {
            int(key): int(value)
            for place, key, value in entries
            if key and _LAID_NUMBER.unpack_from(self._map, place)[0] == key
        }

    def limit_time(self, rank: int, at: float, seconds: float) -> None:
        """Ask the kernel to end the run at `at`, unless `rank` has named an earlier time."""
        where = _HEADER + rank * _SLOT + _TIME_LIMIT_AT
        earlier, _ = _TIME_LIMIT.unpack_from(self._map, where)
        if not earlier or at < earlier:
            _TIME_LIMIT.pack_into(self._map, where, at, seconds)

    def time_limits(self) -> list[tuple[float, float]]:
        """Return the limits that ranks have set: the end of each, in `time.monotonic()`, and its duration."""
        limits = []
        for rank in range(self.world_size):
            at = (_HEADER + rank * _SLOT + _TIME_LIMIT_AT) // 8
            if (end := self.seconds[at]) and (duration := self.seconds[at + 1]):
                limits.append((end, duration))
        return limits

    def finished_before(self, collective: int) -> list[int]:
        """Return the ranks that have done their work, and have entered fewer than `collective` collectives."""
        return [
            rank for rank in range(self.world_size) if self.has_finished(rank) and self.collectives(rank) < collective
        ]

    @property
    def save_before(self) -> int:
        """Return the optimizer step before which all ranks save, as rank 0 has announced last; 0 if it has not."""
        return int(_SAVE_BEFORE.unpack_from(self._map, _SAVE_BEFORE_AT)[0])

    @save_before.setter
    def save_before(self, step: int) -> None:
        _SAVE_BEFORE.pack_into(self._map, _SAVE_BEFORE_AT, step)

    @property
    def saves_itself(self) -> bool:
        """Return whether the run saves itself when it is stopped."""
        return bool(self._map[_SAVES_ITSELF])

    @saves_itself.setter
    def saves_itself(self, does: bool) -> None:
        self._map[_SAVES_ITSELF] = does

    @property
    def stop_wanted(self) -> bool:
        """Return whether a rank was told to end, and asks the kernel to stop the run."""
        return bool(self._map[_STOP_WANTED])

    @stop_wanted.setter
    def stop_wanted(self, is_wanted: bool) -> None:
        self._map[_STOP_WANTED] = is_wanted

    @property
    def is_cut(self) -> bool:
        """Return whether ranks are to end waits in their devices for a peer that has failed and never comes."""
        return bool(self._map[_IS_CUT])

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        self._map[_IS_CUT] = is_cut

    @property
    def frees_hung(self) -> bool:
        """Return whether a rank is to end a long wait in its device for a peer that may have left."""
        return bool(self._map[_FREES_HUNG])

    @frees_hung.setter
    def frees_hung(self, frees_hung: bool) -> None:
        self._map[_FREES_HUNG] = frees_hung

    @property
    def has_lost_a_rank(self) -> bool:
        """Return whether a rank has died in a run whose ranks are started again one by one: it meets no peer."""
        return bool(self._map[_HAS_LOST_A_RANK])

    @has_lost_a_rank.setter
    def has_lost_a_rank(self, has: bool) -> None:
        self._map[_HAS_LOST_A_RANK] = has

    def hear_cuts(self, rank: int) -> None:
        """Mark that `rank` has groups on a device, and ends its waits there when the page asks for it."""
        self._map[_HEADER + rank * _SLOT + _HEARS_CUTS_AT] = 1

    def hears_cuts(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _HEARS_CUTS_AT])

    @property
    def stop_requested(self) -> bool:
        return bool(self._map[_STOP])

    @property
    def stop_after(self) -> int | None:
        """Return the kernel's answer, or None while it has not answered."""
        if not self._map[_ANSWERED]:
            return None
        return int(_STOP_AFTER.unpack_from(self._map, _STOP_AFTER_AT)[0])

    @property
    def steps_before_stop(self) -> int | None:
        """Return the training steps that every rank has done when the run stops; None if not asked to, or no steps."""
        left = [
            int(_STOPPED.unpack_from(self._map, _HEADER + rank * _SLOT + _STOPPED_AT)[0])
            for rank in range(self.world_size)
        ]
        if any(left):
            return max(left) - 1
        answer = self.stop_after
        return None if answer is None or answer < 0 else answer // _SUBSTEPS + 1

    def set_handler(self, rank: int, is_own: bool) -> None:
        """Mark whether the program of `rank` has set a handler of its own for SIGINT."""
        self._map[_HEADER + rank * _SLOT + _HAS_HANDLER_AT] = is_own

    def has_handler(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _HAS_HANDLER_AT])

    def hear(self, rank: int) -> None:
        """Mark that the program's own handler of SIGINT is called in `rank`."""
        self._map[_HEADER + rank * _SLOT + _HAS_HEARD_AT] = 1

    def has_heard(self, rank: int) -> bool:
        return bool(self._map[_HEADER + rank * _SLOT + _HAS_HEARD_AT])

    @property
    def hands_over(self) -> bool:
        """Return whether ranks that are asked to stop call their program's own handler instead, and go on."""
        return bool(self._map[_HANDS_OVER])

    def resume(self) -> None:
        """Withdraw the request, since all ranks have heard; one that has just read it sees that it has heard."""
        self._map[_STOP] = self._map[_ANSWERED] = self._map[_SETTLED] = 0

    def stop(self, hands_over: bool = False) -> int | None:
        """Ask all ranks to stop, and answer with the position after which they do; kernel side.

        It takes a millisecond. A second call returns the first answer again; None if ranks are on other machines, and
        the answer comes with a later `answer`.

        Args:
            hands_over: They call their program's own handler of SIGINT there, and go on.
        """
        if not self.stop_requested or self.hands_over != hands_over:
            self.resume()
            self.freeze(hands_over)
        self.answer()
        return self.stop_after

    def freeze(self, hands_over: bool = False) -> None:
        """Ask all ranks to wait before their next step; when it returns, the page has where each of them is."""
        self._map[_HANDS_OVER] = hands_over
        for rank in range(self.world_size):
            self._map[_HEADER + rank * _SLOT + _HAS_HEARD_AT] = 0
        self._map[_STOP] = 1
        time.sleep(_VISIBLE_S)

    def answer(self) -> None:
        """Answer ranks that were asked to stop, once it is known where all of them are."""
        if not self.stop_requested or self._map[_ANSWERED] or (self.spans_nodes and not self._map[_SETTLED]):
            return
        _STOP_AFTER.pack_into(self._map, _STOP_AFTER_AT, max(position.reached for position in self.positions()))
        self._map[_ANSWERED] = 1

    # --- copies of the page on other machines ------------------------------------------------------------------

    @property
    def spans_nodes(self) -> bool:
        """Return whether some ranks are on other machines, which have copies of the page."""
        return bool(self._map[_SPANS_NODES])

    @spans_nodes.setter
    def spans_nodes(self, does: bool) -> None:
        self._map[_SPANS_NODES] = does

    @property
    def is_settled(self) -> bool:
        """Return whether the page has where the ranks are that were asked to stop on other machines."""
        return bool(self._map[_SETTLED])

    @is_settled.setter
    def is_settled(self, is_settled: bool) -> None:
        self._map[_SETTLED] = is_settled

    @property
    def save_wanted(self) -> bool:
        """Return whether rank 0 asks all ranks to save, where `save_before` could come too late for some."""
        return bool(self._map[_SAVE_WANTED])

    @save_wanted.setter
    def save_wanted(self, is_wanted: bool) -> None:
        self._map[_SAVE_WANTED] = is_wanted

    @property
    def next_step(self) -> int:
        """Return a training step that no rank has entered or is about to enter."""
        return max(position.step for position in self.positions()) + 1

    @property
    def orders(self) -> bytes:
        """Return what the kernel says to all ranks."""
        return b"".join(self._map[start:end] for start, end in _ORDERS)

    @orders.setter
    def orders(self, data: bytes) -> None:
        for start, end in _ORDERS:
            self._map[start:end], data = data[: end - start], data[end - start :]

    @property
    def reports(self) -> bytes:
        """Return what ranks say to the kernel together, a flag in each byte."""
        return b"".join(self._map[start:end] for start, end in _REPORTS)

    def add_reports(self, data: bytes) -> None:
        """Add the `reports` of ranks on another machine."""
        places = [place for start, end in _REPORTS for place in range(start, end)]
        for place, flag in zip(places, data, strict=True):
            if flag:
                self._map[place] = flag

    def slot(self, rank: int) -> bytes:
        """Return all that `rank` has written in its own place."""
        return self._map[_HEADER + rank * _SLOT : _HEADER + (rank + 1) * _SLOT]

    def put_slot(self, rank: int, data: bytes, later_s: float = 0.0) -> None:
        """Write the place of a rank that is on another machine.

        Args:
            data: Its `slot` there.
            later_s: Seconds by which the clock (`time.monotonic()`) of this machine is ahead of that one.
        """
        slot = bytearray(data)
        entered, previous, at, last_s, parked, in_step = _RANK.unpack_from(slot)
        _RANK.pack_into(slot, 0, entered, previous, at + later_s if at else at, last_s, parked, in_step)
        limit_at, limit_s = _TIME_LIMIT.unpack_from(slot, _TIME_LIMIT_AT)
        if limit_at:
            _TIME_LIMIT.pack_into(slot, _TIME_LIMIT_AT, limit_at + later_s, limit_s)
        self._map[_HEADER + rank * _SLOT : _HEADER + (rank + 1) * _SLOT] = bytes(slot)


class StepGate:
    """Rank side of the page: takes step events, raises `RunStopped` when the run ends, and passes on when to save."""

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._page = page
        self._rank = rank
        self._place = (_HEADER + rank * _SLOT) // page.words.itemsize
        self._last = -1
        self._entered_at = 0.0
        self._saved_before = 0
        self._calls: _Calls | None = None

    def begin(self) -> None:
        """Begin another run."""
        self._last, self._entered_at = -1, 0.0
        self._saved_before = 0
        self._calls = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEntered):
            self.enter_step(event.step, event.substep)
        elif isinstance(event, StepsEnded):
            self._leave()
        elif isinstance(event, CallEntered):
            self._enter_call(event)
        elif isinstance(event, CallsEnded):
            self._leave_calls()
        elif isinstance(event, SavingAtStop):
            self._page.set_saving(self._rank, not event.is_over)
        elif isinstance(event, Writing):
            self._page.set_writing(self._rank, not event.is_over)
        elif isinstance(event, TimeLimit):
            self._page.limit_time(self._rank, event.at, event.seconds)
            event.take()
        elif isinstance(event, SaveDue):
            if self._page.spans_nodes and event.step:
                event.choose()
                self._page.save_wanted = True
            else:
                self._page.save_before = event.step
        elif isinstance(event, SaveAsked):
            announced = self._page.save_before
            if announced == event.step or self._saved_before < announced <= event.step:
                self._saved_before = announced
                event.answer()

    def enter_step(self, step: int, substep: int) -> None:
        """Handle a `StepEntered`, which is in every step, without an event object, and with no call but the clock's."""
        number = step * _SUBSTEPS + substep if substep < _SUBSTEPS else position_number(step, substep)
        now, page, last_step_s = time.monotonic(), self._page, 0.0
        if self._entered_at:  # it is marked as in a step; the previous one is read of a parked rank only
            last_step_s = now - self._entered_at
            place, seconds = self._place, page.seconds
            page.words[place], seconds[place + 2], seconds[place + 3] = number, now, last_step_s
        else:
            page.write(self._rank, RankPosition(number, self._last, now, last_step_s, parked=False, in_step=True))
        if page.flags[_STOP]:  # read only now that the step is written
            self._park(RankPosition(number, self._last, now, last_step_s, parked=True, in_step=False))
        self._last, self._entered_at = number, now

    def _enter_call(self, event: CallEntered) -> None:
        """Mark that this rank is busy, and ask it to leave if the run is to stop.

        There is no handshake: calls are not steps that all ranks have to do alike, so no rank waits for another one's.
        """
        page, now = self._page, time.monotonic()
        if self._calls is None:
            self._calls = _Calls(page.read(self._rank), event.done)
            page.set_calling(self._rank, True)
        position = self._calls.enter(page.read(self._rank), event.done, now)
        page.count_calls(self._rank, event.done)
        page.write(self._rank, position)  # first: a kernel whose flag is not seen here sees that this rank is busy
        if page.stop_requested:
            event.stop()

    def _leave_calls(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            self._page.write(self._rank, calls.leave(self._page.read(self._rank)))
            self._page.set_calling(self._rank, False)

    def _park(self, position: RankPosition) -> None:
        """Wait before the step until the kernel has answered whether it is still to be done; or leave."""
        page = self._page
        page.write(self._rank, position)
        # Ended by the kernel's answer, which it gives within a tick, or by the death watch if it is gone.
        while (stop_after := page.stop_after) is None and page.stop_requested:
            time.sleep(_PARKED_POLL_S)
        is_due = stop_after is not None and position.entered > stop_after
        handler = signal.getsignal(signal.SIGINT) if is_due and page.hands_over else None
        if callable(handler):
            page.write(self._rank, replace(position, parked=False, in_step=True))
            if not page.has_heard(self._rank):
                page.hear(self._rank)
                handler(signal.SIGINT, sys._getframe())
            return
        if is_due:
            page.leave(self._rank, position.step)
            raise RunStopped(f"stopped before step {position.step}")
        page.write(self._rank, replace(position, parked=False, in_step=True))

    def _leave(self) -> None:
        page = self._page
        page.write(
            self._rank,
            RankPosition(self._last, self._last, time.monotonic(), 0.0, parked=False, in_step=False),
        )
        self._entered_at = 0.0


class _Calls:
    """The calls of one map in this rank.

    Args:
        before: Its position before the first one.
    """

    def __init__(self, before: RankPosition, done: int) -> None:
        self._before = before
        self._done = done
        self._entered_at = 0.0
        self._longest_s = 0.0

    def enter(self, position: RankPosition, done: int, now: float) -> RankPosition:
        """Return the position of the rank in its next call; the longest one so far counts as its last step."""
        if done > self._done and self._entered_at:
            self._longest_s = max(self._longest_s, now - self._entered_at)
        self._done, self._entered_at = done, now
        return replace(position, entered_at=now, last_step_s=self._longest_s, parked=False, in_step=True)

    def leave(self, position: RankPosition) -> RankPosition:
        """Return the position of the rank after the last call: in a step if the map was called in one."""
        before = self._before
        return replace(position, entered_at=before.entered_at, last_step_s=before.last_step_s, in_step=before.in_step)
