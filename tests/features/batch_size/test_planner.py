"""`find_batch_size` on real models under a real limit, alone and in several ranks. Criteria 3, 4 and 5 of recovery."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hungry import CNN, GPT, Hungry
from nbaccel import Accelerator
from nbaccel.errors import NotPrepared, PeerFailed
from nbaccel.features.batch_size.trial import TrialResult, TrialRun
from nbaccel.testing import MemLimit, run_ranks

LIMITS_BYTES = (4_000_000, 12_000_000, 36_000_000)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One thread, since models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, TrialResult]]:
    """Every trial of the test, as it was run."""
    seen: list[tuple[int, TrialResult]] = []
    run = TrialRun.run

    def noted(self: TrialRun, size: int) -> TrialResult:
        outcome = run(self, size)
        seen.append((size, outcome))
        return outcome

    monkeypatch.setattr(TrialRun, "run", noted)
    return seen


def _find(hungry: Hungry, limit_bytes: int, **options: Any) -> int:
    """What the planner finds for `hungry` on a device of `limit_bytes`."""
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*hungry.make_seeded())
    with MemLimit(limit_bytes) as memory:
        memory.count(model)
        return accelerator.find_batch_size(
            lambda batch: hungry.loss(model, batch), hungry.batch(2), meter=memory, **options
        )


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", LIMITS_BYTES)
@pytest.mark.parametrize("hungry", [GPT, CNN], ids=lambda hungry: hungry.name)
def test_c03_real_models_take_seven_trials_and_two_failures_at_most(
    hungry: Hungry, limit_bytes: int, outcomes: list[tuple[int, TrialResult]]
) -> None:
    size = _find(hungry, limit_bytes)
    assert len(outcomes) <= 7
    assert sum(not outcome.fits for _, outcome in outcomes) <= 2
    # A plain loop trains with it, and not with 3 % more, or three samples if those are more.
    assert hungry.trains(size, limit_bytes)
    assert not hungry.trains(max(math.ceil(size / 0.97), size + 3), limit_bytes)
    assert [outcome.fits for tried, outcome in outcomes if tried == size] == [True]


def test_c04_a_cap_that_fits_is_returned_without_running_out_of_memory(outcomes: list[tuple[int, TrialResult]]) -> None:
    assert _find(CNN, 16_000_000, max_batch_size=50) == 50
    assert all(outcome.fits for _, outcome in outcomes)


def test_c04_where_nothing_fits_the_error_names_what_one_sample_needs_and_the_limit() -> None:
    limit_bytes = 60_000
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _find(CNN, limit_bytes)
    text = str(caught.value)
    assert "not even one sample fits on rank 0" in text
    assert "the limit is 0.1 MB (of the meter that was given)" in text
    assert "gradient_checkpointing" in text
    needed_bytes = float(text.split("at least ")[1].split(" MB")[0]) * 1e6
    assert limit_bytes < needed_bytes + 50_000  # rounded for people
    assert not CNN.trains(1, limit_bytes)


class _Restless(torch.nn.Module):
    """Batch norm, dropout and a tied weight: everything that a step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        numpy.random.rand()
        hidden: Tensor = self.second(self.drop(self.norm(self.first(x))))
        return hidden


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
}


