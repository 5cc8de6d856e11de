"""Several ranks never train several models, and an Accelerator made elsewhere finds its world or refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, NotPrepared, RanksFailed
from nbaccel.testing import run_ranks

LINE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def _things() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def _unprepared(call: str) -> str:
    accelerator = Accelerator()
    model, _, _ = _things()
    calls = {
        "backward": lambda: accelerator.backward(model(torch.ones(1, 1)).sum()),
        "accumulate": lambda: accelerator.accumulate(model),
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
    }
    with pytest.raises(NotPrepared) as caught:
        calls[call]()
    return str(caught.value)


@pytest.mark.parametrize("call", ["backward", "accumulate", "clip_grad_norm_", "clip_grad_value_"])
def test_without_prepare_two_ranks_fail_before_the_first_step_with_the_line_to_write(call: str) -> None:
    for rank, message in enumerate(run_ranks(2, _unprepared, call)):
        assert message.startswith(f"accelerator.{call} in rank {rank} of 2, but the model is not prepared")
        assert LINE in message


def test_one_process_needs_no_prepare() -> None:
    model, _, _ = _things()
    Accelerator().backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad is not None


def _own_ddp(names_it: bool) -> float:
    accelerator = Accelerator()
    model = DistributedDataParallel(_things()[0])
    inputs = torch.full((1, 1), float(accelerator.process_index))
    if names_it:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
    else:
        accelerator.backward(model(inputs).sum())
    return model.module.weight.grad.item()


@pytest.mark.parametrize("names_it", [True, False])
def test_a_ddp_model_of_ones_own_is_accepted(names_it: bool) -> None:
    assert run_ranks(2, _own_ddp, names_it) == [0.5, 0.5]


def _around_what_is_prepared() -> tuple[list[float], str]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    prepared, _ = accelerator.prepare(*_things()[:2])
    denoiser = torch.nn.Sequential(prepared)
    inputs = torch.full((1, 1), float(accelerator.process_index))
    gradients = []
    for _ in range(2):
        with accelerator.accumulate(denoiser):
            accelerator.backward(denoiser(inputs).sum())
        gradients.append(accelerator.unwrap_model(prepared).weight.grad.item())
    other = Accelerator()
    with pytest.raises(NotPrepared) as caught:
        other.accumulate(torch.nn.Sequential(prepared, torch.nn.Linear(1, 1)))
    return gradients, str(caught.value)


def test_a_module_around_a_prepared_model_is_accepted_and_one_with_parameters_of_its_own_is_not() -> None:
    """As k-diffusion's denoiser around its network, which averages its gradients in each batch of a window."""
    (first, refusal), (second, _) = run_ranks(2, _around_what_is_prepared)
    assert (first, second) == ([0.25, 0.5], [0.25, 0.5])
    assert "the model is not prepared" in refusal


def _second_model_forgotten() -> str:
    accelerator = Accelerator()
    model, _, _ = _things()
    prepared = accelerator.prepare(model)
    with pytest.raises(NotPrepared) as caught:
        accelerator.accumulate(prepared, _things()[0])
    return str(caught.value)


def test_one_of_two_models_unprepared_is_refused() -> None:
    assert all("the model is not prepared" in message for message in run_ranks(2, _second_model_forgotten))


def _use(accelerator: Accelerator) -> tuple[int, int, str, int]:
    return (
        accelerator.process_index,
        accelerator.num_processes,
        accelerator.mixed_precision,
        accelerator.gradient_accumulation_steps,
    )


def test_an_accelerator_made_before_the_fork_is_rebound_in_ranks() -> None:
    accelerator = Accelerator()
    assert _use(accelerator)[:2] == (0, 1)
    assert [row[:2] for row in run_ranks(2, _use, accelerator)] == [(0, 2), (1, 2)]
    assert _use(accelerator)[:2] == (0, 1)


def test_a_pickled_accelerator_is_rebound_in_ranks() -> None:
    data = pickle.dumps(Accelerator())
    assert [row[:2] for row in run_ranks(2, lambda: _use(pickle.loads(data)))] == [(0, 2), (1, 2)]


