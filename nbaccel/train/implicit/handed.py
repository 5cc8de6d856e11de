"""Handed: describes the batches that a rank was given, whole ones or parts. Values; runs in ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALONE", "UNKNOWN", "Handed", "Label", "Split", "Turn"]


@dataclass(frozen=True, slots=True)
class Split:
    """Decision on a loader's batches.

    name: the variable that holds the loader, else a description.  batches: len(loader), if it has one.
    why: text instead of the usual one.  remark: text beside the usual one.
    """

    name: str
    batches: int | None
    batch_size: int | None
    is_split: bool
    why: str = ""
    remark: str = ""


class Turn(NamedTuple):
    """One of the parts of a batch that come one after the other.

    share: of its samples, those of all ranks.  is_mixed: the batch of another loader is also used, and cut differently.
    """

    share: float = 1.0
    is_first: bool = True
    is_last: bool = True
    is_mixed: bool = False


ALONE = Turn()


@dataclass(frozen=True, slots=True)
class Handed:
    """Batches that a rank was given since the last backward, or of that backward while nothing new has come.

    is_part: a batch was cut.  rows: samples of this rank in the largest cut one, else in the largest; 0 unknown.
    whole: samples of all of that batch; 0 unknown.  sizes: the ranks' numbers of samples, where it was cut.
    loaders: their names.  batches: how many the last of them has handed out.
    turn: of the last one, where a batch comes in several parts.
    """

    is_part: bool = False
    rows: int = 0
    whole: int = 0
    sizes: frozenset[int] = frozenset()
    loaders: tuple[str, ...] = ()
    batches: int = 0
    turn: Turn = ALONE


class Label(NamedTuple):
    """One batch, or part of one: whether other ranks have other samples, this rank's number, and all; 0 unknown."""

    is_apart: bool
    rows: int
    whole: int
    turn: Turn = ALONE
    sizes: frozenset[int] = frozenset()


UNKNOWN = Label(False, 0, 0)
