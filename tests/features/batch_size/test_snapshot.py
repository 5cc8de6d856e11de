"""What trials disturb is put back bit by bit."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from four_bit_models import Params4bit, made, trained_of
from nbaccel.features.micro_batches.snapshot import TrainingSnapshot

CPU = torch.device("cpu")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_parameters_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(5, 3, dtype=dtype)
    with torch.no_grad():
        model.weight.view(-1)[0] = float("nan")
    weight, before = model.weight, _bytes(model.weight)
    with TrainingSnapshot([model], [], CPU), torch.no_grad():
        model.weight.fill_(1)
    assert model.weight is weight
    assert _bytes(weight) == before


def test_strange_tensors_come_back() -> None:
    model = torch.nn.Module()
    model.register_buffer("zero", torch.tensor(3))
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    model.register_buffer("missing", None)
    model.shared = torch.nn.Parameter(torch.ones(4).expand(3, 4).contiguous())
    before = {name: _bytes(buffer) for name, buffer in model.named_buffers()}
    with TrainingSnapshot([model], [], CPU):
        model.zero += 4
        model.turned *= 2
        model.missing = torch.ones(1)
        model.empty = torch.ones(2)
    assert {name: _bytes(buffer) for name, buffer in model.named_buffers()} == before
    assert model.missing is None


def test_a_gradient_keeps_its_place_in_a_flat_bucket() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    bucket = torch.tensor([1.0, 2.0, 7.0])
    model.weight.grad = bucket[:2].view(1, 2)
    gradient = model.weight.grad
    with TrainingSnapshot([model], [], CPU):
        model.weight.grad = None
        bucket.zero_()
        bucket[2] = 7
    assert model.weight.grad is gradient
    assert bucket.tolist() == [1, 2, 7]


@pytest.mark.parametrize("has_state", [False, True])
def test_optimizer_state_is_what_it_was_also_when_there_was_none(has_state: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)

    def step() -> None:
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()

    if has_state:
        step()
    before, attributes = repr(optimizer.state_dict()), sorted(vars(optimizer))
    tensors = [id(tensor) for entry in optimizer.state.values() for tensor in entry.values()]
    with TrainingSnapshot([model], [optimizer], CPU):
        step()
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.trials = 1  # type: ignore[attr-defined]
    assert repr(optimizer.state_dict()) == before
    assert [id(tensor) for entry in optimizer.state.values() for tensor in entry.values()] == tensors
    assert sorted(vars(optimizer)) == attributes


def test_a_half_made_optimizer_state_is_dropped() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with TrainingSnapshot([model], [optimizer], CPU):
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 2)  # and then memory ran out
    assert not optimizer.state


def test_optimizer_state_in_containers_comes_back() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = repr(optimizer.state_dict())
    with TrainingSnapshot([model], [optimizer], CPU):
        optimizer.step(closure)
        assert repr(optimizer.state_dict()) != before
    assert repr(optimizer.state_dict()) == before


def test_random_generators_go_on_where_they_were() -> None:
    def draw() -> list[Any]:
        return [random.random(), numpy.random.rand(), torch.rand(1).item()]

    with TrainingSnapshot([], [], CPU) as snapshot:
        first = draw()
        snapshot.restore()
        assert draw() == first
    assert draw() == first


def test_the_state_comes_back_after_an_error() -> None:
    model = torch.nn.Linear(1, 1)
    before = _bytes(model.weight)
    with pytest.raises(KeyError), TrainingSnapshot([model], [], CPU), torch.no_grad():
        model.weight.zero_()
        raise KeyError
    assert _bytes(model.weight) == before


def test_a_trial_copies_no_base() -> None:
    model = made()
    base = next(parameter for parameter in model.parameters() if type(parameter) is Params4bit)
    with TrainingSnapshot([model], [], CPU) as snapshot:
        copied = snapshot._file.seek(0, 2)
        with torch.no_grad():
            trained_of(model)[0].zero_()
    kept = [*trained_of(model), *model.buffers()]
    assert copied == sum(tensor.nbytes for tensor in kept)
    assert model.blocks[0].base_layer.weight is base  # type: ignore[union-attr]
    assert trained_of(model)[0].any()
