"""An exported script trains what the cell trained: real ranks of a notebook, and real ranks of `nbaccel launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from environments import REPOSITORY
from features.cluster.machines import HOSTS, NoMachines, two_machines
from fixtures.kernels import Kernels
from fixtures.shells import Notebook
from kernel.harness import accelerate

ABOVE = [
    "import os\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)",
    "lr = 0.1\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))\n"
    "    def forward(self, x):\n        return self.layers(x) * scale\n"
    "scale = 2.0 * int(os.environ.get('WORLD_SIZE', 1))",
    "x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))\ndata = torch.utils.data.TensorDataset(x, y)\n"
    "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)\nprint(len(x))",
    "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=lr)",
]
ACCELERATOR = "from nbaccel import Accelerator\naccelerator = Accelerator(cpu=True)\nprint(accelerator.num_processes)"
RAW = """%%accelerate -n {n} --cpu --start fork
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), "saved.pt")
"""
PREPARED = """%%accelerate -n {n} --cpu --start fork --seed 5
prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for a, b in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(nn.functional.cross_entropy(prepared(a), b))
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(model.state_dict(), "saved.pt")
"""


COMMAND = [sys.executable, "-c", "import sys; from nbaccel.cli import main; sys.exit(main())", "launch"]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def launch(folder: Path, *words: str) -> str:
    command = [*COMMAND, *words]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def exported(notebook: Notebook, cell: str, n: int, folder: Path) -> Path:
    """A script whose cell has run in the notebook, and saved there below `folder`; the script saves where it runs."""
    here = folder / "notebook"
    here.mkdir()
    *above, trained = cell.split("---\n")
    trained = trained.format(n=n).replace('"saved.pt"', 'path + "/saved.pt"')
    for each in (*ABOVE, *above, f"path = {str(here)!r}", trained):
        assert notebook.run(each).error is None
    path = folder / "train.py"
    ran = notebook.run(f"%accelerate export {path}")
    assert ran.error is None, ran.error
    path.write_text(path.read_text().replace(str(here), "."))
    return path


def assert_equal(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    """Equal but for rounding: another process may round otherwise, as where a processor is imitated in this one."""
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert torch.allclose(value, ours[name], rtol=0, atol=1e-6), (name, (value - ours[name]).abs().max())


def saved(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "saved.pt")
    return state


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:saved.pt is one file")
@pytest.mark.parametrize(
    ("cell", "n", "words"),
    [
        pytest.param(RAW.replace("--cpu", "--cpu -a 2"), 2, ["-a", "2"], id="raw"),
        pytest.param(f"{ACCELERATOR}\n---\n{PREPARED}", 2, [], id="prepared", marks=pytest.mark.full),
        pytest.param(RAW, 1, [], id="one rank", marks=pytest.mark.full),
    ],
)
def test_a_script_ends_with_the_parameters_of_the_cell(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, n: int, words: list[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    exported(notebook, cell, n, tmp_path)
    said = launch(tmp_path, "-n", str(n), "--cpu", *words, "train.py")
    assert "no effect" not in said
    assert_equal(saved(tmp_path / "notebook"), saved(tmp_path))


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_check_finds_the_losses_of_the_notebook_or_says_where_they_differ(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for each in ABOVE:
        assert notebook.run(each).error is None
    cell = RAW.format(n=1).partition("torch.save")[0]
    assert notebook.run(cell).error is None
    said = notebook.run("%accelerate export train.py --check")
    assert said.error is None, said.error
    assert "--check: equal: the losses of the first 3 steps are the notebook's (" in said.stdout
    for each in ABOVE:
        assert notebook.run(each).error is None
    notebook.names["x"].mul_(2)  # by no cell
    assert notebook.run(cell).error is None
    said = notebook.run("%accelerate export train.py --check")
    assert "--check: NOT equal: the loss of step 0 was " in said.stdout


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:saved.pt is one file")
def test_a_script_trains_on_two_machines_what_the_cell_trained_in_two_ranks(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = exported(notebook, RAW, 2, tmp_path)
    try:
        with two_machines(tmp_path) as machines:
            nodes = []
            for number, host in enumerate(HOSTS):
                folder = tmp_path / host
                folder.mkdir()
                words = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", next(iter(HOSTS.values()))]
                command = [
                    "ip",
                    "netns",
                    "exec",
                    machines.spaces[host],
                    *COMMAND,
                    *words,
                    "-n",
                    "1",
                    "--cpu",
                    str(path),
                ]
                nodes.append(subprocess.Popen(command, cwd=folder, env=environ(), stderr=subprocess.PIPE, text=True))
            try:
                ends = [node.communicate(timeout=150) for node in nodes]
            finally:
                for node in nodes:
                    node.kill()
                    node.wait()
    except NoMachines as why:
        pytest.skip(f"no two machines can be made here: {why}")
    for host, node, (_, err) in zip(HOSTS, nodes, ends, strict=True):
        assert node.returncode == 0, err
        assert_equal(saved(tmp_path / "notebook"), saved(tmp_path / host))


def test_a_real_kernel_has_the_history_that_an_export_reads(new_kernel: Kernels, tmp_path: Path) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    kernel.do("%matplotlib inline\nimport torch\nw = torch.ones(2, requires_grad=True)")
    kernel.run("1 / 0")
    kernel.do(accelerate("w.sum().backward()\ndone = True", n=1, flags="--cpu"))
    path = tmp_path / "train.py"
    assert f"{path}: cell [4] and what it needs of cells 2: " in kernel.do(f"%accelerate export {path}").stdout
    assert "# %matplotlib inline\nimport torch\nw = torch.ones(2, requires_grad=True)" in path.read_text()
    kernel.run("w = w.detach()\nraise ValueError")
    kernel.do(accelerate("print(w)", n=1, flags="--cpu"))
    said = kernel.run(f"%accelerate export {path}").stderr
    assert "UsageError: cell [6] ended with an error, so how far it came is not known" in said
