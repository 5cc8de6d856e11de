"""The first hour on a hosted notebook: what people do there ends in right numbers or in a sentence.

Each test is a notebook. It runs on one machine here, and on all of them in `make test-all`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hosted.machines import COLABS, KAGGLE, KAGGLE_BATCH, MACHINES, Machine
from kernel.foreign_programs import LIGHTNING, SHARED, TRANSFORMERS

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


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test` installs it")


@pytest.mark.full
@on(KAGGLE_BATCH)
def test_nothing_asks_the_net(machine: Machine, tmp_path: Path) -> None:
    ran = machine.run(
        [
            f"{MAKES}import ipywidgets\nprint('ipywidgets', ipywidgets.__version__)",
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
    assert f"ipywidgets {'7.7.1' if machine is COLABS else '8.1.5'}\n" in ran.text, "the service's own"
    assert ran.asked == ""


@pytest.mark.full
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
import os, torch, nbaccel.launching.earlier_models as _models, nbaccel.launching.plan as _plan
from collections import Counter
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.launching.preflight import ProcessState
ProcessState.now = staticmethod(lambda: ProcessState(True, True))
_on_device = {}
_models.sizes_on_devices = _plan.sizes_on_devices = lambda names: {
    device: Counter({name: nbytes}) for name in names for device, nbytes in _on_device.get(name, {}).items()
}
_gpus = tuple(Gpu(i, f"GPU-{i}", "Tesla T4", 15 * 10**9, 9 * 10**9, (7, 5)) for i in range(2))
_survey = Survey(_gpus, 4, _hardware.MemoryInfo(30 * 10**9, 28 * 10**9))
get_ipython().find_cell_magic("accelerate").__self__.session.survey = lambda: _survey
"""
"""A notebook that has used CUDA on a machine with two T4, where names in `_on_device` lie."""


