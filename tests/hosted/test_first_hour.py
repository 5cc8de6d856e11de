"""The first hour on a hosted notebook: what people do there ends in right numbers or in a sentence.

Each test is a notebook. It runs on one machine here, and on all of them in `make test-all`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hosted.machines import COLABS, KAGGLE, KAGGLE_BATCH, MACHINES, Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def on(first: Machine) -> Callable[[Any], Any]:
    """Run the test on `first`, and on the others where everything is run."""
    others = [pytest.param(each, marks=pytest.mark.full) for each in MACHINES if each is not first]
    return pytest.mark.parametrize("machine", [first, *others], ids=lambda machine: machine.name)


MAKES = """
%load_ext nbaccel
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 8, dtype=torch.float64)
y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=16)
"""

TRAINS = """
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

IS_RIGHT = """
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
torch.manual_seed(0)
torch.randn(256, 8, dtype=torch.float64)
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
steps = torch.optim.AdamW(plain.parameters(), lr=0.01)
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=32):
        steps.zero_grad()
        F.cross_entropy(plain(a), b).backward()
        steps.step()
error = max(float((ours - theirs).abs().max()) for ours, theirs in zip(model.parameters(), plain.parameters()))
print("right:", error < 1e-12)
"""
"""The same batches of both ranks, in one process."""


