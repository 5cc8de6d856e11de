"""What a notebook's user does without a toolkit for notebooks: ``make bench ROWS=alternatives``. Seconds for one cell.

The same small training, in two processes, from a real kernel: a script that a cell writes and ``torchrun`` runs,
Accelerate's ``notebook_launcher``, and a cell with ``%%accelerate``. The clock runs from sending the cell until the
notebook holds the trained model, which the first two have to bring back by a file. Imports are done where they can be:
the kernel has trained before, a new interpreter has not. `nn.DataParallel` needs two GPUs and is not here.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.findings import Finding, options_of, tell
from benchmarks.harness import installed
from benchmarks.kernels import new_kernel

_SETUP = """
import torch, torch._dynamo, torch.nn.parallel, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(4096, 20); y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
"""

_LOOP = """
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
"""

# Where two ranks win on two cores: each sample is work in Python, which one process does on one core. As in the README.
PAGES = """
import re, torch, torch.nn.functional as F
from pydoc_data.topics import topics
from torch.utils.data import DataLoader, Dataset

class Words(Dataset):
    pages = [text[at:at + 2000] for text in topics.values() for at in range(0, len(text), 2000)]
    def __len__(self): return len(self.pages)
    def __getitem__(self, index):
        counts = torch.zeros(5000)
        for word in re.findall(r"\\w+", self.pages[index]):
            counts[sum(word.encode()) * len(word) % 5000] += 1
        return counts, int("class" in self.pages[index])

model = torch.nn.Linear(5000, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Words(), batch_size=32, shuffle=True)
"""

_PAGES_SETUP = f"""{PAGES}
x, y = map(torch.stack, zip(*[(counts, torch.tensor(label)) for counts, label in Words()]))
"""

PAGES_LOOP = """
for epoch in range(20):
    for counts, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(counts), labels)
        loss.backward()
        optimizer.step()
"""

_PREPARED = """
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(loader.dataset, 16, shuffle=True))
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
"""

_TORCHRUN = """
code = '''
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(4096, 20); y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
parallel = torch.nn.parallel.DistributedDataParallel(model)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "trained.pt")
dist.destroy_process_group()
'''
with open("train.py", "w") as file:
    file.write(code)
import sys
!OMP_NUM_THREADS=1 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py
model.load_state_dict(torch.load("trained.pt"))
"""

_ACCELERATE = """
def train():
    accelerator = Accelerator(cpu=True)
    prepared, steps, batches = accelerator.prepare(model, optimizer, DataLoader(loader.dataset, 16, shuffle=True))
    for epoch in range(3):
        for inputs, targets in batches:
            steps.zero_grad()
            loss = F.cross_entropy(prepared(inputs), targets)
            accelerator.backward(loss)
            steps.step()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(prepared).state_dict(), "trained.pt")

notebook_launcher(train, num_processes=2)
model.load_state_dict(torch.load("trained.pt"))
"""

_ACCURACY = "(model(x).argmax(1) == y).float().mean().item()"


@dataclass(frozen=True, slots=True)
class Way:
    """How somebody trains from a cell. `setup`: what goes before the first one."""

    setup: str
    cell: str


WAYS: Mapping[str, Way] = {
    "the loop in the kernel, one process": Way("", _LOOP),
    "%%writefile and torchrun": Way("", _TORCHRUN),
    "Accelerate's notebook_launcher": Way("from accelerate import Accelerator, notebook_launcher", _ACCELERATE),
    "nbaccel's %%accelerate, prepared": Way("%load_ext nbaccel", f"%%accelerate --cpu -n 2{_PREPARED}"),
    "nbaccel's %%accelerate, one line": Way("%load_ext nbaccel", f"%%accelerate --cpu -n 2{_LOOP}"),
    "nbaccel's %%accelerate -n 1, one line": Way("%load_ext nbaccel", f"%%accelerate --cpu -n 1{_LOOP}"),
    "samples made in Python, the loop in the kernel": Way(_PAGES_SETUP, PAGES_LOOP),
    "samples made in Python, %%accelerate -n 2": Way(
        f"%load_ext nbaccel\n{_PAGES_SETUP}", f"%%accelerate --cpu -n 2{PAGES_LOOP}"
    ),
}

_NEEDS = {"Accelerate's notebook_launcher": "accelerate"}


class NotTrained(Exception):
    """The notebook's model does not know more than by chance after the cell."""


def measure(ways: Mapping[str, Way], turns: int) -> dict[str, list[float]]:
    """What each way takes in each turn, in kernels of their own that wait for each other.

    A first turn, which loads modules, is left out.

    Raises:
        NotTrained: what a notebook holds after its cells is no trained model.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        kernels = {name: stack.enter_context(new_kernel()) for name in ways}
        for name, kernel in kernels.items():
            kernel.do(f"{_SETUP}\n{ways[name].setup}")
            kernel.do(ways[name].cell, timeout_s=180)
        for _ in range(turns):
            for name, kernel in kernels.items():
                taken[name].append(kernel.do(ways[name].cell, timeout_s=180).seconds)
        for name, kernel in kernels.items():
            if (accuracy := kernel.value(_ACCURACY)) < 0.95:
                raise NotTrained(f"{name}: {accuracy:.2f} of the samples are right")
    return taken


def findings(turns: int) -> Iterator[Finding]:
    what = f"from sending the cell until the notebook holds the trained model, median of {turns}"
    for name, taken in measure(installed(WAYS, _NEEDS), turns).items():
        yield Finding(what, name, statistics.median(taken), "s")


def main() -> int:
    options = options_of(__doc__, turns=5)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the kernels too, as for every row: two threads that spin wait for others
    return tell(findings(options.turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
