"""Values on their way to ranks and back: ``make bench ROWS=handover``. Seconds, and memory of the machine.

To: two ranks sum a tensor that the caller has. Back: rank 0 makes one and returns it. By our fork and zygote, and by
pickle through pipes to forked children, which is what `multiprocessing` does by itself. The sums are checked; a way
that loses a value ends the report. "nothing" is a tensor of one number: what it takes to start the ranks.

Memory is what the machine had less at the worst moment; other programs move it, so judge on an idle one. Sizes whose
pickling might not fit are left out, and said.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import psutil
import torch
import torch._dynamo  # every rank's first optimizer imports it otherwise
from torch import Tensor

from benchmarks.findings import Finding, options_of, tell
from nbaccel.launching.api import launch

RANKS = 2
MEGABYTES = (0, 1, 10, 100, 500, 2000)
_LARGE_MB = 500
"""From here on one turn has to do."""
_COPIES = 6
"""The tensor, its pickle, and both again in each of two ranks."""


class WrongValue(Exception):
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Way:
    """How values travel.

    to: gives a tensor to the ranks, returns the sums they found. back: a tensor of so many ones, made by a rank.
    """

    to: Callable[[Tensor], list[float]]
    back: Callable[[int], Tensor]


def total(tensor: Tensor) -> float:
    """By NumPy, which casts piece by piece: torch would make a copy of twice the size."""
    return float(tensor.numpy().sum(dtype=np.float64))


def _ones(count: int) -> Tensor | None:
    """In a rank: the tensor, if it is the first."""
    return torch.ones(count) if os.environ["RANK"] == "0" else None


def _launched(start_method: str) -> Way:
    def to(tensor: Tensor) -> list[float]:
        sums: list[float] = launch(total, RANKS, (tensor,), start_method=start_method, cpu=True).values
        return sums

    def back(count: int) -> Tensor:
        made: Tensor = launch(_ones, RANKS, (count,), start_method=start_method, cpu=True).value
        return made

    return Way(to, back)


def _pickled() -> Way:
    fork = get_context("fork")

    def receive(connection: Connection) -> None:
        connection.send(total(pickle.loads(connection.recv_bytes())))

    def make(connection: Connection, rank: int, count: int) -> None:
        if rank == 0:
            connection.send_bytes(pickle.dumps(torch.ones(count), pickle.HIGHEST_PROTOCOL))

    def to(tensor: Tensor) -> list[float]:
        pipes = [fork.Pipe() for _ in range(RANKS)]
        ranks = [fork.Process(target=receive, args=(theirs,)) for _, theirs in pipes]
        for rank in ranks:
            rank.start()
        pickled = pickle.dumps(tensor, pickle.HIGHEST_PROTOCOL)
        for mine, _ in pipes:
            mine.send_bytes(pickled)
        sums = [mine.recv() for mine, _ in pipes]
        for rank in ranks:
            rank.join()
        return sums

    def back(count: int) -> Tensor:
        mine, theirs = fork.Pipe()
        ranks = [fork.Process(target=make, args=(theirs, rank, count)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        made: Tensor = pickle.loads(mine.recv_bytes())
        for rank in ranks:
            rank.join()
        return made

    return Way(to, back)


WAYS = {
    "pickle, pipes": _pickled(),
    "nbaccel, fork": _launched("fork"),
    "nbaccel, zygote": _launched("zygote"),
}


class _Watch:
    """How much less memory the machine had at the worst moment of a block, in bytes."""

    def __enter__(self) -> _Watch:
        self._is_over = threading.Event()
        self._before = self._least = psutil.virtual_memory().available
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.005):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.taken_bytes = self._before - self._least


def check(name: str, found: list[float], count: int) -> None:
    """
    Raises:
        WrongValue: somebody did not get `count` ones.
    """
    if found != [float(count)] * len(found) or not found:
        raise WrongValue(f"{name}: the sums are {found}, and the tensor has {count} ones")


def measured(name: str, way: Way, count: int, turns: int) -> Iterator[tuple[str, float, int]]:
    """Of each direction: its name, seconds, bytes that the machine had less."""
    ones = torch.ones(count)
    directions: dict[str, Callable[[], list[float]]] = {
        "to 2 ranks": partial(way.to, ones),
        "back from one": lambda: [total(way.back(count))],
    }
    for direction, go in directions.items():
        seconds, taken = [], []
        for _ in range(turns):
            with _Watch() as watch:
                began = time.perf_counter()
                found = go()
                seconds.append(time.perf_counter() - began)
            taken.append(watch.taken_bytes)
            check(f"{name}, {direction}", found, count)
        yield direction, statistics.median(seconds), round(statistics.median(taken))


def findings(turns: int) -> Iterator[Finding]:
    for way in WAYS.values():  # what is loaded with the first launch of each
        way.to(torch.ones(1))
    for megabytes in MEGABYTES:
        what = f"{megabytes:,} MB" if megabytes else "nothing"
        if (room := psutil.virtual_memory().available / 1e6) < megabytes * _COPIES:
            yield Finding(what, f"left out: pickling takes up to {_COPIES} times that, free are", room, "MB")
            continue
        for name, way in WAYS.items():
            count = max(1, megabytes * 250_000)  # of 4 bytes each
            for direction, seconds, taken in measured(name, way, count, 1 if megabytes >= _LARGE_MB else turns):
                yield Finding(what, f"{name}, {direction}", seconds * 1e3, "ms")
                if megabytes:
                    yield Finding(what, f"{name}, {direction}: memory", taken / 1e6 / megabytes, "x the size")


def main() -> int:
    options = options_of(__doc__, turns=5)
    torch.set_num_threads(1)
    return tell(findings(options.turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
