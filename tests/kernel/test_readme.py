"""The cell of the README, as it stands there: it runs, and trains what plain PyTorch trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from environments import REPOSITORY
from kernel.harness import RealKernel

_REFERENCE = """
import copy
torch.set_default_dtype(torch.float64)
{setup}
reference = copy.deepcopy(model)
identity = id(model)
"""

# Rank r takes batches r, r + 2, ...: one process that takes two batches at a time, in the same order, must agree.
_COMPARE = """
from nbaccel.train.data.order import SharedOrder
from torch.utils.data import BatchSampler, RandomSampler

steps = torch.optim.AdamW(reference.parameters(), lr=1e-3)
data = loader.dataset
order = SharedOrder(BatchSampler(RandomSampler(data), 32, False), {seed})
for epoch in range(3):
    order.set_epoch(epoch)
    batches = list(order)
    for first, second in zip(batches[::2], batches[1::2]):
        inputs, labels = data[first + second]
        F.cross_entropy(reference(inputs), labels).backward()
        steps.step()
        steps.zero_grad()
pairs = list(zip(model.parameters(), reference.parameters()))
worst = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)
"""


def readme_blocks() -> tuple[str, str]:
    """The README's first two Python blocks: the notebook's cell before, and the %%accelerate cell."""
    setup, cell = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)[:2]
    return setup, cell


@pytest.fixture
def fresh(environment, tmp_path: Path):  # type: ignore[no-untyped-def]
    kernel = RealKernel(environment, tmp_path)
    yield kernel
    kernel.close()


def test_the_readmes_cell_trains_as_plain_pytorch_does(fresh: RealKernel) -> None:
    setup, cell = readme_blocks()
    assert cell.startswith("%%accelerate -n 2\n")
    fresh.do("import torch")
    fresh.do(_REFERENCE.format(setup=setup))
    ran = fresh.do(cell)
    seed = re.search(r"seed (\d+)", ran.stdout)
    assert seed is not None
    assert "brought back: model trained in place (1.5 k parameters), optimizer, loss\n" in ran.stdout
    assert fresh.value("identity == id(model)")
    fresh.do(_COMPARE.format(seed=seed[1]))
    assert fresh.value("worst") < 1e-12


def test_without_prepare_the_readmes_cell_is_refused_where_that_is_wanted(fresh: RealKernel) -> None:
    setup, cell = readme_blocks()
    fresh.do(setup)
    magic, prepare, *loop = cell.splitlines(keepends=True)
    assert "prepare" in prepare
    error = fresh.run(magic.replace("\n", " --strict\n") + "".join(loop)).failed("NotPrepared")
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in error.text
