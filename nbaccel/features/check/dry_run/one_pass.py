"""One iteration over a loader in a dry run: its place in the program, its batches, who is told of it. Runs in ranks.

`LoaderCuts` begins passes and ends them; the log of the loops and other observers are told.
"""

from __future__ import annotations

import dis
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from nbaccel.base.notices import PACKAGE_DIR
from nbaccel.features.check.dry_run.batch_choice import FIRST, ChosenBatches
from nbaccel.features.check.dry_run.loop_spans import MOST_BATCHES
from nbaccel.features.check.dry_run.worker_times import BatchesMade

__all__ = [
    "LoopRecords",
    "OnePass",
    "PassOfLog",
    "PassWatcher",
    "are_of_cells",
    "is_drawn_by_for",
    "name_of",
    "rows_of",
    "users_frames",
]

_DEEPEST = 40
_BETWEEN = frozenset({"contextlib", "fastprogress", "rich", "runpy", "threading", "tqdm"})
"""Modules whose frames are passed by: they begin a pass for the program, or run it."""


class PassOfLog(Protocol):
    """One iteration over a loader, as the log of the loops counts it."""

    def batch(self, size: float | None, kind: str, waited_s: float, made_s: float | None) -> None:
        """Note that a batch is handed out next, for which the loop has waited `waited_s` seconds.

        Args:
            made_s: Seconds in which a worker process makes a batch; None where that is unknown.
        """

    def end(self, is_whole: bool) -> None:
        """Note the end of the pass.

        Args:
            is_whole: It gave all batches that the loader has.
        """


class LoopRecords(Protocol):
    """Part of the log of the loops that is told of passes."""

    def begin_pass(
        self, place: str, name: str, batches: int | None, mean_size: float | None, workers: int
    ) -> PassOfLog:
        """Begin a pass that has `batches` batches in a whole run, which are made by so many worker processes."""

    def excluded(self) -> AbstractContextManager[None]:
        """Return what leaves the time that is spent within it out of all times."""

    def present(self) -> tuple[Any, ...]:
        """Return a value that is equal as long as no loop of the program has moved."""


class PassWatcher(Protocol):
    """Observer of passes, such as the one that measures where the time of a step goes."""

    def begin_pass(self, this: OnePass) -> None: ...

    def batch(self, this: OnePass, size: float | None, kind: str) -> None: ...

    def end_pass(self, this: OnePass) -> None: ...


@dataclass(eq=False)
class OnePass:
    """One iteration over a loader in a dry run.

    Args:
        place: Where the program has begun it, its line first, then those that called it.
        name: The name of the loader.
        key: The key of passes at the same place over such a loader.
        number: How many of them came before.
        batches: The batches of the whole pass for the loop; None where unknown.
        stride: Batches of the loader that are read for one of the loop: by several ranks that take turns.
        window: Batches of the loop that belong together, since an optimizer steps once in them; a round has as many.
        is_alike: Every rank must be given the same batches, since they are split over the ranks afterwards.
        begun: Identifies the loader, the place, and the rounds of the program's loops.
        workers: Processes that make its batches.
        given: Batches that the loop had.
        samples: In these batches.
        last_samples: In the last one.
        reached: The round of the last one.
        waited_s: Seconds for which it waited for the next one.
        scan_s: Seconds in which the batches were chosen.
        made: Times of worker processes.
        more: Rounds beyond the usual ones; None until that is decided.
        chosen: Batches that are given; None until they are known, and where they are the first ones.
        drawn_at: Where the program has drawn the last batch by a call.
        goes_on: It does so again and again, so that it counts on further batches, and does not take the end for one.
    """

    place: str
    name: str
    key: str
    number: int
    batches: int | None
    stride: int
    window: int
    is_alike: bool
    begun: tuple[Any, ...]
    workers: int = 0
    given: int = 0
    samples: int = 0
    last_samples: int = 0
    reached: int = -1
    waited_s: float = 0.0
    scan_s: float = 0.0
    made: BatchesMade | None = None
    more: int | None = None
    chosen: ChosenBatches | None = None
    log: PassOfLog | None = None
    is_over: bool = False
    drawn_at: tuple[Any, ...] = ()
    goes_on: bool = False
    times: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Batches that the loop gets, as far as is known."""
        rounds = self.chosen.given if self.chosen is not None else MOST_BATCHES + (self.more or 0)
        return rounds * self.window

    @property
    def is_whole(self) -> bool:
        """True if the loop got all batches of the loader."""
        return self.chosen is not None and self.chosen.are_all and self.reached >= self.chosen.given - 1

    @property
    def is_cut(self) -> bool:
        """True if the loop got all batches that it was to get, and the loader has more."""
        return self.is_over and self.given >= self.length and not self.is_whole

    def present_kind(self) -> tuple[float | None, str]:
        """Return size and kind of the batches of the round that the pass has reached."""
        if self.chosen is None:
            return None, FIRST
        at = min(self.reached, len(self.chosen.positions) - 1)
        return self.chosen.sizes[at], self.chosen.kinds[at]

    @property
    def round_s(self) -> float:
        """Seconds of a round, without the first one, which is slower."""
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        return statistics.median(gaps[1:] or gaps) * self.window if gaps else 0.0


def rows_of(batch: Any) -> int:
    """Return the number of samples in a collated batch: the first dimension of its first tensor; 0 without one.

    Example:
        >>> rows_of({"text": ["a", "b"], "more": []})
        2
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if isinstance(batch, Mapping):
        return next((rows for each in batch.values() if (rows := rows_of(each))), 0)
    if isinstance(batch, tuple | list):
        found = next((rows for each in batch if (rows := rows_of(each))), 0)
        return found or len(batch)
    return 0


# -- the program's lines


def is_drawn_by_for(frame: FrameType) -> bool:
    """Return whether `frame` draws by a `for`, or hands on what another one yields."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("FOR_ITER", "SEND", "YIELD_VALUE", "RESUME")


def users_frames(passes_bars: bool = True) -> list[FrameType]:
    """Return the frames of the program that led here, innermost first: not this package's, nor torch's.

    Of a forked rank, what the kernel did when it forked is left out: it is below this package's own frames.

    Args:
        passes_bars: Nor those of `_BETWEEN`, but for ``contextlib``, which this package uses.
    """
    of_torch = os.path.dirname(str(sys.modules["torch"].__file__)) + os.sep
    found: list[FrameType] = []
    above_ours = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_filename.startswith(PACKAGE_DIR):
            above_ours = len(found)
        elif not frame.f_code.co_filename.startswith(of_torch) and (
            package not in _BETWEEN or not (passes_bars or package == "contextlib")
        ):
            found.append(frame)
        frame = frame.f_back
    return found[: above_ours or None][:_DEEPEST]


def are_of_cells(frames: Sequence[FrameType]) -> bool:
    """Return whether `frames` are those of a cell and of functions of the notebook, and of no library."""
    return all(frame.f_globals.get("__name__") == "__main__" for frame in frames)


def name_of(frames: Sequence[FrameType], loader: Any) -> str:
    """Return the variable that holds `loader`, or a description of it."""
    for frame in frames:  # a function's own variables are not read: its frame would hold a copy of them all
        for name, each in list(frame.f_globals.items()):
            if each is loader and not name.startswith("_"):
                return name
    return f"a loader over {type(loader.dataset).__qualname__}"