@on(KAGGLE_BATCH)
def test_nothing_asks_the_net(machine: Machine, tmp_path: Path) -> None:
    ran = machine.run(
        [
            MAKES,
            f"%%accelerate -n 2 --out model\n{TRAINS}",
            IS_RIGHT,
            f"%%accelerate -n 2 --start zygote --checkpoint-every 4 --out history\nhistory = []\n{TRAINS}",
            "%accelerate doctor",
            "import nbaccel\nnbaccel.launch(int, 2)\n%accelerate memory",
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert "right: True" in ran.text
    assert ran.asked == ""


@on(COLABS)
def test_more_loader_workers_than_cores_are_said_once_and_train_right(machine: Machine, tmp_path: Path) -> None:
    ran = machine.run(
        [
            MAKES.replace("batch_size=16", "batch_size=16, num_workers=4"),
            f"%%accelerate -n 2 --out model\n{TRAINS}",
            IS_RIGHT,
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert ran.text.count("loader has 4 workers in each of 2 ranks, 8 processes on 4 cores") == 1
    assert ran.text.count("Our suggested max number of worker") <= 1, "torch says it of the loader that was made above"
    assert "right: True" in ran.text


@on(KAGGLE)
def test_the_first_version_begins_anew_and_the_next_goes_on_from_its_output(machine: Machine, tmp_path: Path) -> None:
    attached = tmp_path / "input" / "last-version"
    cell = f"%%accelerate -n 2 --checkpoint-every 4 --resume {attached} --seed 1 --out model\n" + TRAINS.replace(
        "range(2)", "accelerator.epochs(2)"
    )
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    ran = machine.run([MAKES, cell, IS_RIGHT], first)
    assert ran.errors == []
    assert f"--resume {attached}: nothing is attached there, so this training begins anew" in ran.text
    assert "right: True" in ran.text
    shutil.copytree(first / "nbaccel_checkpoints", attached)
    second.mkdir()
    ran = machine.run([MAKES, cell, IS_RIGHT], second)
    assert ran.errors == []
    assert "continuing from" in ran.text
    assert "right: True" in ran.text


PRETENDS = """
import os, torch, nbaccel.notebook.shortages as _shortages
from collections import Counter
from nbaccel.hardware import Gpu, Survey
from nbaccel.launch.here import ProcessState
ProcessState.now = staticmethod(lambda: ProcessState(True, True))
_on_device = {}
_shortages.sizes_on_devices = lambda names: {
    device: Counter({name: nbytes}) for name in names for device, nbytes in _on_device.get(name, {}).items()
}
_gpus = tuple(Gpu(i, f"GPU-{i}", "Tesla T4", 15 * 10**9, 9 * 10**9, (7, 5)) for i in range(2))
_survey = Survey(_gpus, 4, _hardware.Memory(30 * 10**9, 28 * 10**9))
get_ipython().find_cell_magic("accelerate").__self__.session.survey = lambda: _survey
"""
"""A notebook that has used CUDA on a machine with two T4, where names in `_on_device` lie."""


@on(KAGGLE)
@pytest.mark.parametrize(
    ("lies", "sentence"),
    [
        ("_on_device['model'] = {'cuda:0': 8 * 10**9}", "rank 0's device, 0 Tesla T4, has 6.0 GB of 15.0 GB left"),
        (
            "_on_device['model'] = {'cuda:0': 10**9}\nmodel.is_loaded_in_4bit = True",
            "model was loaded quantised and lies on cuda:0 (1.0 GB): its weights cannot be sent to ranks",
        ),
    ],
    ids=["large", "quantised"],
)
def test_a_model_that_lies_on_a_device_is_weighed_before_ranks_start(
    machine: Machine, lies: str, sentence: str, tmp_path: Path
) -> None:
    ran = machine.run([MAKES, PRETENDS + lies, f"%%accelerate -n 2 --out model\n{TRAINS}"], tmp_path)
    (error,) = ran.errors
    assert error.startswith("LaunchRefused: model")
    assert sentence in error
    assert "move line 10 of Cell In[2], `model = torch.nn.Sequential(" in error


@on(COLABS)
def test_a_library_that_patches_another_at_its_import_does_so_in_ranks(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "unpatched.py").write_text("import fast_flag\nscale = 3.0 if fast_flag.is_on else 1.0\n")
    (tmp_path / "fast_flag.py").write_text("is_on = False\n")
    (tmp_path / "fastlib.py").write_text(
        "import os, torch, fast_flag\nfast_flag.is_on = True\n"
        "if 'RANK' not in os.environ:\n    torch.cuda.is_initialized = lambda: True\n"
        "class Model(torch.nn.Linear): pass\n"
    )
    ran = machine.run(
        [
            "import sys\nsys.path.insert(0, '.')\nimport fastlib, unpatched\n%load_ext nbaccel",
            "a_scale = unpatched\nmodel = fastlib.Model(2, 1)",
            "%%accelerate --cpu -n 2\nprint('scale', a_scale.scale, type(model).__name__)",
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert "zygote (CUDA is initialised in the notebook" in ran.text
    assert "[all] scale 3.0 Model" in ran.text


@on(KAGGLE_BATCH)
def test_data_parallel_from_a_cell_above_is_taken_off_and_trains_right(machine: Machine, tmp_path: Path) -> None:
    ran = machine.run(
        [
            MAKES,
            "model = torch.nn.DataParallel(model)",
            f"%%accelerate -n 2 --out model\n{TRAINS}",
            IS_RIGHT,
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert ran.text.count("the model was wrapped in nn.DataParallel") == 1
    assert "right: True" in ran.text


@on(COLABS)
def test_a_second_try_hears_what_the_notebook_holds(machine: Machine, tmp_path: Path) -> None:
    holds = """
from nbaccel.hardware import Gpu, Survey
from nbaccel.launch.holdings import Holding
import nbaccel.notebook.session as _session
_session.held_here = lambda names: [Holding("cuda:0", 12 * 10**9, 15 * 10**9, (("model", 8 * 10**9),))]
_gpu = Gpu(0, "GPU-0", "Tesla T4", 15 * 10**9, 13 * 10**9, (7, 5))
_session.Survey.take = staticmethod(lambda *a, **k: Survey((_gpu,), 4, _hardware.Memory(30 * 10**9, 28 * 10**9)))
get_ipython().find_cell_magic("accelerate").__self__.session.survey = _session.Survey.take
"""
    ran = machine.run([MAKES, "import torch\nraise torch.OutOfMemoryError('CUDA out of memory')"], tmp_path)
    assert ran.errors == ["OutOfMemoryError: CUDA out of memory"]
    ran = machine.run([MAKES, holds, "%%accelerate\nprint('rank', accelerator.process_index)"], tmp_path)
    line = "the notebook itself holds 12.0 of 15.0 GB on cuda:0 (model 8.0 GB), which rank 0 has to do without: "
    assert f"{line}nbaccel.free_memory(model) in a cell before this one gives it back" in ran.text
