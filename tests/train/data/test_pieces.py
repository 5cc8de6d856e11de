"""Torch's own samplers, drawn and read in pieces: the same order and the same generators, and little memory."""

from __future__ import annotations

import copy
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbaccel import Accelerator
from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration, pieces
from nbaccel.train.data.pieces import in_pieces, permutation
from nbaccel.train.data.prepare_loader import LoaderFacts, prepare_loader
from nbaccel.train.step.accumulation import Accumulation

SAMPLES = 300_000
BYTES_A_SAMPLE = 8
BYTES_OF_A_PIECE = 1 << 20


def _generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[torch.Generator | None], Sampler[Any]]] = {
    "random": lambda generator: RandomSampler(range(1001), generator=generator),
    "random, fewer": lambda generator: RandomSampler(range(1001), num_samples=10, generator=generator),
    "random, more": lambda generator: RandomSampler(range(1001), num_samples=3000, generator=generator),
    "random, twice": lambda generator: RandomSampler(range(1001), num_samples=2002, generator=generator),
    "random, replaced": lambda generator: RandomSampler(range(1001), True, 500, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(7, 1001, 3), generator=generator),
    "weighted": lambda generator: WeightedRandomSampler(torch.rand(99).tolist(), 1001, generator=generator),
    "batches": lambda generator: BatchSampler(RandomSampler(range(1001), generator=generator), 32, drop_last=False),
    "full batches": lambda generator: BatchSampler(RandomSampler(range(1001), generator=generator), 32, drop_last=True),
}


