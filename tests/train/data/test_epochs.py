"""Which iteration is which epoch, and that nothing disturbs the count of the other ranks."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from nbaccel import Accelerator
from nbaccel.errors import CollectiveMismatch
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration


def _epoch(accelerator: Accelerator, loader: Any) -> list[int]:
    """This rank's ids of an epoch in which the ranks meet."""
    seen = []
    for batch in loader:
        seen += batch.tolist()
        accelerator.wait_for_everyone()
    return seen


def _after_a_look(look: str) -> list[list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    epochs = [_epoch(accelerator, loader)]
    if accelerator.is_main_process:
        if look == "first batch":
            next(iter(loader))
            next(iter(loader), None)
        elif look.startswith("broken off"):
            with torch.set_grad_enabled(look == "broken off"):
                for _ in loader:
                    break
        else:
            with torch.inference_mode():
                for _ in loader:
                    pass
    return [*epochs, _epoch(accelerator, loader), _epoch(accelerator, loader)]


@pytest.mark.parametrize("look", ["first batch", "broken off", "broken off without gradients", "whole loop"])
def test_a_look_on_one_rank_does_not_change_what_it_sees_later(look: str) -> None:
    first, second = run_ranks(2, _after_a_look, look)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert len({tuple(epoch) for epoch in first}) == 3


class _Shuffled(IterableDataset[int]):
    """Draws its order from the process's random numbers."""

    def __iter__(self) -> Iterator[int]:
        indices = list(range(16))
        random.shuffle(indices)
        yield from indices


class _ByEpoch(Dataset[int]):
    """Gives other samples in each epoch, which it hears in the process where it was told."""

    def __init__(self, has_shared_memory: bool) -> None:
        self._epoch = torch.zeros((), dtype=torch.int64)
        if has_shared_memory:
            self._epoch.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self._epoch += epoch - self._epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return int(self._epoch), os.getpid()


class _StreamByEpoch(_ByEpoch, IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(4))


def _heard_by_workers(kind: type[_ByEpoch], has_shared_memory: bool, dispatches: bool | None) -> None:
    configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
    plain = DataLoader(kind(has_shared_memory), 1, num_workers=1, persistent_workers=True)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(plain)
    epochs = [[(int(epoch), int(process)) for epoch, process in loader] for _ in range(2)]
    assert [{epoch for epoch, _ in each} for each in epochs] == [{0}, {1}]
    processes = {process for each in epochs for _, process in each}
    assert len(processes) == (1 if has_shared_memory else 2)
    del loader, plain
    gc.collect()  # worker processes that are kept end with their loader


@pytest.mark.parametrize(
    ("kind", "has_shared_memory", "dispatches"),
    [(_ByEpoch, False, None), (_ByEpoch, True, None), (_StreamByEpoch, False, None), (_StreamByEpoch, False, False)],
)
def test_workers_that_stay_hear_the_epoch_that_their_dataset_is_told(
    kind: type[_ByEpoch], has_shared_memory: bool, dispatches: bool | None
) -> None:
    _heard_by_workers(kind, has_shared_memory, dispatches)
    run_ranks(2, _heard_by_workers, kind, has_shared_memory, dispatches)


def _looked_at_inside(is_stream: bool, workers: int) -> tuple[list[list[int]], list[int]]:
    """Epochs in which rank 0 alone looks at the loader that is being iterated, and the numbers of the epochs."""
    accelerator = Accelerator(
        gradient_accumulation_steps=3, dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
    )
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    plain: Any = DataLoader(_Shuffled(), 2) if is_stream else DataLoader(range(16), 2, sampler=_Own(), **options)  # type: ignore[arg-type]
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plain)
    epochs, numbers = [], []
    for _ in range(2):
        epochs.append([])
        for number, batch in enumerate(loader):
            numbers.append(loader.iteration)
            if accelerator.is_main_process and number in (0, 3):  # the second one in the last batch
                next(iter(loader))
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float()[:, None]).sum())
                optimizer.step()
                optimizer.zero_grad()
            epochs[-1] += batch.tolist()
        assert loader.end_of_dataloader
    del accelerator, model, optimizer, loader
    gc.collect()  # worker processes that are kept end with their loader
    return epochs, numbers


@pytest.mark.slow
@pytest.mark.parametrize(("is_stream", "workers"), [(False, 0), (False, 1), (True, 0)])
def test_a_look_on_one_rank_leaves_the_iteration_under_way_alone(is_stream: bool, workers: int) -> None:
    (first, numbers), (second, others) = run_ranks(2, _looked_at_inside, is_stream, workers)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert first[0] != first[1]
    assert numbers == others == [0] * 4 + [1] * 4