def _rebound_with_settings(accelerator: Accelerator) -> tuple[int, int, str, int]:
    import os

    os.environ.update(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    return _use(accelerator)


def test_a_rebound_accelerator_takes_the_launchs_settings_where_it_was_given_none() -> None:
    assert run_ranks(2, _rebound_with_settings, Accelerator())[0] == (0, 2, "bf16", 4)
    assert run_ranks(2, _rebound_with_settings, Accelerator("no", 2))[0] == (0, 2, "no", 2)


def _train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> float:
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x * (1 + accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.item()


def test_objects_prepared_for_one_process_are_refused_in_two_ranks() -> None:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*_things())
    with pytest.raises(RanksFailed, match="this loader was prepared for 1 process") as caught:
        run_ranks(2, _train, accelerator, *prepared)
    assert LINE in str(caught.value)
    plain_loader = [(torch.ones(1, 1),)]
    with pytest.raises(RanksFailed, match=r"what this accelerator prepared is for 1 process") as caught:
        run_ranks(2, _train, accelerator, prepared[0], prepared[1], plain_loader)
    assert LINE in str(caught.value)


def test_preparing_them_again_in_the_ranks_makes_one_training() -> None:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*_things())

    def prepare_and_train() -> tuple[float, int]:
        again = accelerator.prepare(*prepared)
        return _train(accelerator, *again), len(again[2])

    first, second = run_ranks(2, prepare_and_train)
    assert first == second
    assert first[1] == 2


def test_objects_prepared_in_the_kernel_train_on_in_a_single_rank() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    prepared = accelerator.prepare(*_things())
    forked = run_ranks(1, _train, accelerator, *prepared)
    data = pickle.dumps((accelerator, *prepared))
    pickled = run_ranks(1, lambda: _train(*pickle.loads(data)))
    assert forked == pickled == [_train(accelerator, *prepared)]


def test_what_is_prepared_is_returned_as_it_is_and_other_objects_pass_through() -> None:
    accelerator = Accelerator()
    model, optimizer, loader = _things()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first = accelerator.prepare(scheduler, "text", loader, optimizer, model)
    assert first[1] == "text"
    assert first[4] is model
    assert all(again is before for again, before in zip(accelerator.prepare(*first), first, strict=True))
    assert accelerator.prepare(first[2]) is first[2]
    assert first[0].optimizers == [first[3]]


def test_a_wrong_number_of_placements_is_refused() -> None:
    with pytest.raises(ValueError, match="device_placement has 1 entries for 2 objects"):
        Accelerator().prepare(*_things()[:2], device_placement=[True])


def _several_accelerators() -> list[float]:
    seen = []
    for steps in (1, 2, 1):
        torch.manual_seed(0)
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        seen.append(_train(accelerator, *accelerator.prepare(*_things())))
        accelerator.end_training()
    return seen


def test_accelerators_follow_one_another_in_ranks_that_left_their_group() -> None:
    first, second = run_ranks(2, _several_accelerators)
    assert first == second
    assert first[0] == first[2]


def _frozen() -> bool:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    return accelerator.prepare(model) is model


def test_a_model_without_trainable_parameters_is_not_wrapped() -> None:
    assert run_ranks(2, _frozen) == [True, True]


def _unwrapped() -> bool:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    prepared = accelerator.prepare(model)
    return (
        accelerator.unwrap_model(torch.compile(prepared, backend="eager"), keep_torch_compile=False) is model
        and accelerator.unwrap_model(model) is model
    )


def test_unwrap_finds_the_users_model_inside_compile_and_ddp() -> None:
    assert run_ranks(2, _unwrapped) == [True, True]


def test_unwrap_works_after_the_end_of_training() -> None:
    def ended() -> bool:
        accelerator = Accelerator()
        prepared = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.end_training()
        accelerator.unwrap_model(prepared)
        return torch.distributed.is_initialized()

    assert run_ranks(2, ended) == [False, False]
