"""A cell that knows no ranks draws the notebook's random numbers, in every rank, and the notebook goes on after it.

One that prepares draws apart, unless the program has seeded all ranks.
"""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SEEDS = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
random.seed(1), np.random.seed(2), torch.manual_seed(3)
"""

RAW = """
drawn = [random.random(), float(np.random.rand()), torch.rand(1).item(), nn.Linear(2, 2).weight.sum().item()]
order = [float(x) for (batch,) in DataLoader(TensorDataset(torch.arange(6.0)), 2, shuffle=True) for x in batch]
drawn, order
"""

NEXT = "[random.random(), float(np.random.rand()), torch.rand(1).item()]"


def plain(kernel: RealKernel, cell: str = RAW) -> tuple[object, object]:
    """What the cell draws without the magic, and what is drawn after it."""
    kernel.do(SEEDS)
    kernel.do(cell)
    return kernel.value("[drawn, order]"), kernel.value(NEXT)


@pytest.mark.parametrize("flags", ["", "--out drawn,order"])
def test_a_raw_cell_draws_what_it_would_without_ranks_and_so_does_the_next(
    kernel: RealKernel, start: str, flags: str
) -> None:
    expected = plain(kernel)
    kernel.do(SEEDS)
    cell = kernel.do(accelerate(RAW, start, flags=flags))
    assert "seed" not in cell.stdout.splitlines()[0]
    assert (kernel.value("[drawn, order]"), kernel.value(NEXT)) == expected


@pytest.mark.parametrize("n", [1, 2])
def test_every_rank_draws_the_same(kernel: RealKernel, start: str, n: int) -> None:
    kernel.do(SEEDS)
    cell = kernel.do(accelerate("print(torch.rand(1).item(), random.random())", start, n))
    assert len(cell.printed.splitlines()) == 1, cell.printed
    assert kernel.value("torch.rand(1).item()") != float(cell.printed.split()[-2])


def test_a_second_raw_cell_draws_other_numbers(kernel: RealKernel, start: str) -> None:
    kernel.do(SEEDS)
    first, second = (kernel.do(accelerate("print(random.random())", start)).printed for _ in range(2))
    assert first != second


def test_a_cell_that_knows_ranks_and_one_with_a_seed_leave_the_notebooks_numbers_alone(kernel: RealKernel) -> None:
    kernel.do(SEEDS)
    expected = kernel.value(NEXT)
    kernel.do(SEEDS)
    assert "seed 7\n" in kernel.do(accelerate("torch.rand(3)", flags="--seed 7")).stdout
    assert "random numbers" not in kernel.do(accelerate("accelerator.print(torch.rand(3))")).stdout
    assert kernel.value(NEXT) == expected


def test_raw_cells_in_ranks_that_stay_draw_the_notebooks_numbers(kernel: RealKernel, start: str) -> None:
    expected = plain(kernel)
    kernel.do(f"%accelerate start --cpu -n 2 --start {start}")
    try:
        kernel.do(SEEDS)
        kernel.do("%%accelerate --out drawn,order\n" + RAW)
        assert (kernel.value("[drawn, order]"), kernel.value(NEXT)) == expected
    finally:
        kernel.do("%accelerate stop")


TRAINS = """
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.arange(128.0).reshape(16, 8)), 4, shuffle=True):
        optimizer.zero_grad()
        loss = model(x / 128).square().mean()
        loss.backward()
        optimizer.step()
drawn, order = [weight.sum().item() for weight in model.parameters()], loss.item()
"""


def test_an_unmodified_loop_leaves_the_notebooks_numbers_where_it_would_without_ranks(
    kernel: RealKernel, start: str
) -> None:
    (drawn, order), then = plain(kernel, TRAINS)  # type: ignore[misc]
    kernel.do(SEEDS)
    kernel.do(accelerate(TRAINS, start))
    assert kernel.value("drawn") == pytest.approx(drawn, rel=1e-4)
    assert kernel.value("order") == pytest.approx(order, rel=1e-4)
    assert kernel.value(NEXT) == then


IN_A_LIBRARY = """
import random
import numpy as np
import torch
from torch import distributed, nn

def train(seeds=None):
    before = float(np.random.rand())
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    if seeds is not None:
        np.random.seed(seeds), random.seed(seeds), torch.manual_seed(seeds)
    drawn = [before, float(np.random.rand()), random.random(), torch.rand(1).item()]
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, drawn)
    return found
"""


def test_ranks_draw_apart_once_a_library_has_wrapped_a_model_for_them(kernel: RealKernel, start: str) -> None:
    """The cell names nothing of ranks, and its library draws windows of a series with NumPy, as gluonts does."""
    kernel.do(f"open('windows_of_a_library.py', 'w').write({IN_A_LIBRARY!r})\nimport windows_of_a_library as library")
    kernel.do(SEEDS)
    expected = kernel.value("float(np.random.rand())")
    kernel.do(SEEDS)
    cell = kernel.do(accelerate("found = library.train()", start, 2))
    assert "seed" not in cell.stdout.splitlines()[0]
    ours, theirs = kernel.value("found")
    assert ours[0] == theirs[0] == expected
    assert all(one != other for one, other in zip(ours[1:], theirs[1:], strict=True))
    kernel.do(SEEDS + "np.random.rand()")
    assert ours[1:3] == kernel.value("[float(np.random.rand()), random.random()]")

    # Seeds of the program's own are the program's choice.
    kernel.do(accelerate("found = library.train(seeds=7)", start, 2))
    ours, theirs = kernel.value("found")
    assert ours[1:] == theirs[1:]


DRAWS_FOR_SAMPLES = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Augmented(Dataset):
    def __len__(self): return 16
    def __getitem__(self, at): return torch.tensor([np.random.rand(), random.random(), torch.rand(()).item()])
"""

PREPARED = """
from nbaccel import Accelerator
{seeds}
accelerator = Accelerator()
model = torch.nn.Linear(3, 1)
model, loader = accelerator.prepare(model, DataLoader(Augmented(), batch_size=4, num_workers={workers}))
drawn = [accelerator.gather(batch[None]) for batch in loader]
drawn = [set(torch.cat([each[rank] for each in drawn]).flatten().tolist()) for rank in range(2)]
common = len(drawn[0] & drawn[1])
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_prepared_loop_draws_for_its_samples_apart_and_alike_once_the_program_has_seeded_all_ranks(
    kernel: RealKernel, workers: int
) -> None:
    """As in Accelerate: `set_seed` gives all ranks, and their workers, the same noise, but for `device_specific`."""
    kernel.do(DRAWS_FOR_SAMPLES)
    seeds = {
        "": 0,
        "from nbaccel.utils import set_seed; set_seed(5)": 24,
        "from nbaccel.utils import set_seed; set_seed(5, device_specific=True)": 0,
    }
    found = {}
    for line in seeds:
        kernel.do(accelerate(PREPARED.format(seeds=line, workers=workers)))
        found[line] = kernel.value("common")
    assert found == seeds