def _begun_alone(way: str) -> str:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    loader: Any = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    held = None
    if accelerator.is_main_process:
        if way == "held":
            held = iter(loader)
            next(held)
        else:
            for _ in loader:
                pass
    accelerator.wait_for_everyone()
    steps = 0
    with pytest.raises(CollectiveMismatch) if accelerator.is_main_process else nullcontext() as caught:
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            optimizer.step()
            steps += 1
            if not accelerator.is_main_process:
                break  # rank 0 does not come again
    assert steps == 1
    loader.set_epoch(0)
    assert held is not None or way != "held" or not accelerator.is_main_process
    seen = _epoch(accelerator, loader)
    assert sorted(accelerator.gather(torch.tensor(seen)).tolist()) == list(range(16))
    return str(caught.value) if caught else ""


@pytest.mark.sample(1)
@pytest.mark.slow  # what a peer may still write is waited for
@pytest.mark.parametrize("way", ["held", "whole loop"])
def test_a_loop_that_one_rank_began_alone_is_an_error_once_the_ranks_train(way: str) -> None:
    said, _ = run_ranks(2, _begun_alone, way)
    assert "the loader over range (batches of 2) in different orders: in epoch 0" in said
    assert "looped over it a different number of times (rank by rank, with this one: rank 0: 2, rank 1: 1)" in said
    assert "`next(iter(loader))`" in said
    assert "with torch.no_grad():" in said
    assert "loader.set_epoch(0)" in said


def _untrained(way: str, kind: str) -> list[list[int]]:
    """What the rank sees of a loader that is begun again and again, and nothing is trained, nor do the ranks meet."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    plain: DataLoader[Any]
    if kind == "stream":
        plain = DataLoader(_Shuffled(), 2)
    elif kind == "own":
        plain = DataLoader(range(16), 2, sampler=_Own())  # type: ignore[arg-type]
    else:
        plain = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    loader = accelerator.prepare(plain)
    seen = []
    for _ in range(4):
        if way == "whole loop":
            seen.append([index for batch in loader for index in batch.tolist()])
        elif way == "broken off":
            for batch in loader:
                seen.append(batch.tolist())
                break
        elif way == "first batch":
            seen.append(next(iter(loader)).tolist())
        else:
            with torch.no_grad():
                seen.append([index for batch in loader for index in batch.tolist()])
    loader.set_epoch(0)
    again = next(iter(loader)).tolist() if way == "first batch" else None
    seen.append(again or [])
    return seen


@pytest.mark.parametrize("way", ["whole loop", "broken off", "first batch", "without gradients"])
@pytest.mark.parametrize("kind", ["shuffled", "own", "stream"])
def test_an_iteration_that_is_run_through_uses_its_order_up_whether_anything_is_trained_or_not(
    way: str, kind: str
) -> None:
    first, second = run_ranks(2, _untrained, way, kind)
    is_whole = way in ("whole loop", "without gradients")
    for mine, theirs in zip(first[:4], second[:4], strict=True):
        if is_whole:
            assert sorted(mine + theirs) == list(range(16))
        assert not set(mine) & set(theirs)
    assert len({tuple(seen) for seen in first[:4]}) == (4 if is_whole else 1)
    if way == "first batch":
        assert first[4] == first[0]  # the same epoch


class _Told(Sampler[Any]):
    """Turns its order by the epoch that it is told; as batches if asked for."""

    epoch = 0

    def __init__(self, in_batches: bool = False) -> None:
        self.in_batches = in_batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for k in range(0, 8, 2 if self.in_batches else 1):
            own = [(k + self.epoch) % 8, (k + 1 + self.epoch) % 8]  # read as late as can be
            yield own if self.in_batches else own[0]

    def __len__(self) -> int:
        return 4 if self.in_batches else 8


class _Inside(Sampler[int]):
    """Passes on what another sampler yields."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


class _ToldStream(IterableDataset[int], _Told):
    def __iter__(self) -> Iterator[Any]:
        return _Told.__iter__(self)


