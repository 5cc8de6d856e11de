"""Cells that run out of memory in a real notebook: started again by themselves, or stopped with the reason."""

from __future__ import annotations

import re

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate
from starts import ZYGOTE, needs_clean_start

MAKES = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from nbaccel.testing import MemLimit
torch.manual_seed(0)
x, y = torch.randn(150, 8), torch.randn(150)
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
state = {name: value.clone() for name, value in net.state_dict().items()}
limit_bytes = None
attempts = "attempts.txt"
"""

TRAINS = """
open(attempts, "a").write(f"{accelerator.process_index}")
model, optimizer, loader = accelerator.prepare(net, adam, DataLoader(TensorDataset(x, y), 64, shuffle=True))
scheduler = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, total_iters=2 * len(loader))
seen, rates = [], []
with MemLimit(limit_bytes if accelerator.is_last_process else None):
    for epoch in range(2):
        for features, target in loader:
            with accelerator.accumulate(model):
                loss = (model(features)[:, 0] - target).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
            if epoch == 0:
                seen += accelerator.gather_for_metrics(target).tolist()
weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
"""

OUT = "--out weights,seen,rates --seed 3"

RESIDENT = "__import__('psutil').Process().memory_info().rss"


@pytest.fixture
def notebook(kernel: RealKernel) -> RealKernel:
    """A notebook with a model and data; the file that counts attempts is empty."""
    kernel.do(f"{MAKES}\nopen(attempts, 'w').close()")
    return kernel


@pytest.mark.parametrize(("ranks", "start"), [(1, "fork"), pytest.param(2, "zygote", marks=needs_clean_start)])
def test_a_cell_that_does_not_fit_ends_with_what_a_fitting_one_trains(
    notebook: RealKernel, ranks: int, start: str
) -> None:
    notebook.do(accelerate(TRAINS, start, ranks, OUT))
    notebook.do("expected = weights, sorted(seen), rates; limit_bytes = 40_000")
    resident = notebook.value(RESIDENT)
    cell = notebook.do(accelerate(TRAINS, start, ranks, OUT))
    assert notebook.value(RESIDENT) - resident < 20e6, "the kernel itself holds nothing of the attempts"
    line = f"rank {ranks - 1} ran out of memory at 64 per rank; started again with 2 x 32, effective batch {64 * ranks}"
    assert line in cell.text
    assert cell.text.count("started again with") == 2
    assert cell.text.count("brought back: weights") == 1  # of the last attempt
    assert notebook.value("float((weights - expected[0]).abs().max())") <= 1e-6
    assert notebook.value("sorted(seen) == expected[1] == sorted(y.tolist())")
    assert notebook.value("rates == expected[2]")
    assert notebook.value("all(value.equal(state[name]) for name, value in net.state_dict().items())")
    assert notebook.value("len(open(attempts).read())") == ranks * (1 + 3)  # one run that fits, three of the other


SAVES = """
import glob, time
model, optimizer, loader = accelerator.prepare(net, adam, DataLoader(TensorDataset(x, y), 64, shuffle=True))
with MemLimit() as limit:
    for epoch in accelerator.epochs(3):
        if epoch == 2 and limit_bytes:
            while not glob.glob("shrunk/checkpoint_*"): time.sleep(0.01)
            limit.limit_bytes = limit_bytes if accelerator.is_last_process else None
        for features, target in loader:
            try:
                accelerator.backward((model(features)[:, 0] - target).square().mean())
            except torch.OutOfMemoryError:
                if is_killed and not glob.glob("killed"):  # without a sign of memory a second one would end the run
                    open("killed", "w").close(); os.kill(os.getpid(), 9)
                raise
            optimizer.step()
            optimizer.zero_grad()
weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cell_that_saves_itself_goes_on_from_its_newest_checkpoint(notebook: RealKernel, is_killed: bool) -> None:
    """Its last epoch does not fit. It is saved in the background, by the time that epoch begins once."""
    flags = "--out weights --seed 3 --checkpoint-every 1steps --checkpoint-dir {}"
    notebook.do(f"import shutil; shutil.rmtree('shrunk', True); shutil.rmtree('fitting', True); {is_killed = }")
    notebook.do(accelerate(SAVES, "fork", 2, flags.format("fitting")))
    notebook.do("expected = weights; limit_bytes = 40_000")
    cell = notebook.do(accelerate(SAVES, "fork", 2, flags.format("shrunk")))
    lines = re.findall(r"started again from \S*shrunk/checkpoint_\d with (\S+ x \S+),", cell.text)
    assert lines[0] == "2 x 32"
    assert ("was killed by SIGKILL" in cell.text) is is_killed
    assert notebook.value("float((weights - expected).abs().max())") <= 1e-6


def test_a_cell_may_ask_not_to_be_started_again(notebook: RealKernel) -> None:
    notebook.do("limit_bytes = 40_000; seen = None")
    error = notebook.run(accelerate(TRAINS, "fork", 2, f"{OUT} --oom stop")).failed("OutOfMemoryError")
    assert "not started again: --oom shrink, or oom='shrink' in a launch, would go on with 2 x 32" in error.text
    assert notebook.value("open(attempts).read()") in ("01", "10")
    assert notebook.value("seen == []")  # --out comes back all the same


