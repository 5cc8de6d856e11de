"""A notebook's model with parts on the disk, in the ranks of a cell."""

from __future__ import annotations

from kernel.harness import RealKernel, accelerate

LOADS = """
import torch
from torch import nn
from nbaccel import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

def make():
    layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    return nn.Sequential(nn.Embedding(16, 8), *layers).double()

torch.manual_seed(0)
whole = make()
Accelerator().save_model(whole, "placed")
with init_empty_weights():
    net = make()
net = load_checkpoint_and_dispatch(net, "placed", {"": "disk"})
ids = torch.arange(8)
with torch.no_grad():
    wanted, mine = whole(ids), net(ids)
assert torch.equal(wanted, mine)
"""

INFERS = """
net = accelerator.prepare_model(net, evaluation_mode=True)
with accelerator.split_between_processes(ids) as part, torch.no_grad():
    answers = accelerator.gather(net(part)).cpu()
waits = all(parameter.is_meta for parameter in net.parameters())
"""

TRAINS = """
net = accelerator.prepare(net)
"""


def test_ranks_infer_with_the_notebooks_model(kernel: RealKernel, start: str) -> None:
    kernel.do(LOADS)
    kernel.do(accelerate(INFERS, start, flags="--out answers,waits"), timeout_s=60)
    # Not to the bit: a product of the 4 rows of a rank and one of all 8 may round differently.
    assert kernel.value("[torch.allclose(answers, wanted, rtol=0, atol=1e-12), waits]") == [True, True]
    assert kernel.value("all(each.is_meta for each in net.parameters())")


def test_a_cell_that_would_train_it_says_why_not(kernel: RealKernel, start: str) -> None:
    kernel.do(LOADS)
    cell = kernel.run(accelerate(TRAINS, start), timeout_s=60)
    assert cell.error is not None
    assert "has parts that wait on the host or on the disk, and there are 2 processes" in cell.error.text
