"""The habit: a model made in an earlier cell. Plain, quantised or spread; by fork, by zygote, and in the notebook."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

MAKES = """
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randn(8, 2)

class Params4bit(nn.Parameter):
    pass

def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

def quantised():
    model = make()
    model[0].weight = Params4bit(model[0].weight.detach(), requires_grad=False)
    return model

def spread():
    model = make()
    model.hf_device_map = {"0": 0, "2": 1}
    return model

def step(model, x, y, times=1):
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(times):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model[2].weight.detach().clone()

def uses(x):
    return model(x)
"""

TRAINS = """
net = accelerator.prepare(model)
optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
with accelerator.split_between_processes(list(range(8))) as rows:
    nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
optimizer.step()
"""

STAYS = "Nothing was copied or started."


def trained(kernel: RealKernel, made: str, times: int = 1) -> float:
    """How far the notebook's model is from one that was trained in one process."""
    return float(kernel.value(f"float((model[2].weight - step({made}(), x, y, {times})).abs().max())"))


def test_a_plain_model_is_trained_and_trained_again_as_the_ranks_left_it(kernel: RealKernel, start: str) -> None:
    kernel.do(f"{MAKES}\nmodel = make()\nsame, held = model, {{'model': model}}")
    for times in (1, 2):
        kernel.do(accelerate(TRAINS, start, flags="--out model"), timeout_s=60)
        assert trained(kernel, "make", times) <= 1e-6
    assert kernel.value("same is model and held['model'] is model")


def test_a_model_of_a_closure_and_of_a_dict_are_one_in_the_ranks(kernel: RealKernel, start: str) -> None:
    kernel.do(f"{MAKES}\nmodel = make()\nheld = {{'model': model}}")
    kernel.do(accelerate("found = torch.equal(uses(x), held['model'](x))", start, flags="--out found"))
    assert kernel.value("found")


@pytest.mark.parametrize("made", ["quantised", "spread"])
def test_a_model_that_ranks_cannot_get_is_refused_before_anything_starts(
    kernel: RealKernel, made: str, start: str
) -> None:
    kernel.do(f"{MAKES}\nmodel = {made}()\nheld = [model]")
    cell = kernel.run(accelerate(TRAINS, start, flags="--out model"), timeout_s=60)
    if (made, start) == ("quantised", "fork"):  # copies of the notebook have it as it is
        cell.succeeded()
        assert trained(kernel, made) <= 1e-6
        return
    error = cell.failed("LaunchRefused").text
    assert STAYS in error
    assert f"model = {made}()` into this cell, onto accelerator.device:" in error
    assert not cell.frames, "no rank was shown"
    if start == "zygote":
        assert STAYS in kernel.run(accelerate("len(held)", start)).failed("LaunchRefused").text
        assert STAYS in kernel.run(accelerate("uses(x)", start)).failed("LaunchRefused").text


@pytest.mark.parametrize("made", ["make", "quantised", "spread"])
def test_one_rank_in_the_notebooks_own_process_takes_every_model(kernel: RealKernel, made: str) -> None:
    kernel.do(f"{MAKES}\nmodel = {made}()")
    kernel.do(accelerate(f"{TRAINS}\nafter = model[2].weight.detach().clone()", "inline", n=1, flags="--out after"))
    assert kernel.value(f"float((after - step({made}(), x, y)).abs().max())") <= 1e-6


def test_a_cell_that_loads_it_anew_needs_nothing_of_the_old_one(kernel: RealKernel) -> None:
    kernel.do(f"{MAKES}\nmodel = quantised()")
    moved = f"model = quantised()\nuses(x)\n{TRAINS}"
    kernel.do(accelerate(moved, "zygote", flags="--out model"), timeout_s=60)
    assert trained(kernel, "quantised") <= 1e-6
    kernel.do(accelerate(f"del model\n{moved}", "zygote"), timeout_s=60)
    assert kernel.value("type(model).__name__") == "TrainedTensors"  # there is no model into which they could go
    assert kernel.value("float((model['2.weight'] - step(quantised(), x, y, 1)).abs().max())") <= 1e-6


def test_a_cell_that_deletes_it_deletes_it_in_the_notebook(kernel: RealKernel) -> None:
    kernel.do(f"{MAKES}\nmodel = quantised()")
    kernel.do(accelerate("del model", "zygote"))
    assert kernel.value("'model' in globals()") is False


MEASURES = """
from nbaccel.utils import gather_object

def held(model):
    starts, found, wanted = [each.data_ptr() for each in model.parameters()], {}, None
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            wanted = low if any(low <= start < high for start in starts) else None
        elif first == "Pss:" and wanted is not None:
            found[wanted] = int(line.split()[1]) * 1024
    return sum(found.values())

total = float(sum(each.double().sum() for each in model.parameters()))  # every page is read
accelerator.wait_for_everyone()
mine = held(model)
accelerator.wait_for_everyone()
shares = gather_object([mine])
"""


@pytest.mark.parametrize("count", [24_000_000])
def test_two_ranks_hold_one_copy_of_a_model_until_they_write_to_it(kernel: RealKernel, start: str, count: int) -> None:
    kernel.do(f"import torch\nmodel = torch.nn.Linear({count // 1000}, 1000, bias=False)")
    kernel.do(accelerate(MEASURES, start, flags="--out shares"), timeout_s=60)
    shares = kernel.value("shares")
    assert len(shares) == 2
    assert 0.5 * 4 * count <= sum(shares) <= 1.2 * 4 * count, shares


def test_ranks_that_stay_are_not_sent_one_either(kernel: RealKernel) -> None:
    kernel.do(f"{MAKES}\nmodel = quantised()")
    kernel.do("%accelerate start --cpu -n 2 --start zygote", timeout_s=60)
    try:
        assert STAYS in kernel.run("%%accelerate\nmodel(x)").failed("LaunchRefused").text
        assert STAYS in kernel.run("%accelerate push model").failed("LaunchRefused").text
        kernel.do(
            "%%accelerate\nnet = quantised()\nfound = type(net[0].weight).__name__, net(x).shape[0]\nprint(found)"
        )
    finally:
        kernel.do("%accelerate stop")
