"""A folder of features that is not there: the core works, and whoever asks for the feature is told in a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core import FOLDERS, copy_without
from environments import REPOSITORY
from nbaccel import features

CORE = """
import torch, nbaccel
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
accelerator = nbaccel.Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(4, 2)).mean())
optimizer.step()
accelerator.save_state("checkpoint")
accelerator.load_state("checkpoint")
print(nbaccel.launch(int, 2, cpu=True).values)
ran = shell.run_cell(CELL)
ran.raise_error()
print(shell.user_ns["steps"])
"""

CELL = """%%accelerate -n 2 --cpu --out steps
import torch
from nbaccel.testing import MemLimit
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
data = torch.utils.data.TensorDataset(torch.ones(128, 8))
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), 0.1), torch.utils.data.DataLoader(data, 64)
)
steps = 0
with MemLimit(40_000):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
"""
"""It runs out of memory and is started again with batches in parts."""

pytestmark = pytest.mark.timeout(300)

OF_FEATURES = {
    "browser/test_check_report.py",  # the fixtures of the folder start browsers
    "browser/test_panel.py",
    "browser/test_runs_table.py",
    "gpu/programs/cost.py",  # what the exchange of `forward_backward` costs
    "test_stored_notebooks.py",  # pictures in the notebooks of the repository
    "largest_model.py",  # a program that makes a table of docs/memory.md
}
"""Files outside of tests/features that are about one."""

SHOWN = [
    ("nbaccel", "map"),
    ("nbaccel", "sweep"),
    ("nbaccel", "init_empty_weights"),
    ("nbaccel.answers", "Failed"),
    ("nbaccel.utils.deepspeed", "DeepSpeedPlugin"),
    ("nbaccel.big_modeling", "dispatch_model"),
    ("nbaccel.hooks", "CpuOffload"),
    ("nbaccel.utils", "infer_auto_device_map"),
    ("nbaccel.utils", "gather"),
    ("nbaccel.utils", "get_free_port"),
    ("nbaccel.utils.operations", "find_device"),
    ("nbaccel.data_loader", "prepare_data_loader"),
    ("nbaccel.logging", "get_logger"),
    ("nbaccel", "notebook_launcher"),
    ("nbaccel.utils.bnb", "load_and_quantize_model"),
    ("nbaccel.utils.modeling", "dtype_byte_size"),
    ("nbaccel.utils.offload", "offload_weight"),
]
"""Names of features, and public modules that show them."""

ASKS = """
import importlib, nbaccel, torch
from nbaccel.errors import FeatureMissing
from nbaccel.features import _TABLE, feature
for name, reference in _TABLE.items():
    try:
        feature(name)
    except FeatureMissing as error:
        print(error)
print("names:")
for module, name in {names}:
    try:
        getattr(importlib.import_module(module), name)
    except FeatureMissing as error:
        print(error)
assert nbaccel.utils.set_seed and nbaccel.utils.AutocastKwargs
for ask in (
    lambda: nbaccel.Accelerator(cpu=True).find_batch_size(lambda batch: batch, torch.ones(1)),
    lambda: nbaccel.Accelerator(cpu=True, log_with="csv"),
):
    try:
        ask()
    except FeatureMissing as error:
        print("in a program:", error)
"""


UNMODIFIED = """
import torch
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(torch.ones(64, 8), 8):
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()
trained = True
"""

RUNS_CELLS = f"""
import nbaccel
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
for flags in ("-n 2 --cpu", "-n 2 --cpu FLAG", "-n 1 --cpu FLAG"):
    shell.user_ns.pop("trained", None)
    ran = shell.run_cell(f"%%accelerate {{flags}} --out trained\\n" + {UNMODIFIED!r})
    print("ended:", flags, shell.user_ns.get("trained"), type(ran.error_in_exec).__name__)
    print("said:", *str(ran.error_in_exec).splitlines())
"""
"""The same loop as it is, and with a flag that changes it, in two ranks and in one."""


TRAINS = """{flags}
import torch
net = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
for step in range(5):
    loss = model(torch.ones(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({{"loss": loss}})
"""

IN_A_KERNEL = f"""
import nbclient, nbformat
sources = ["%load_ext nbaccel"]
sources += [{TRAINS!r}.format(flags="%%accelerate -n 2 --cpu" + more) for more in ("", " --plain", "")]
sources += ["import nbaccel", "nbaccel.launch(int, 2, cpu=True).values", "%accelerate last", "nbaccel.last_run"]
sources += ["nbaccel.last_run.figure()", "nbaccel.last_run.plot()"]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources])
nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
for number, cell in enumerate(notebook.cells):
    for output in cell.outputs:
        said = {{output.output_type: output.get("text") or output.get("evalue")}}
        for kind, text in output.get("data", said).items():
            for line in text.splitlines():
                print(number, kind, line)
"""
"""Cells in a kernel, a `launch`, and what asks for a picture of a run."""


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package that has no feature."""
    copy_without(tmp_path, FOLDERS)
    return tmp_path


