"""A forked rank imports no module of nbaccel: what every rank of a run needs is loaded in the kernel, once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KERNEL = """
import json, os, sys
from IPython.core.interactiveshell import InteractiveShell
from nbaccel.launching.processes import start

run_rank, end, noted = start.run_rank, os._exit, os.path.abspath("noted")

def noting(*args, **kwargs):
    before = set(sys.modules)

    def leave(code):
        gained = sorted(each for each in set(sys.modules) - before if each.startswith("nbaccel"))
        with open(noted, "a") as file:
            file.write(json.dumps(gained) + "\\n")
        end(code)

    os._exit = leave
    run_rank(*args, **kwargs)

start.run_rank = noting
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
for name, (flags, cell) in json.loads(sys.argv[1]).items():
    open(noted, "w").close()
    flags = flags if "-n" in flags else f"-n 2 {flags}"
    shell.run_cell(f"%%accelerate {flags} --start fork --cpu\\n{cell}")
    with open(noted) as file:
        print(json.dumps(["of ranks", name, *map(json.loads, file)]))
"""
"""A notebook's process, which runs cells, and prints which modules each of their ranks has imported."""

MAKE = """
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
"""
PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
STEPS = """
for epoch in range({epochs}):
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        {backward}
        optimizer.step()
"""
RAW = MAKE + STEPS.format(epochs=1, backward="loss.backward()")
PREPARED = MAKE + PREPARE + STEPS.format(epochs=1, backward="accelerator.backward(loss)")
ENDLESS = MAKE + PREPARE + STEPS.format(epochs=10**9, backward="accelerator.backward(loss)")
SAVING = 'from nbaccel import Accelerator\naccelerator = Accelerator({}checkpoint_every=10**9, checkpoint_dir="{}")\n'
HALVED = "if len(x) > 2: raise torch.OutOfMemoryError('CUDA out of memory.')"
TOO_LARGE = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")'

SAVES = """
accelerator.log({"loss": loss})
accelerator.save_state("saved")
accelerator.save_model(model, "weights")
accelerator.load_state("saved")
accelerator.free_memory()
"""

STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(32, 1, 4))

loader = DataLoader(Stream(), 4)
"""

CELLS = {
    "nothing": ("", "pass"),
    "an unmodified loop": ("", RAW),
    "an unmodified loop in one rank": ("-n 1", RAW),
    "an unmodified loop that flags change": ("-a 2 -p bf16", RAW),
    "an unmodified loop of each rank, changed by a flag": ("--independent -a 2", RAW),
    "a prepared training": ("", PREPARED),
    "what is saved, logged, loaded and freed": ("", PREPARED + SAVES),
    "batches of a stream": ("", PREPARED.replace(PREPARE, STREAM + PREPARE).replace("(x,)", "x")),
    "sharded models": ("--strategy fsdp", PREPARED),
    "an error": ("", f"{PREPARED}raise ValueError"),
    "out of memory": ("", RAW.replace("optimizer.step()", TOO_LARGE)),
    "a prepared training that goes on in parts": (
        "",
        PREPARED.replace("optimizer.zero", f"{HALVED}\n        optimizer.zero"),
    ),
    "a time limit": ("", SAVING.format("time_limit=0.2, ", "limited") + ENDLESS),
    "a stop": (
        "",
        SAVING.format("", "stopped")
        + ENDLESS.replace(
            "optimizer.zero_grad()",
            "if (epoch, step) == (0, 1) and accelerator.is_main_process: os.kill(os.getppid(), signal.SIGINT)",
        ),
    ),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The modules of nbaccel that each rank of each cell has imported."""
    folder = tmp_path_factory.mktemp("kernel")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, json.dumps(CELLS)], cwd=folder, capture_output=True, text=True, check=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["of ranks"')]
    assert all(Path(folder, each).exists() for each in ("limited", "stopped")), done.stdout + done.stderr
    return {name: ranks for _, name, *ranks in told}


@pytest.mark.parametrize("cell", CELLS)
def test_a_rank_imports_no_module_of_ours(imported: dict[str, list[list[str]]], cell: str) -> None:
    assert len(imported[cell]) >= (1 if "-n 1" in CELLS[cell][0] else 2)
    assert not any(imported[cell])


def test_a_run_started_again_has_ranks_of_two_attempts(imported: dict[str, list[list[str]]]) -> None:
    assert len(imported["a prepared training that goes on in parts"]) == 4