@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_in_pieces_draws_what_torchs_own_draws_epoch_after_epoch(
    name: str, has_generator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SHORT", 300)  # of 1,001 numbers the first ones are drawn while they are read
    monkeypatch.setattr(pieces, "_PIECE", 64)
    outer = torch.random.get_rng_state()
    theirs, ours = _generator(), _generator()
    torchs = SAMPLERS[name](theirs if has_generator else None)
    lean = copy.copy(torchs)
    inner = lean.sampler if isinstance(lean, BatchSampler) else lean
    inner = copy.copy(inner)
    inner.generator = ours if has_generator else None  # type: ignore[union-attr]
    if isinstance(lean, BatchSampler):
        lean.sampler = inner  # type: ignore[assignment]
    lean = in_pieces(inner if not isinstance(lean, BatchSampler) else lean)
    assert lean is not torchs
    assert isinstance(lean, type(torchs))
    assert len(lean) == len(torchs)  # type: ignore[arg-type]
    try:
        for _ in range(3):
            state = torch.random.get_rng_state()
            expected = list(torchs)
            after = torch.random.get_rng_state()
            torch.random.set_rng_state(state)
            assert list(lean) == expected
            assert torch.equal(torch.random.get_rng_state(), after)
            assert torch.equal(ours.get_state(), theirs.get_state())
    finally:
        torch.random.set_rng_state(outer)


def test_an_epoch_that_is_broken_off_leaves_the_generator_as_torch_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_SHORT", 300)
    theirs, ours = _generator(), _generator()
    torchs, lean = RandomSampler(range(5000), generator=theirs), in_pieces(RandomSampler(range(5000), generator=ours))
    for count in (1, 100, 5000):
        assert list(itertools.islice(lean, count)) == list(itertools.islice(torchs, count))
        assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("count", [1, 2, 301, 302, 1000, 8192 + 301, 20_001])
def test_a_permutation_that_is_drawn_while_it_is_read_is_torchs(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_SHORT", 300)
    monkeypatch.setattr(pieces, "_SKIPPED_AT_ONCE", 1000)
    for seed in range(3):
        ours, theirs = _generator(seed), _generator(seed)
        assert list(permutation(count, ours)) == torch.randperm(count, generator=theirs).tolist()
        assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.slow
def test_millions_of_numbers_come_in_torchs_order_the_first_of_them_before_the_others_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = pieces._SHORT + pieces._PIECE + 1
    expected = torch.randperm(count, generator=_generator())
    swaps = []
    swap = pieces._swap
    monkeypatch.setattr(pieces, "_swap", lambda *told: (swaps.append(told[1]), swap(*told)))
    pieces._draws_as_torch()
    swaps.clear()
    order = permutation(count, _generator())
    first = next(order)
    assert swaps == [0]
    assert torch.equal(torch.tensor([first, *order]), expected)


def test_another_way_of_drawing_in_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that permutes in a way that we do not know draws itself."""
    assert pieces._draws_as_torch()
    torchs = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda count, **options: torchs(count, **options).flip(0))
    assert not pieces._draws_as_torch.__wrapped__()
    monkeypatch.setattr(pieces, "_draws_as_torch", lambda: False)
    monkeypatch.setattr(pieces, "_SHORT", 300)
    assert list(permutation(1000, _generator())) == torch.randperm(1000, generator=_generator()).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "replicas"), [(1001, 4), (1000, 4), (3, 8), (7, 2)])
def test_a_distributed_sampler_in_pieces_deals_what_torchs_own_deals(
    count: int, replicas: int, drop_last: bool, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SHORT", 300)
    for rank in range(replicas):
        torchs = DistributedSampler(range(count), replicas, rank, shuffle, 3, drop_last)  # type: ignore[arg-type, var-annotated]
        lean = in_pieces(torchs)
        for epoch in range(2):
            torchs.set_epoch(epoch)
            lean.set_epoch(epoch)
            assert lean is not torchs
            assert list(lean) == list(torchs)


class _MySampler(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1, 2])


def test_samplers_of_the_users_own_stay_as_they_are() -> None:
    mine = _MySampler(range(3))
    assert in_pieces(mine) is mine
    batches = BatchSampler(mine, 2, False)
    assert in_pieces(batches) is batches
    assert in_pieces([[0, 1]]) == [[0, 1]]


class _Counted(TorchDispatchMode):
    """The bytes of the largest tensor that torch's operators make while this is entered."""

    largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = operator(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


class _Many:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(_Many(), 32, shuffle=True),  # type: ignore[arg-type]
    "generator": lambda: DataLoader(_Many(), 32, shuffle=True, generator=_generator()),  # type: ignore[arg-type]
    "no batches": lambda: DataLoader(_Many(), None, sampler=RandomSampler(_Many())),  # type: ignore[arg-type]
    "subset": lambda: DataLoader(_Many(), 32, sampler=SubsetRandomSampler(range(SAMPLES))),  # type: ignore[arg-type]
    "weighted": lambda: DataLoader(
        _Many(),  # type: ignore[arg-type]
        32,
        sampler=WeightedRandomSampler([1.0] * 10, SAMPLES),  # type: ignore[arg-type]
    ),
    "distributed": lambda: DataLoader(_Many(), 32, sampler=DistributedSampler(_Many(), 2, 0)),  # type: ignore[arg-type]
}


def _bytes_to_the_first_batch(loader: DataLoader[Any]) -> tuple[int, int]:
    """Of the largest tensor, and of all Python objects."""
    iterator = iter(loader)
    tracemalloc.start()
    try:
        with _Counted() as counted:
            next(iterator)
            _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return counted.largest, most


@pytest.mark.parametrize(
    ("kind", "ranks"), [case for case in itertools.product(LOADERS, (1, 2)) if case != ("distributed", 1)]
)
@pytest.mark.parametrize("short", [10_000, 1_000_000])
def test_a_shuffled_epoch_costs_at_most_8_bytes_a_sample(
    kind: str, ranks: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_SHORT", short)
    loader = LOADERS[kind]()
    facts = [LoaderFacts.of(loader)] * ranks
    prepared = prepare_loader(
        loader,
        World(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks),
        Accumulation(),
        DataLoaderConfiguration(),
        facts,
        torch.device("cpu"),
        moves=False,
    )
    prepared.is_bound = False
    _bytes_to_the_first_batch(prepared)  # whatever is imported and cached with the first epoch
    tensor, objects = _bytes_to_the_first_batch(prepared)
    assert tensor <= BYTES_A_SAMPLE * SAMPLES
    assert objects <= BYTES_OF_A_PIECE  # a list of all samples takes 10 MB


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": RandomSampler(range(100), generator=_generator())}])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_a_loader_in_one_process_has_the_batches_of_plain_torch(workers: int, options: dict[str, Any]) -> None:
    def epochs(loader: DataLoader[Any]) -> list[Any]:
        torch.manual_seed(3)
        if "sampler" in options:
            options["sampler"].generator.manual_seed(5)
        return [[batch.tolist() for batch in loader] + [torch.rand(()).item()] for _ in range(3)]

    def loader() -> DataLoader[Any]:
        return DataLoader(range(100), 8, num_workers=workers, persistent_workers=workers > 0, **options)  # type: ignore[arg-type]

    with torch.random.fork_rng():
        assert epochs(Accelerator().prepare(loader())) == epochs(loader())


def _resumed(mode: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**mode))
    loader = accelerator.prepare(DataLoader(range(1000), 8, shuffle=True, generator=_generator()))  # type: ignore[arg-type, var-annotated]
    pieces._SHORT = 100
    whole, state = [], {}
    for number, batch in enumerate(loader):
        whole.append(batch.tolist())
        if number == 20:
            state = loader.state_dict()
    loader.load_state_dict(state)
    return whole, [batch.tolist() for batch in loader]


@pytest.mark.parametrize("mode", [{}, {"dispatch_batches": True}, {"use_seedable_sampler": True}])
def test_an_epoch_that_is_drawn_while_it_is_read_goes_on_at_its_position(mode: dict[str, Any]) -> None:
    ranks = run_ranks(2, _resumed, mode)
    for whole, rest in ranks:
        assert whole[21:] == rest
    if "use_seedable_sampler" in mode:  # the order itself, of seed 5
        expected = torch.randperm(1000, generator=_generator()).tolist()
        assert [ranks[0][0][0], ranks[1][0][0], ranks[0][0][1]] == [expected[:8], expected[8:16], expected[16:24]]