@pytest.mark.full
@on(KAGGLE)
@pytest.mark.parametrize(
    ("lies", "sentence"),
    [
        ("_on_device['model'] = {'cuda:0': 8 * 10**9}", "rank 0's device, GPU 0 Tesla T4, has 6.0 GB of 15.0 GB left"),
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
    assert re.search(r"[Mm]ove line 10 of Cell In\[2\](, `|.*\n.*\n  )model = torch.nn.Sequential\(", error)


@pytest.mark.full
@on(COLABS)
def test_a_library_that_patches_another_at_its_import_does_so_in_ranks(machine: Machine, tmp_path: Path) -> None:
    """Also where the cell reads none of its names, if it is torch; what a cell has patched is said."""
    (tmp_path / "unpatched.py").write_text("import fast_flag\nscale = 3.0 if fast_flag.is_on else 1.0\n")
    (tmp_path / "fast_flag.py").write_text("is_on = False\n")
    (tmp_path / "fastlib.py").write_text(
        "import os, torch, fast_flag\nfast_flag.is_on = True\n"
        "if 'RANK' not in os.environ:\n    torch.cuda.is_initialized = lambda: True\n"
        "class Model(torch.nn.Linear): pass\n"
        "def forward(self, x): return x + 41\n"
        "torch.nn.Identity.forward = forward\n"
    )
    ran = machine.run(
        [
            "import sys\nsys.path.insert(0, '.')\nimport fastlib, unpatched\n%load_ext nbaccel",
            "a_scale = unpatched\nmodel = fastlib.Model(2, 1)",
            "%%accelerate --cpu -n 2\nprint('scale', a_scale.scale, type(model).__name__)",
            "%%accelerate --cpu -n 2\nimport torch\nprint('fast', torch.nn.Identity()(1))",
            "fastlib.torch.nn.Tanh.forward = lambda self, x: x",
            "%%accelerate --cpu -n 2\nimport torch\nprint('tanh', torch.nn.Tanh()(torch.zeros(1)).item())",
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert "zygote, not fork: CUDA is initialised in the notebook" in ran.text
    assert "scale 3.0 Model" in ran.text
    assert "fast 42" in ran.text
    assert "tanh 0.0" in ran.text
    assert ran.text.count("torch.nn.modules.activation.Tanh.forward: changed in the notebook by a cell, and ") == 1
    assert ran.text.count("changed in the notebook") == 1


@pytest.mark.full
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


@pytest.mark.full
@on(COLABS)
def test_a_second_try_hears_what_the_notebook_holds(machine: Machine, tmp_path: Path) -> None:
    holds = """
from nbaccel.base.hardware import Gpu, Survey
import nbaccel.launching.kernel_holdings as _holdings
import nbaccel.notebook.session as _session
KernelHolding = _holdings.KernelHolding
_holdings.held_here = lambda names: [KernelHolding("cuda:0", 12 * 10**9, 15 * 10**9, (("model", 8 * 10**9),))]
_gpu = Gpu(0, "GPU-0", "Tesla T4", 15 * 10**9, 13 * 10**9, (7, 5))
_session.Survey.take = staticmethod(lambda *a, **k: Survey((_gpu,), 4, _hardware.MemoryInfo(30 * 10**9, 28 * 10**9)))
get_ipython().find_cell_magic("accelerate").__self__.session.survey = _session.Survey.take
"""
    ran = machine.run(
        [
            MAKES,
            "import torch\nraise torch.OutOfMemoryError('CUDA out of memory')",
            holds,
            "%%accelerate\nprint('rank', accelerator.process_index)",
        ],
        tmp_path,
        goes_on=True,
    )
    assert ran.errors[0] == "OutOfMemoryError: CUDA out of memory"
    line = "the notebook itself holds 12.0 of 15.0 GB on cuda:0 (model 8.0 GB), and 2.0 GB are free there for rank 0: "
    assert f"{line}nbaccel.free_memory(model) in a cell before this one gives it back" in ran.text


@pytest.mark.full
@on(KAGGLE_BATCH)
def test_trainers_of_cells_above_train_together_and_right(machine: Machine, tmp_path: Path) -> None:
    """Of transformers, and of a library that builds on it as TRL's SFTTrainer does."""
    needs("transformers")
    ran = machine.run(
        [
            f"%load_ext nbaccel\n{SHARED}{TRANSFORMERS}",
            "trainer, tuner = make_trainer(), make_subclass()",
            "%%accelerate --cpu -n 2 --out seen,weights\n"
            "seen = [train(trainer), train(tuner)]\n"
            "weights = [parameter.detach() for each in (trainer, tuner) for parameter in each.model.parameters()]",
            "alone = Trainer(model=Net(), args=settings(), train_dataset=Numbers())\n"
            "alone.args.per_device_train_batch_size = alone._train_batch_size = 8\n"
            "_ = alone.train()\n"
            "plain = list(alone.model.parameters()) * 2\n"
            "error = max(float((ours - theirs).abs().max()) for ours, theirs in zip(weights, plain))\n"
            "print(seen, 'right:', error < 1e-6, len(weights))",
        ],
        tmp_path,
    )
    assert ran.errors == []
    assert "[[2, 8, True, True], [2, 8, True, True]] right: True 4" in ran.text
    assert ran.asked == ""


@pytest.mark.full
@on(COLABS)
def test_lightnings_trainer_uses_the_ranks_of_its_cell_and_one_of_a_cell_above_is_refused(
    machine: Machine, tmp_path: Path
) -> None:
    needs("lightning")
    ran = machine.run(
        [
            f"%load_ext nbaccel\n{SHARED}{LIGHTNING}",
            "%%accelerate --cpu -n 2 --out seen\nseen = use_lightning(make_lightning())",
            "print('seen', seen)\nmade = make_lightning()",
            "%%accelerate --cpu -n 2\nuse_lightning(made)",
        ],
        tmp_path,
    )
    assert "seen [2, 8, True, True]" in ran.text
    (error,) = ran.errors
    assert error.startswith("NotInRanks")
    assert "Move the line `made = Trainer(...)` into this cell" in error
    assert ran.asked == ""


PRETENDED_CUDA = """
import torch
torch.cuda.is_initialized = lambda: True

def cuda(self, *args, **kwargs):
    return self

def on_the_host(method):
    def to(self, *args, **kwargs):
        return self if "cuda" in str(args[0]) else method(self, *args, **kwargs)
    return to

for kind in (torch.Tensor, torch.nn.Module):
    kind.cuda, kind.to = cuda, on_the_host(kind.to)
"""
"""A library by which tensors that are moved to a GPU stay where they are, in the notebook and in ranks."""

TIMM_LIKE = """
import copy, pretended_cuda
model = model.cuda()
ema = copy.deepcopy(model).to('cuda:0')
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)

shuffled = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

def train_one_epoch(model, loader, optimizer, backward):
    model.train()
    for samples, targets in loader:
        samples, targets = samples.cuda(non_blocking=True), targets.to('cuda:0')
        loss = F.cross_entropy(model(samples), targets)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
"""

PREPARES = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"


@pytest.mark.full
@on(KAGGLE)
def test_a_raw_loop_is_refused_if_that_is_asked_for_and_is_right_with_the_line_that_it_says(
    machine: Machine, tmp_path: Path
) -> None:
    """As timm's script has it, with `.cuda()` and 'cuda:0' in cells above and in the loop."""
    (tmp_path / "pretended_cuda.py").write_text(PRETENDED_CUDA)
    train = "for epoch in range(2):\n    train_one_epoch(model, {}, optimizer, {})\n    scheduler.step()"
    ran = machine.run(
        [
            MAKES,
            TIMM_LIKE,
            f"%%accelerate --cpu --strict -n 2 --out model\n{train.format('shuffled', 'torch.Tensor.backward')}",
            f"%%accelerate --cpu -n 2 --out model\n{PREPARES}{train.format('loader', 'accelerator.backward')}",
            IS_RIGHT,
        ],
        tmp_path,
        goes_on=True,
    )
    (error,) = ran.errors
    assert error.startswith("NotPrepared")
    assert PREPARES.strip() in error
    assert ran.text.count("zygote, not fork: CUDA is initialised in the notebook") == 2
    assert "right: True" in ran.text
    assert "has been overridden" not in ran.text, "torch says it of the scheduler of a cell above"


@pytest.mark.full
@on(KAGGLE)
def test_trackers_write_one_run_and_a_login_says_the_variable_to_set(machine: Machine, tmp_path: Path) -> None:
    needs("wandb", "tensorboard")
    tracks = """
import os, wandb
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("board")
writer.add_scalar("loss", 1.0, 0)
writer.close()
run = wandb.init(project="digits")
run.log({"loss": 1.0})
run.finish()
"""
    keyless = {"WANDB_CONFIG_DIR": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path)}
    timed = "%%accelerate --cpu -n 2\nimport time\nasked = time.monotonic()\ntry:\n    {}\n"
    timed += "finally:\n    print('within 5 s:', time.monotonic() - asked < 5)"
    ran = machine.run(
        [
            "%load_ext nbaccel\nimport wandb",
            timed.format("wandb.init(project='digits') if accelerator.is_main_process else None"),
            timed.format("input('key')"),
            "import os\nos.environ['WANDB_MODE'] = 'offline'",
            f"%%accelerate --cpu -n 2\n{tracks}",
        ],
        tmp_path,
        goes_on=True,
        **keyless,
    )
    no_key, no_input = ran.errors
    assert no_key.startswith(("NoInput: rank 0", "ConnectionError: rank 0"))
    assert 'os.environ["WANDB_MODE"] = "offline"' in no_key
    assert no_input.startswith("NoInput: rank")
    assert 'os.environ["WANDB_API_KEY"]' in no_input
    assert ran.text.count("within 5 s: True") >= 2
    assert "within 5 s: False" not in ran.text
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    assert len(list(tmp_path.glob("board/events.out.tfevents*"))) == 1