def _heard() -> dict[str, list[list[list[int]]]]:
    """Orders of three passes in which nothing is trained and the ranks do not meet, with gradients and without."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    made: dict[str, DataLoader[Any]] = {
        "sampler": DataLoader(range(8), 2, sampler=_Told()),  # type: ignore[arg-type]
        "batch sampler": DataLoader(range(8), batch_sampler=_Told(True)),  # type: ignore[arg-type]
        "inside of another": DataLoader(range(8), 2, sampler=_Inside(_Told())),  # type: ignore[arg-type]
        "stream": DataLoader(_ToldStream(), 2),
    }
    heard: dict[str, list[list[list[int]]]] = {}
    for name, loader in made.items():
        heard[name] = []
        for with_gradients in (True, False):
            prepared = accelerator.prepare(loader)
            prepared.set_epoch(0)
            with torch.set_grad_enabled(with_gradients):
                held = iter(prepared)
                assert len(next(held)) == 2
                del held
                if accelerator.is_main_process:
                    next(iter(prepared))
                passes = [[index for batch in prepared for index in batch.tolist()] for _ in range(3)]
            heard[name] += passes
    return heard


def test_samplers_and_streams_of_ones_own_hear_the_epoch_of_each_pass() -> None:
    first, second = run_ranks(2, _heard)
    for name, orders in first.items():
        for number, (mine, theirs) in enumerate(zip(orders, second[name], strict=True)):
            assert sorted(mine + theirs) == list(range(8)), name
            assert mine[0] == number % 3, name


def _side_by_side() -> tuple[list[int], list[int], int, dict[str, Any]]:
    """Two iterations over one loader in turn, and a third one whose iterator is kept while the loader is trained on."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    one, other = [], []
    for batch, beside in zip(loader, loader, strict=False):
        one += batch.tolist()
        other += beside.tolist()
        accelerator.wait_for_everyone()
    kept = iter(loader)
    next(kept)
    trained = _epoch(accelerator, loader)
    assert sorted(accelerator.gather(torch.tensor(trained)).tolist()) == list(range(16))
    state = loader.state_dict()
    assert next(kept) is not None
    return one, other, loader.iteration, state


def test_iterations_side_by_side_have_orders_of_their_own_and_a_kept_iterator_is_no_epoch() -> None:
    (one, other, epoch, state), (one_too, other_too, *_) = run_ranks(2, _side_by_side)
    assert sorted(one + one_too) == sorted(other + other_too) == list(range(16))
    assert one != other
    assert (epoch, state["epoch"], state["batches"]) == (2, 2, 0)


def _two_loaders() -> tuple[list[list[int]], list[list[int]], int]:
    """Training over one loader, and looks of rank 0 and of all ranks at another one, which is evaluated, too."""
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    training: Any = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    testing: Any = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, training, testing = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), training, testing
    )
    trained: list[list[int]] = []
    tested: list[list[int]] = []
    for _ in range(3):
        trained.append([])
        for batch in training:
            if accelerator.is_main_process:
                next(iter(testing))
            accelerator.backward(model(batch.float()[:, None]).sum())
            optimizer.step()
            trained[-1] += batch.tolist()
        next(iter(training))
        tested.append([])
        for batch in testing:
            tested[-1] += accelerator.gather_for_metrics(batch).tolist()
    return trained, tested, training.iteration


def test_looks_at_two_loaders_disturb_neither_training_nor_evaluation() -> None:
    (first, tested, epoch), (second, _, _) = run_ranks(2, _two_loaders)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert [sorted(epoch) for epoch in tested] == [list(range(16))] * 3
    assert len({tuple(epoch) for epoch in tested}) == 3
    assert epoch == 3


def _broken_off_in_training() -> tuple[int, list[list[int]]]:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    loader: DataLoader[Any] = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    firsts = []
    for _ in range(3):
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            firsts.append(batch.tolist())
            break
    return loader.iteration, firsts


def test_training_that_is_broken_off_counts_as_an_epoch() -> None:
    for epochs, firsts in run_ranks(2, _broken_off_in_training):
        assert epochs == 3
        assert len({tuple(batch) for batch in firsts}) > 1
    assert _broken_off_in_training()[0] == 3