def _state(model: torch.nn.Module, optimizer: Any, loader: Any) -> list[Any]:
    """Everything that planning must not move, in a form that compares exactly."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [
        [None if tensor is None else (id(tensor), tensor.numpy(force=True).tobytes()) for tensor in tensors],
        repr(optimizer.state_dict()),
        sorted(vars(optimizer.optimizer)),
        torch.get_rng_state().numpy().tobytes(),
        repr(numpy.random.get_state()),
        random.getstate(),
        repr(loader.state_dict()),
        loader.loader.generator.get_state().numpy().tobytes(),
    ]


@pytest.mark.parametrize("has_trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c05_planning_leaves_no_trace(name: str, has_trained: bool) -> None:
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = _Restless()
    dataset = TensorDataset(torch.randn(40, 6))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = accelerator.prepare(model, OPTIMIZERS[name](model.parameters()), loader)

    def loss_fn(batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss

    def plan() -> None:
        before = _state(model, optimizer, loader)
        with MemLimit(40_000) as memory:
            memory.count(model, optimizer)
            assert 8 < accelerator.find_batch_size(loss_fn, loader, meter=memory) < 4096
            assert memory.refusals <= 1
        assert _state(model, optimizer, loader) == before

    if not has_trained:
        plan()
        assert not optimizer.state
        return
    for batch in loader:
        accelerator.backward(loss_fn(batch))
        optimizer.step()
        if loader.end_of_dataloader:
            break
        optimizer.zero_grad()
    plan()  # with optimizer state, and gradients that nobody has zeroed


def test_c05_a_training_after_planning_is_the_training_without_it() -> None:
    def train(plans: bool) -> list[float]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(5)
        model = _Restless()
        loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        if plans:
            accelerator.find_batch_size(lambda batch: model(batch[0]).square().mean(), loader, max_batch_size=64)
        losses = []
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(plans=True) == train(plans=False)


@pytest.mark.parametrize("point", ["forward", "step"])
def test_a_mistake_of_the_program_is_raised_as_it_is_and_the_training_is_as_before(point: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*CNN.make_seeded())
    weights = [parameter.numpy(force=True).tobytes() for parameter in model.parameters()]

    def loss_fn(batch: Any) -> Tensor:
        if len(batch[1]) > 2:
            raise KeyError(point)
        return CNN.loss(model, batch)

    with pytest.raises(KeyError, match=point) as caught:
        accelerator.find_batch_size(loss_fn, CNN.batch(2), max_batch_size=64)
    assert "find_batch_size, trying" in caught.value.__notes__[0]
    assert [parameter.numpy(force=True).tobytes() for parameter in model.parameters()] == weights
    assert not optimizer.state


def test_model_and_optimizer_have_to_be_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(NotPrepared, match="no model is prepared"):
        accelerator.find_batch_size(lambda batch: batch, torch.ones(1))
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(NotPrepared, match="no optimizer is prepared"):
        accelerator.find_batch_size(lambda batch: batch, torch.ones(1))


@pytest.mark.parametrize("loss", [None, torch.ones(2, requires_grad=True)], ids=["None", "vector"])
def test_what_is_no_loss_is_named(loss: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*CNN.make_seeded())
    with pytest.raises(TypeError, match="loss_fn must return the mean loss of the batch"):
        accelerator.find_batch_size(lambda batch: loss, CNN.batch(2))


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size must be at least 1, got 0"):
        Accelerator(cpu=True).find_batch_size(lambda batch: batch, torch.ones(1), max_batch_size=0)


def test_accumulated_gradients_take_their_place() -> None:
    def find(steps: int) -> int:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = torch.nn.Sequential(torch.nn.Linear(100, 500), torch.nn.Tanh(), torch.nn.Linear(500, 1))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with MemLimit(1_000_000) as memory:
            memory.count(model)
            return accelerator.find_batch_size(lambda x: model(x).mean(), torch.ones(1, 100))

    assert find(steps=2) < find(steps=1)


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_size_found_before_is_tried_once_and_used(
    tmp_path: Path, in_folder: bool, outcomes: list[tuple[int, TrialResult]]
) -> None:
    cache = tmp_path / "sizes" if in_folder else None
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*CNN.make_seeded())

    def find(limit_bytes: int) -> tuple[int, int]:
        outcomes.clear()
        with MemLimit(limit_bytes) as memory:
            memory.count(model)
            size = accelerator.find_batch_size(
                lambda batch: CNN.loss(model, batch), CNN.batch(2), meter=memory, cache=cache
            )
        return size, len(outcomes)

    size, trials = find(4_000_000)
    assert trials > 1
    assert find(4_000_000) == (size, 1)
    assert find(2_000_000)[0] < size  # it did not fit any more
    assert find(4_000_000)[0] > find(2_000_000)[0]  # and less than what fits is not enough
    if cache is not None:
        (entry,) = json.loads((cache / "batch_sizes.json").read_text()).values()
        assert entry["size"] == find(2_000_000)[0]


def _in_ranks(limits_bytes: dict[int, int]) -> tuple[int, int, list[int]]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*CNN.make_seeded())
    sizes: list[int] = []

    def loss_fn(batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        return CNN.loss(model, batch)

    with MemLimit(limits_bytes[accelerator.process_index]) as memory:
        memory.count(model)
        size = accelerator.find_batch_size(loss_fn, CNN.batch(2), meter=memory)
        # and then the training itself, with that size on every rank
        for _ in range(2):
            accelerator.backward(CNN.loss(model, CNN.batch(size)))
            optimizer.step()
            optimizer.zero_grad()
        refusals = memory.refusals
    return size, refusals, sizes


@pytest.mark.slow
def test_ranks_agree_on_what_fits_the_smallest_of_them() -> None:
    limits_bytes = {0: 16_000_000, 1: 5_000_000}
    (first, _, tried), (second, refusals, tried_there) = run_ranks(2, _in_ranks, limits_bytes)
    largest = CNN.largest(limits_bytes[1])
    assert first == second
    assert 0.9 * largest <= first <= largest
    assert tried == tried_there
    assert refusals <= 1


def test_a_mistake_on_one_rank_is_raised_there_and_named_on_the_others() -> None:
    def plan() -> str:
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(*CNN.make_seeded())

        def loss_fn(batch: Any) -> Tensor:
            if accelerator.process_index == 1 and len(batch[1]) == 2:
                raise KeyError("labels")
            return CNN.loss(model, batch)

        try:
            accelerator.find_batch_size(loss_fn, CNN.batch(1), max_batch_size=8)
        except (KeyError, PeerFailed) as error:
            accelerator.wait_for_everyone()  # nobody is left behind
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = run_ranks(2, plan)
    assert second == "KeyError: 'labels'"
    assert first.startswith("PeerFailed: rank 1 failed in find_batch_size, trying 2 samples")
    assert "KeyError: 'labels'" in first


def test_where_one_sample_does_not_fit_on_one_rank_all_ranks_say_so() -> None:
    def plan() -> str:
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(*CNN.make_seeded())
        with MemLimit(60_000 if accelerator.process_index == 1 else None) as memory:
            memory.count(model)
            try:
                accelerator.find_batch_size(lambda batch: CNN.loss(model, batch), CNN.batch(1), meter=memory)
            except torch.OutOfMemoryError as error:
                return str(error)
        return "nothing"

    first, second = run_ranks(2, plan)
    assert first == second
    assert "not even one sample fits on rank 1" in first


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_memory_that_runs_out_anywhere_in_a_step_is_one_failed_trial(
    place: str, outcomes: list[tuple[int, TrialResult]]
) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*CNN.make_seeded())
    largest = 20
    asked: list[int] = []

    def loss_fn(batch: Any) -> Tensor:
        asked.append(len(batch[1]))
        if place == "forward" and asked[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = CNN.loss(model, batch)
        if place == "backward" and asked[-1] > largest:
            loss.register_hook(_full)
        return loss

    def step(*_: Any) -> None:
        if place == "step" and asked[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    optimizer.optimizer.register_step_pre_hook(step)
    assert accelerator.find_batch_size(loss_fn, CNN.batch(2), max_batch_size=64) in range(19, 21)
    assert not optimizer.state


def _full(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_planning_beside_forward_backward_leaves_its_gradients_alone() -> None:
    def train(plans: bool) -> list[bytes]:
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*CNN.make_seeded())
        generator = torch.Generator().manual_seed(accelerator.process_index)
        batch = (torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4))
        for step in range(4):
            accelerator.forward_backward(lambda part: CNN.loss(model, part), batch)
            if plans and step in (1, 2):
                accelerator.find_batch_size(lambda part: CNN.loss(model, part), batch, max_batch_size=8)
            optimizer.step()
            optimizer.zero_grad()
        return [value.numpy(force=True).tobytes() for value in model.state_dict().values()]

    assert run_ranks(2, train, True) == run_ranks(2, train, False)
    assert train(True) == train(False)


def test_the_planner_of_a_copy_shares_the_equipment_of_the_copy() -> None:
    accelerator = Accelerator(cpu=True)
    copied = copy.deepcopy(accelerator)
    assert (accelerator._planner._context, copied._planner._context) == (accelerator._context, copied._context)
