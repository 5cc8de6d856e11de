"""A log of loops that only remembers, and what tests of loaders in a dry run share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.check.dry_run.loader_cuts import LoaderCuts


class FakeLog:
    """Remembers passes: place, name and batches of each, its batches by size and kind, and whether it was whole.

    round: number of the loop's round, which `present` says.
    """

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, int | None, float | None]] = []
        self.batches: list[list[tuple[float | None, str]]] = []
        self.ended: list[bool] = []
        self.made_s: list[float | None] = []
        self.round = 0

    def begin_pass(self, place: str, name: str, batches: int | None, mean_size: float | None, workers: int) -> FakePass:
        self.begun.append((place, name, batches, mean_size))
        self.batches.append([])
        return FakePass(self, self.batches[-1])

    def excluded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def present(self) -> tuple[int, ...]:
        return (self.round,)

    @property
    def kinds(self) -> list[list[str]]:
        return [[kind for _, kind in batches] for batches in self.batches]


class FakePass:
    def __init__(self, log: FakeLog, batches: list[tuple[float | None, str]]) -> None:
        self._log = log
        self._batches = batches

    def batch(self, size: float | None, kind: str, waited_s: float, made_s: float | None) -> None:
        self._batches.append((size, kind))
        self._log.made_s.append(made_s)

    def end(self, is_whole: bool) -> None:
        self._log.ended.append(is_whole)


class Cutting:
    """Loaders are cut while entered.  records: that were written."""

    def __init__(self, folder: Path | str = "", rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.log = FakeLog()
        self.records: list[Mapping[str, Any]] = []
        self._own_folder = None if folder else tempfile.TemporaryDirectory()
        decisions = SharedDecisions(Path(folder or self._own_folder.name), rank, world_size)  # type: ignore[union-attr]
        self.cuts = LoaderCuts(self.log, self.records.append, decisions, **options)

    def __enter__(self) -> Cutting:
        self.cuts.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cuts.end()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def rounds(self, count: int) -> Iterator[int]:
        """Yield the rounds of a loop of the program's."""
        for number in range(count):
            self.log.round += 1
            yield number


class Sentences(Dataset[Tensor]):
    """Tensors of different lengths. The number of each is in all of its elements."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self._lengths[index],), index)


def padded(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)


@contextmanager
def hooks_undone(owner: Any, *names: str) -> Iterator[None]:
    """Check that the block leaves the attributes of `owner` as they were."""
    before: dict[str, Callable[..., Any]] = {name: vars(owner)[name] for name in names}
    yield
    assert {name: vars(owner)[name] for name in names} == before