def _evaluated_inside() -> tuple[list[int], list[int], bool]:
    """A whole evaluation inside each training step, over the same loader and another."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    training = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    testing = accelerator.prepare(DataLoader(range(6), 2))  # type: ignore[arg-type, var-annotated]
    seen, metrics, ends = [], [], []
    for batch in training:
        seen += batch.tolist()
        for inner in testing:
            metrics += accelerator.gather_for_metrics(inner).tolist()
            break
        ends.append(training.end_of_dataloader)
    return seen, metrics, ends == [False] * 3 + [True]


def test_evaluation_inside_training_disturbs_neither() -> None:
    (first, metrics, ends), (second, _, _) = run_ranks(2, _evaluated_inside)
    assert sorted(first + second) == list(range(16))
    assert metrics == [0, 1, 2, 3] * 4
    assert ends


def test_alone_a_look_is_no_epoch_and_a_whole_loop_is_one() -> None:
    loader = Accelerator().prepare(DataLoader(range(4), 2))  # type: ignore[arg-type, var-annotated]
    next(iter(loader))
    assert loader.iteration == 0
    list(loader)
    assert loader.iteration == 1


class _Own(Sampler[int]):
    """Draws from every generator there is, anew in each epoch."""

    def __iter__(self) -> Iterator[int]:
        indices = torch.randperm(16).tolist()
        random.shuffle(indices)
        np.random.shuffle(indices)
        yield from indices

    def __len__(self) -> int:
        return 16


def _own_sampler(dispatch: bool) -> tuple[list[list[int]], float]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(16), 2, sampler=_Own()))  # type: ignore[arg-type, var-annotated]
    epochs = [_epoch(accelerator, loader) for _ in range(2)]
    return epochs, random.random()


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_sampler_of_ones_own_draws_alike_on_every_rank(dispatch: bool) -> None:
    (first, noise), (second, other_noise) = run_ranks(2, _own_sampler, dispatch)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert first[0] != first[1]
    random.seed(0)
    assert noise == random.random()  # the process's own numbers are untouched
    random.seed(1)
    assert other_noise == random.random()


def _own_order(seed: int, epoch: int) -> tuple[int, ...]:
    torch.manual_seed(seed)
    loader = Accelerator().prepare(DataLoader(range(16), 2, sampler=_Own()))  # type: ignore[arg-type, var-annotated]
    loader.set_epoch(epoch)
    return tuple(sample for batch in loader for sample in batch.tolist())


def test_the_order_of_a_sampler_of_ones_own_follows_from_the_seed_and_the_epoch() -> None:
    places = [(1, 0), (1, 1), (2, 0), (2, 1)]
    for *orders, again in run_ranks(2, lambda: [_own_order(*place) for place in [*places, (1, 1)]]):
        assert len(set(orders)) == len(places)
        assert again == orders[1]


class _Epochs(IterableDataset[int]):
    """Shuffles by the epoch it is told, as `datasets.IterableDataset` does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + index for index in range(4))


def test_datasets_and_samplers_that_shuffle_by_the_epoch_are_told_it() -> None:
    loader = Accelerator().prepare(DataLoader(_Epochs(), 4))
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    loader.set_epoch(7)
    assert next(iter(loader)).tolist()[0] == 700
    sampler: DistributedSampler[Any] = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = Accelerator().prepare(DataLoader(range(4), 2, sampler=sampler))  # type: ignore[arg-type]
    for _ in range(3):
        list(loader)
    assert sampler.epoch == 2


def _streams(dispatch: bool) -> list[list[int]]:
    loader = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)).prepare(
        DataLoader(_Epochs(), 1)
    )
    accelerator = Accelerator()
    return [_epoch(accelerator, loader) for _ in range(2)]


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams_are_told_the_epoch_in_two_ranks(dispatch: bool) -> None:
    assert run_ranks(2, _streams, dispatch) == [[[0, 2], [100, 102]], [[1, 3], [101, 103]]]


def _workers() -> list[list[int]]:
    accelerator = Accelerator()
    loader: DataLoader[Any] = accelerator.prepare(
        DataLoader(range(12), 2, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    )
    return [_epoch(accelerator, loader) for _ in range(3)]


def test_persistent_workers_follow_the_order_of_each_epoch() -> None:
    first, second = run_ranks(2, _workers)
    assert [sorted(mine + theirs) for mine, theirs in zip(first, second, strict=True)] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in first}) > 1


def test_a_break_leaves_nothing_behind() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(range(8), 2))  # type: ignore[arg-type, var-annotated]
    outside = loader.accumulation.window
    for _ in loader:
        assert loader.accumulation.window.source is loader
        break
    assert loader.accumulation.window is outside
    assert not loader.end_of_dataloader
    assert loader.state_dict()["batches"] == 0
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def _seedable(looks: bool) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
    loader = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    with torch.set_grad_enabled(not looks):
        return [[index for batch in loader for index in batch.tolist()] for _ in range(2)]


def test_accelerates_order_is_the_same_with_gradients_and_without() -> None:
    assert _seedable(looks=False) == _seedable(looks=True)
    first, second = run_ranks(2, _seedable, True)
    assert (first, second) == tuple(run_ranks(2, _seedable, False))
    assert first[0] != first[1]
