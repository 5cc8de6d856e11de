"""Header: numbers that each rank sends before gradients are exchanged, and their comparison. Runs in ranks.

A few numbers of each rank in one small collective. They detect ranks whose programs have taken different ways
before anything is summed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nbaccel.train.talk.collectives import Collectives

__all__ = ["TERMS", "VALUES", "Header", "Say", "as_floats", "digest", "exchange"]

TERMS = 6
VALUES = 5


@dataclass(slots=True)
class Say:
    """Numbers of one rank.

    done: its program is over.  new: leaves to be registered.  leaves: a digest of those that it reaches.
    extras: a backward runs others inside.  shape: a digest of the loss's terms; 0 where they are not known.
    terms: how many.  part: its batch is a part of one.  own: each rank has another batch.
    rows: samples of its batch.  whole: of all of that batch.
    obstacle: the loss is no sum over samples.  gives: its gradient counts.  at: its step.
    steps: of optimizers, so far.  batches: that were handed out, where they are cut; else 0.
    drawn: a digest of the indices of these, before they were cut.  noise: of the states of other random numbers, there.
    lengths: of those below the loss, in the first batches that are cut, and now and then.
    rates: of learning rates, since the last one.  check: a sum of weights, now and then.
    """

    done: float = 0
    new: float = 0
    leaves: float = 0
    extras: float = 0
    shape: float = 0
    terms: float = 0
    part: float = 0
    own: float = 0
    rows: float = 0
    whole: float = 0
    obstacle: float = 0
    gives: float = 1
    at: float = 0
    steps: float = 0
    batches: float = 0
    drawn: float = 0
    noise: float = 0
    lengths: float = 0
    rates: float = 0
    check: float = 0
    values: float = 0


_NAMES = [field.name for field in fields(Say)]


@dataclass(frozen=True, slots=True)
class Header:
    """Numbers of all ranks, by rank.

    counts, constants: of each term, as `Term` has them; for a sum of n numbers a count of -1 - n.
    values: of losses, before the backward.
    """

    says: list[Say]
    counts: list[list[float]]
    constants: list[list[float]]
    values: list[list[float]]

    def all_equal(self, name: str, ranks: Iterable[int]) -> bool:
        said = {getattr(self.says[rank], name) for rank in ranks}
        return len(said) <= 1

    def any(self, name: str) -> bool:
        return any(getattr(say, name) for say in self.says)


def exchange(
    collectives: Collectives, call: str, say: Say, terms: Sequence[tuple[float, float]], values: Sequence[float]
) -> Header:
    """Send `say` to all ranks, and return what all of them sent. Collective.

    terms: count and constant of each; where there are more than `TERMS` a second collective follows.
    values: at most `VALUES`.
    """
    say.terms, say.values = len(terms), len(values)
    short = [number for pair in terms[:TERMS] for number in pair] + [0.0] * (2 * max(0, TERMS - len(terms)))
    mine = [float(getattr(say, name)) for name in _NAMES] + short + [*values] + [0.0] * (VALUES - len(values))
    rows = collectives.tell(call, torch.tensor(mine, dtype=torch.float64, device="cpu")).tolist()
    size = len(_NAMES)
    says = [Say(*row[:size]) for row in rows]
    pairs = [row[size : size + 2 * TERMS] for row in rows]
    most = int(max(each.terms for each in says))
    if most > TERMS:
        longer = [number for pair in terms for number in pair] + [0.0] * (2 * (most - len(terms)))
        pairs = collectives.tell(call, torch.tensor(longer, dtype=torch.float64, device="cpu")).tolist()
    return Header(
        says,
        [row[0 : 2 * int(each.terms) : 2] for row, each in zip(pairs, says, strict=True)],
        [row[1 : 2 * int(each.terms) : 2] for row, each in zip(pairs, says, strict=True)],
        [row[size + 2 * TERMS :][: int(each.values)] for row, each in zip(rows, says, strict=True)],
    )


def digest(text: str) -> int:
    """Return a number of 32 bits, exact in a float, and never 0."""
    return zlib.crc32(text.encode()) | 1


def as_floats(entries: Sequence[float | Tensor]) -> list[float]:
    """Return each entry as a number; those on a device are fetched together."""
    away = [entry for entry in entries if isinstance(entry, Tensor) and entry.device.type != "cpu"]
    fetched = iter(torch.stack([each.detach().reshape(()).double() for each in away]).tolist() if away else ())
    return [
        next(fetched) if isinstance(each, Tensor) and each.device.type != "cpu" else float(each) for each in entries
    ]