def said(folder: Path, program: str) -> list[str]:
    """Return the lines that a program prints, with the package of `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "IPYTHONDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["all", *(pytest.param(name, marks=pytest.mark.full) for name in FOLDERS)])
def test_the_core_trains_saves_launches_and_starts_again_without_a_feature(tmp_path: Path, absent: str) -> None:
    copy_without(tmp_path, FOLDERS if absent == "all" else [absent])
    lines = said(tmp_path, f"CELL = {CELL!r}\n{CORE}")
    assert "[0, 0]" in lines
    assert any("1 step in the last of 2 attempts" in line for line in lines)
    assert lines[-1] == "1"


def test_tests_outside_of_features_import_none() -> None:
    named = re.compile(r"^ *(from|import) nbaccel\.features\.", re.MULTILINE)
    core = (path for path in (REPOSITORY / "tests").rglob("*.py") if "features" not in path.parts)
    found = {path.relative_to(REPOSITORY / "tests").as_posix() for path in core if named.search(path.read_text())}
    assert found == OF_FEATURES


@pytest.mark.slow
def test_whoever_asks_for_a_missing_feature_is_told_which_it_is(without: Path) -> None:
    lines = said(without, ASKS.replace("{names}", repr(SHOWN)))
    asked = "belongs to nbaccel.features.check, which this installation of nbaccel lacks: install nbaccel as a whole"
    assert any(line.startswith(f"--check {asked}") for line in lines)
    *table, _ = lines[: lines.index("names:") + 1]
    *names, in_a_program, of_a_tracker = lines[len(table) + 1 :]
    assert len(table) == len(features._TABLE)
    assert [line.partition(" belongs to nbaccel.features.")[0].rpartition(".")[2] for line in names] == [
        "answers" if module == "nbaccel.answers" else name for module, name in SHOWN
    ]
    assert in_a_program.startswith("in a program: Accelerator.find_batch_size belongs to nbaccel.features.batch_size, ")
    assert of_a_tracker.startswith("in a program: log_with belongs to nbaccel.features.trackers, ")


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-p bf16", pytest.param("-a 2", marks=pytest.mark.full)])
def test_a_flag_that_changes_an_unmodified_loop_is_refused_in_a_sentence(tmp_path: Path, flag: str) -> None:
    copy_without(tmp_path, ["loop_flags"])
    lines = said(tmp_path, RUNS_CELLS.replace("FLAG", flag))
    ended = [line.removeprefix("ended: ") for line in lines if line.startswith("ended: ")]
    assert ended == [
        "-n 2 --cpu True NoneType",
        f"-n 2 --cpu {flag} None FeatureMissing",
        f"-n 1 --cpu {flag} None FeatureMissing",
    ]
    refused = "-p or -a above an unmodified loop belongs to nbaccel.features.loop_flags, which this installation"
    told = [line for line in lines if line.startswith("said: ")][1:]
    assert [refused in line for line in told] == [True, True], told


@pytest.mark.slow
def test_a_notebook_without_the_panel_shows_lines_and_says_so_once(tmp_path: Path) -> None:
    copy_without(tmp_path, ["panel"])
    lines = said(tmp_path, IN_A_KERNEL)
    lacks = "belongs to nbaccel.features.panel, which this installation of nbaccel lacks: install nbaccel as a whole, "
    told = [line for line in lines if lacks in line]
    assert [line.partition(f" {lacks}")[0] for line in told] == [
        "1 stream the panel of a run",
        "8 error Run.figure",
        "9 error Run.plot",
    ]
    ends = [line.partition(" in ")[0] for line in lines if " done in " in line]
    assert ends == [
        "1 stream done",
        "2 stream done",
        "3 stream done",
        "6 stream int(): done",
        "7 text/plain <Run: int(), done",
    ]
    assert {line.split()[1] for line in lines} == {"stream", "text/plain", "error"}


def test_an_import_that_fails_inside_of_a_feature_is_that_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        features.module_of("--check", "no_such_module")


MEETS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
CELL = '''%%accelerate -n 2 --cpu
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import LIBRARY
print("told:", told[0].message)
'''
for library in ("fastprogress", "lightning_utilities"):
    ran = shell.run_cell(CELL.replace("LIBRARY", library))
    print("ended:", library, type(ran.error_in_exec).__name__)
"""


@pytest.mark.slow
def test_a_library_that_is_not_met_is_refused_where_each_rank_would_train_alone(tmp_path: Path) -> None:
    copy_without(tmp_path, ["other_libraries"])
    for library in ("fastprogress", "lightning_utilities"):
        (tmp_path / f"{library}.py").touch()
    lines = said(tmp_path, MEETS)
    assert [line for line in lines if line.startswith("ended: ")] == [
        "ended: fastprogress NoneType",
        "ended: lightning_utilities FeatureMissing",
    ]
    warned = "told: one program with fastprogress belongs to nbaccel.features.other_libraries, which this installation"
    assert any(warned in line for line in lines)
