"""Cells whose ranks would train apart: an error before the first step, or a line when the cell ends."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MAKES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
before = [weight.clone() for weight in model.parameters()]
"""

LOOP = """
for a, b in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(a), b)
    loss.backward()
    optimizer.step()
"""

BY_HAND = """
for a, b in loader:
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(a), b), list(model.parameters()))
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients):
            weight -= 0.1 * gradient
"""

WITHOUT_SUPER = """
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self.defaults, self.state = {}, {}

    def step(self):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight -= 0.1 * weight.grad

    def zero_grad(self):
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

optimizer = Own(model.parameters())
"""


@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_the_first_loop_that_people_write_is_refused_before_its_first_step(kernel: RealKernel, start: str) -> None:
    kernel.do(MAKES)
    cell = kernel.run(accelerate(LOOP, start=start, flags="--out model"))
    error = cell.failed("NotPrepared")
    assert "AdamW.step in rank" in error.text
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in error.text
    assert "----> 6" in error.text.replace("---->    6", "----> 6"), "the line of the cell"
    assert kernel.value("all(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is True


def test_separate_trainings_that_are_meant_run_to_their_end(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.do(accelerate(LOOP, flags="--out model --independent"))
    assert "differ" not in cell.text


@pytest.mark.parametrize("body", [BY_HAND, WITHOUT_SUPER + LOOP], ids=["by hand", "without super"])
def test_what_no_step_shows_is_compared_when_the_cell_ends(kernel: RealKernel, body: str) -> None:
    kernel.do(MAKES)
    cell = kernel.do(accelerate(body, flags="--out model"))
    assert re.search(
        r"^model(, optimizer)? differs? between the ranks, and what came back is rank 0's", cell.stdout, re.M
    )


def test_models_that_nobody_asked_for_are_compared_too(kernel: RealKernel) -> None:
    """As with fastai's optimizers, and with loops that update lists of tensors by hand."""
    kernel.do(MAKES)
    kernel.do("class Learner: pass\nlearn = Learner()\nlearn.model = model\nweights = list(model.parameters())")
    cell = kernel.do(accelerate(BY_HAND + "learn, weights"))
    assert "learn, model, weights differ between the ranks: nothing kept them in step" in cell.stdout


def test_what_was_prepared_is_the_same_in_all_ranks(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    prepared = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    cell = kernel.do(accelerate(prepared + LOOP.replace("loss.backward()", "accelerator.backward(loss)")))
    assert "differ" not in cell.text
    cell = kernel.do(accelerate(prepared + LOOP, flags="--out model,optimizer"))
    assert "differ" not in cell.text
    assert "steps" not in cell.stderr.replace("steps are counted", "")


def test_ranks_that_stay_are_compared_in_every_cell(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    kernel.do("%accelerate start --cpu -n 2")
    try:
        other = "torch.manual_seed(accelerator.process_index)\n"
        kernel.do("%%accelerate --only 0\n" + MAKES + LOOP)
        kernel.run("%%accelerate\n" + MAKES + other + LOOP).failed("NotPrepared")
    finally:
        kernel.do("%accelerate stop")
