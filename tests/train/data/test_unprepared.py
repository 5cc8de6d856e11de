"""A training whose batches come from a loader that nobody prepared: said once, and only where it is one."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset

from nbaccel import Accelerator
from nbaccel.local_sgd import LocalSGD
from nbaccel.testing import run_ranks
from nbaccel.train.data.unprepared import contents

DATA = TensorDataset(torch.arange(16.0)[:, None])


def _trainer(accelerator: Accelerator) -> tuple[Any, Any, Callable[[Any], None]]:
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step(x: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step


def _notices(program: Callable[[Accelerator], None], *, world_size: int = 2, **options: Any) -> list[list[Any]]:
    """The notices of each rank: text, file, and whether the iterators are what they were."""

    def in_rank() -> list[Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(Accelerator(**options))
        return [(str(one.message), one.filename) for one in caught if "was not prepared" in str(one.message)]

    return run_ranks(world_size, in_rank)


@pytest.mark.parametrize("way", ["in order", "shuffled", "workers", "accumulated", "raw"])
def test_an_unprepared_loader_that_a_prepared_model_is_trained_from_is_said_once(way: str) -> None:
    def program(accelerator: Accelerator) -> None:
        model, optimizer, step = _trainer(accelerator)
        loader = DataLoader(DATA, 2, shuffle=way == "shuffled", num_workers=way == "workers")
        for _ in range(2):
            iterator = iter(loader)
            for (x,) in iterator:
                if way == "raw":
                    model(x).sum().backward()
                    optimizer.step()
                else:
                    step(x)
            assert "_next_data" not in vars(iterator)

    steps = 3 if way == "accumulated" else 1
    (notice,), others = _notices(program, gradient_accumulation_steps=steps)
    assert notice[0] == (
        "the loader over TensorDataset was not prepared: each of 2 ranks reads all 8 batches, so the same work is done "
        "2 times. `loader = accelerator.prepare(loader)` before the loop gives each rank its share."
    )
    assert notice[1] == __file__
    assert others == []


class _SlowToTell(TensorDataset):
    """In rank 1 it takes longer than two seconds to say what it contains, as on a machine whose cores are all busy."""

    @property
    def _fingerprint(self) -> str:
        time.sleep(2.2 * dist.get_rank())
        return "alike"


@pytest.mark.full
def test_a_rank_that_is_slow_to_tell_what_it_reads_is_waited_for_by_no_clock() -> None:
    def program(accelerator: Accelerator) -> None:
        _, _, step = _trainer(accelerator)
        for (x,) in DataLoader(_SlowToTell(*DATA.tensors), 2):
            step(x)

    (notice,), others = _notices(program)
    assert "the loader over _SlowToTell was not prepared: each of 2 ranks reads all 8 batches" in notice[0]
    assert others == []


class _Halves(Sampler[int]):
    """Shares out by rank, as samplers of programs do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 16, 2))

    def __len__(self) -> int:
        return 8


class _Split(IterableDataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(16.0)[self.rank :: 2, None])


class _Files(Dataset[torch.Tensor]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def _shared_out(how: str, rank: int) -> DataLoader[Any]:
    if how == "distributed sampler":
        return DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, rank))
    if how == "sampler":
        return DataLoader(DATA, 2, sampler=_Halves(rank))
    if how == "batch sampler":
        return DataLoader(DATA, batch_sampler=[[index, index + 1] for index in range(4 * rank, 16, 8)])
    if how == "subset":
        return DataLoader(Subset(DATA, range(rank, 16, 2)), 2, shuffle=True)
    if how == "stream":
        return DataLoader(_Split(rank), 2)
    if how == "files":
        return DataLoader(_Files([f"{number}.pt" for number in range(rank, 16, 2)]), 2)
    if how == "slices":
        return DataLoader(TensorDataset(torch.arange(16.0)[rank::2, None]), 2, shuffle=True)
    return DataLoader(torch.rand(16, 1, generator=torch.Generator().manual_seed(rank)), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how", ["distributed sampler", "sampler", "batch sampler", "subset", "stream", "files", "slices", "drawn"]
)
def test_data_that_the_program_shares_out_itself_are_not_spoken_of(how: str) -> None:
    def program(accelerator: Accelerator) -> None:
        _, _, step = _trainer(accelerator)
        for _ in range(2):
            for batch in _shared_out(how, accelerator.process_index):
                step(batch[0] if isinstance(batch, list) else batch)

    assert _notices(program) == [[], []]


@pytest.mark.parametrize("way", ["evaluation", "held", "rank 0", "inside", "local", "no loader", "prepared"])
def test_what_is_no_training_from_an_unprepared_loader_is_not_spoken_of(way: str) -> None:
    def program(accelerator: Accelerator) -> None:
        model, _, step = _trainer(accelerator)
        loader = DataLoader(DATA, 2)
        prepared = accelerator.prepare(DataLoader(DATA, 2, shuffle=True))
        held = iter(loader)
        next(held)
        if way == "no loader":
            for _ in range(8):
                step(torch.rand(2, 1))
        for _ in range(2):
            if way == "local":
                with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
                    for (x,) in loader:
                        step(x)
                        local.step()
                continue
            for (x,) in prepared:
                step(x)
                if way == "inside":
                    for (inner,) in loader:
                        model(inner)
            if way == "held":
                next(held)  # with gradients, once per epoch
            if way == "evaluation" or (way == "rank 0" and accelerator.is_main_process):
                for (x,) in loader:
                    accelerator.unwrap_model(model)(x).sum()

    assert _notices(program) == [[], []]


def test_one_process_is_told_nothing() -> None:
    def program(accelerator: Accelerator) -> None:
        _, _, step = _trainer(accelerator)
        for (x,) in DataLoader(DATA, 2):
            step(x)

    assert _notices(program, world_size=1) == [[]]


def test_contents_of_datasets_are_told_apart_by_values_and_indices() -> None:
    assert contents(DATA) == contents(copy.deepcopy(DATA))
    assert contents(DATA) != contents(TensorDataset(torch.arange(1, 17.0)[:, None]))
    assert contents(_Files(["a", "b"])) != contents(_Files(["a", "c"]))
    assert re.fullmatch("[0-9a-f]{32}", contents(object()))
