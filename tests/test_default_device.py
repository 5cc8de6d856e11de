"""A device by default, `torch.set_default_device`, is for the user's tensors: ours lie where they are meant to."""

from __future__ import annotations

import ast
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from environments import REPOSITORY
from nbaccel.testing import run_ranks
from nbaccel.train.data.order import SharedOrder
from nbaccel.train.data.pieces import in_pieces, permutation

PACKAGE = REPOSITORY / "nbaccel"

FREE_OF_IT = {
    "empty_like",
    "from_numpy",
    "frombuffer",
    "full_like",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
}
"""Functions that make tensors, and to which torch gives no device by default."""


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def constructors() -> set[str]:
    """The functions in torch's own namespace that a device by default is given to."""
    from torch.utils._device import _device_constructors

    named = {function.__name__ for function in _device_constructors() if getattr(torch, function.__name__, None)}
    assert {"tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randperm"} <= named
    assert not named & FREE_OF_IT
    return named


def calls_without_device(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in names
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield node


def test_every_tensor_that_nbaccel_makes_names_its_device() -> None:
    names = constructors()
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path, tree in sources().items()
        for call in calls_without_device(tree, names)
    ]
    assert not found, 'these would lie on the device that the user has by default; say device="cpu":\n' + "\n".join(
        found
    )


def test_no_constructor_goes_by_another_name() -> None:
    """`from torch import zeros` would escape the test above."""
    names = constructors()
    found = [
        f"{path}:{node.lineno}: {alias.name}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        for alias in (node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ())
        if (isinstance(node, ast.ImportFrom) and node.module == "torch" and alias.name in names)
        or (isinstance(node, ast.Import) and alias.name == "torch" and alias.asname)
    ]
    assert not found


def test_the_search_finds_what_it_looks_for() -> None:
    code = "torch.zeros(1)\ntorch.zeros(1, device='cpu')\ntorch.ones(1, **options)\nnumpy.zeros(1)"
    assert [ast.unparse(call) for call in calls_without_device(ast.parse(code), {"zeros", "ones"})] == [
        "torch.zeros(1)"
    ]


def trains(device: str | None, folder: str) -> Any:
    """Trains with what the user puts on the CPU himself, and uses what else an Accelerator has; what came of it."""
    from nbaccel import Accelerator
    from nbaccel.utils import broadcast_object_list, gather_object

    torch.set_default_device(device)
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, device="cpu"), torch.nn.Linear(8, 1, device="cpu"))
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    losses = []
    for _ in range(6):
        inputs = torch.rand(8, 4, generator=generator, device="cpu") + accelerator.process_index
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    own = torch.full((accelerator.process_index + 1,), 2.0, device="cpu")
    [sent, _] = broadcast_object_list([own, "and more"])
    accelerator.wait_for_everyone()
    return (
        losses,
        [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()],
        accelerator.gather_for_metrics(own[:1]).tolist(),
        accelerator.pad_across_processes(own).tolist(),
        accelerator.reduce(own[:1], "mean").tolist(),
        gather_object([accelerator.process_index]),
        sent.tolist(),
    )


def test_a_device_by_default_changes_nothing_of_a_training_whose_tensors_lie_elsewhere(tmp_path: Path) -> None:
    """On the meta device no number can be read, and no sum be formed."""
    plain, meta = (run_ranks(2, trains, device, tempfile.mkdtemp(dir=tmp_path)) for device in (None, "meta"))
    assert meta == plain


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("meta_by_default")
@pytest.mark.parametrize("count", [5, (1 << 22) + 5], ids=["short", "long"])
def test_an_order_is_drawn_on_the_cpu_whatever_the_device_by_default(count: int) -> None:
    ours = torch.Generator().manual_seed(1)
    torchs = torch.randperm(count, generator=torch.Generator().manual_seed(1), device="cpu")
    assert list(permutation(count, ours)) == torchs.tolist()


class OnItsDevice:
    """Weights on another device: a stand-in that knows of its own copy to the CPU."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def to(self, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        return self.weights


def test_weights_of_a_sampler_that_lie_on_another_device_are_drawn_from_where_ranks_draw_alike() -> None:
    sampler = WeightedRandomSampler([0.1, 0.2, 0.7], 8)
    plain = list(SharedOrder(sampler, seed=3))
    sampler.weights = OnItsDevice(sampler.weights)  # type: ignore[assignment]
    assert list(SharedOrder(sampler, seed=3)) == plain
    assert type(in_pieces(sampler)) is not type(sampler)