def test_a_cell_without_a_loop_of_ours_says_why_it_was_not_started_again(notebook: RealKernel) -> None:
    error = notebook.run(accelerate("raise MemoryError", n=1)).failed("MemoryError")
    assert "not started again: nothing of ours can be cut" in error.text
    error = notebook.run(accelerate("os.kill(os.getpid(), 9)", n=1)).failed("RankDied")
    assert "not started again: nothing of ours can be cut" in error.text


TOO_LARGE = """
import resource
from pathlib import Path

def limit_to(more_bytes):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    limit = int(int(line.split()[1]) * 1024 + more_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))

def train(accelerator, model, samples, features):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(samples, features), torch.randn(samples, 1)), samples)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with open(attempts, "a") as file:
        file.write("a")
    for x, target in loader:
        accelerator.backward((model(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""

MLP = """
limit_to(420e6)  # parameters take 271 MB, a gradient 256 MB, the batch 20 MB; libraries 1 to 45 MB, by the processor
model = torch.nn.Sequential(
    torch.nn.Linear(900, 4000), torch.nn.ReLU(),
    torch.nn.Linear(4000, 16000), torch.nn.ReLU(), torch.nn.Linear(16000, 1),
)
train(accelerator, model, 128, 900)
"""

TABLE = """
class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(11250, 10000))  # 450 MB
        self.first = torch.nn.Linear(64, 10000)

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(22):
            hidden = hidden.tanh()
        return (hidden * self.rows[0]).sum(1, keepdim=True)

limit_to(3 * 450e6 + 450e6)  # with 350e6 a quarter of the batch does not fit, with 550e6 all of it does
torch.set_num_threads(1)
train(accelerator, Table(), 1024, 64)
"""


@pytest.fixture
def new_notebook(new_kernel: Kernels) -> RealKernel:
    """As `notebook`, in a kernel of its own: memory that others have freed in it would be found again under a limit."""
    kernel = new_kernel()
    kernel.do(f"import torch\n%load_ext nbaccel\n{MAKES}\nopen(attempts, 'w').close()")
    return kernel


@pytest.mark.full
def test_a_gradient_that_fits_with_no_batch_ends_the_cell_after_two_tries(new_notebook: RealKernel) -> None:
    notebook = new_notebook
    notebook.do(TOO_LARGE)
    error = notebook.run(accelerate(MLP, n=1)).failed("RuntimeError")
    assert "not started again: the same 256.0 MB were asked for at the same line as with 128" in error.text
    assert "and a single sample would not fit either" in error.text
    assert "gradient checkpointing" in error.text
    assert notebook.value("open(attempts).read()") == "aa"


def test_a_large_gradient_that_fits_with_a_quarter_of_the_batch_is_trained(new_notebook: RealKernel) -> None:
    notebook = new_notebook
    notebook.do(TOO_LARGE)
    cell = notebook.do(accelerate(TABLE, n=1))
    assert "ran out of memory at 1024 per rank; started again with 2 x 512" in cell.text
    assert "ran out of memory at 2 x 512 per rank; started again with 4 x 256" in cell.text
    assert notebook.value("open(attempts).read()") == "aaa"


TRAINS_BY_ITSELF = """
open(attempts, "a").write("x")
import nbaccel.testing
torch.manual_seed(7)
loader = DataLoader(TensorDataset(x.double(), y.double()), 64, shuffle=True)
scheduler = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, total_iters=2 * len(loader))
with MemLimit(limit_bytes):
    for epoch in range(2):
        for features, target in loader:
            adam.zero_grad()
            loss = (net(features)[:, 0] - target).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            adam.step()
            scheduler.step()
rate = scheduler.get_last_lr()
"""


@pytest.mark.parametrize("start", ["fork", ZYGOTE])
def test_a_loop_that_prepares_nothing_is_started_again_in_parts_and_trains_what_one_process_would(
    notebook: RealKernel, start: str
) -> None:
    notebook.do("net.double(); begun = {name: value.clone() for name, value in net.state_dict().items()}")
    notebook.do(TRAINS_BY_ITSELF)
    notebook.do("expected = torch.cat([p.detach().flatten() for p in net.parameters()]), rate")
    notebook.do("net.load_state_dict(begun); adam = torch.optim.AdamW(net.parameters(), lr=0.01); limit_bytes = 65_000")
    notebook.do("open(attempts, 'w').close()")
    cell = notebook.do(accelerate(TRAINS_BY_ITSELF, start, 2, "--seed 3"))
    assert "ran out of memory at 64; started again with 2 x 32, effective batch 64 unchanged" in cell.text
    assert (
        "ran out of memory at 2 x 32; started again with 4 x 16, effective batch 64 unchanged; the loop's" in cell.text
    )
    assert "body runs 2 times per batch, and each time does what it counts, draws or averages by itself" in cell.text
    assert notebook.value("len(open(attempts).read())") == 2 * cell.text.count("started again with") + 2
    assert (
        notebook.value("float((torch.cat([p.detach().flatten() for p in net.parameters()]) - expected[0]).abs().max())")
        <= 1e-12
    )
    assert notebook.value("rate == expected[1]")
