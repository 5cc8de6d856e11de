"""`%%accelerate --check` in a real kernel: what a run would meet late is found early, and nothing is touched."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import NEWEST
from fixtures.kernels import Kernels
from kernel.harness import Cell, RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETUP = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
X = torch.randn(1000, 20)
Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(X[:101], Y[:101]), batch_size=32)
history = []

class Texts(Dataset):
    def __len__(self):
        return 500
    def __getitem__(self, index):
        return torch.ones(900 if index == 123 else 10 + index % 20, 20)

class Slow(Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        time.sleep(0.003)
        return X[index], Y[index]

class Noisy(Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        return X[index] + torch.randn(20), Y[index]

def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)

def step(x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def fit(epochs):
    for epoch in range(epochs):
        for x, y in loader:
            loss = step(x, y)
    return loss

def cycled(batches):
    while True:
        yield from batches
"""

PREPARED = """
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    temporary = tmp_path_factory.mktemp("temporary")
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("checks"), TMPDIR=str(temporary))
    try:
        kernel.do(
            "%load_ext nbaccel" + SETUP + "\nimport nbaccel; nbaccel.launch(int, 1)"
        )  # the reaper runs from here on
        yield kernel
    finally:
        kernel.close()


def report(kernel: RealKernel, body: str, flags: str = "--check") -> str:
    """Return the report on a cell, which is line 2 and what follows of it."""
    return text_of(kernel.run(accelerate(body, flags=flags)).succeeded())


def text_of(cell: Cell) -> str:
    (shown,) = cell.displays
    assert "text/html" in shown
    return str(shown["text/plain"])


# --- faults ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "a name in the last line": (
        """
        fit(50)
        print(histroy)
        """,
        "",
        "red: line 3, all 2 ranks: NameError: name 'histroy' is not defined. Did you mean: 'history'?",
    ),
    "an unprepared model": (
        """
        loader = accelerator.prepare(loader)
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
        """,
        "",
        "nbaccel.errors.NotPrepared: accelerator.backward in rank",
    ),
    "a folder that is a file": (  # what nobody may write, root may, as far as os.access says
        """
        fit(50)
        torch.save(model.state_dict(), f'{torch.__file__}/model.pt')
        print('saved')
        """,
        "",
        "RuntimeError: Parent directory ",
    ),
    "a model that is called around its wrapper": (
        """
        raw = model
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            loss = F.cross_entropy(raw(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        "",
        "are averaged by nobody, and other ones in rank",
    ),
    "a disk that is too small": (
        """
        for epoch in range(10**9):
            fit(1)
            torch.save(model.state_dict(), f'model_{epoch}.pt')
        """,
        "",
        "keep fewer of them, or name a folder on another disk",
    ),
    "out of memory at the longest batch": (
        """
        model, loader = accelerator.prepare(model, DataLoader(Texts(), 16, shuffle=True, collate_fn=padded))
        for rows in loader:
            if rows.shape[1] > 800:
                raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
            accelerator.backward(model(rows).mean())
        """,
        "",
        "out of memory at the longest batch",
    ),
    "a collective on the main process": (
        f"""{PREPARED}
if accelerator.is_main_process:
    print(accelerator.gather(loss))
accelerator.wait_for_everyone()
""",
        "",
        "a call under `if is_main_process` belongs outside of it",
    ),
    "a gather that counts twice": (
        f"""{PREPARED}
with torch.no_grad():
    for x, y in test_loader:
        found = accelerator.gather(model(x))
""",
        "",
        "accelerator.gather counts 27 samples twice",
    ),
    "a slow loader": (
        """
        for x, y in DataLoader(Slow(), 32):
            step(x, y)
        """,
        "",
        "of each batch: try another num_workers, or a cheaper data set",
    ),
    "a run that does not end in time": (
        """
        for epoch in range(10**7):
            fit(1)
        """,
        "--time-limit 10min",
        "and --time-limit ends it after 10 min: fewer epochs",
    ),
    "a result that depends on the rank": (
        f"""{PREPARED}
total = 0
with torch.no_grad():
    for x, y in test_loader:
        total += F.cross_entropy(model(x), y).item()
test_loss = total / len(test_loader)
""",
        "--out test_loss",
        "red: test_loss depends on the rank (",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(kernel: RealKernel, fault: str) -> None:
    body, flags, sentence = FAULTS[fault]
    said = report(kernel, body, f"--check {flags}")
    assert sentence in said, said
    level = "yellow: " if fault == "a slow loader" else "red: "
    (line,) = [line for line in said.splitlines() if sentence in line] or [""]
    assert level in said
    assert line.startswith((level, "  ")), said
    if level == "yellow: ":
        assert "red: " not in said


def test_smaller_batches_are_tried_where_memory_runs_out(kernel: RealKernel) -> None:
    said = report(
        kernel,
        """
        loader = DataLoader(Texts(), 16, shuffle=True, collate_fn=padded)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for rows in loader:
            if rows.shape[1] > 800 and rows.shape[0] > 8:
                raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
            accelerator.backward(model(rows).mean())
            optimizer.step()
        """,
    )
    assert "ran out of memory at 16 per rank; started again with 2 x 8, effective batch 32 unchanged" in said, said
    assert "ok: the cell comes to its end" in said
    assert "red: " not in said


def test_an_error_in_a_function_of_another_cell_has_the_line_of_both(kernel: RealKernel) -> None:
    number = kernel.do("def broken():\n    return 1 / 0").number
    said = report(kernel, "fit(1)\nbroken()")
    assert f"red: line 3 (Cell In[{number}], line 2), all 2 ranks: ZeroDivisionError" in said, said


def test_with_strict_a_red_line_is_an_error(kernel: RealKernel) -> None:
    error = kernel.run(accelerate(f"{PREPARED}print(histroy)", flags="--check --strict")).failed("CheckFailed")
    assert "found what would not end well: see its red lines" in error.evalue


# --- loops ----------------------------------------------------------------------------------------------------------

LOOPS = {
    "while True": """
        done = 0
        while True:
            for x, y in loader:
                step(x, y)
            done += 1
            if done == 500:
                break
        """,
    "counted steps": """
        batches = cycled(loader)
        for number in range(5000):
            step(*next(batches))
        """,
    "counted steps of a while": """
        number, batches = 0, cycled(loader)
        while number < 5000:
            step(*next(batches))
            number += 1
        """,
    "a threshold": """
        loss = torch.tensor(9.0)
        while loss > 1e-9:
            for x, y in loader:
                loss = step(x, y)
        """,
    "a threshold without a loader": """
        loss = torch.tensor(9.0)
        while loss > 1e-9:
            loss = step(X[:32], Y[:32])
        """,
    "a function of another cell": """
        fit(5000)
        """,
    "slices": """
        for epoch in range(1000):
            for at in range(0, 1000, 32):
                step(X[at : at + 32], Y[at : at + 32])
        """,
    "epochs": """
        for epoch in accelerator.epochs(1000):
            for x, y in loader:
                step(x, y)
        """,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_comes_to_the_last_line(kernel: RealKernel, loop: str) -> None:
    body = textwrap.dedent(LOOPS[loop]).strip()
    said = report(kernel, f"{body}\nlast = 'line'\nprint(histroy)")
    assert f"red: line {body.count(chr(10)) + 4}, all 2 ranks: NameError: name 'histroy'" in said, said
    said = report(kernel, body)
    assert "ok: the cell comes to its end" in said, said
    assert "red: " not in said
    assert ("the time cannot be forecast" in said) == ("threshold" in loop), said


def test_the_main_process_alone_may_evaluate_in_a_loop_that_steps(kernel: RealKernel) -> None:
    said = report(
        kernel,
        """
        for number in range(1000):
            step(X[:32], Y[:32])
            if accelerator.is_main_process:
                for x, y in test_loader:
                    model(x)
        """,
    )
    assert "ok: the cell comes to its end" in said, said


def test_times_and_numbers_of_ranks_are_no_results_that_differ(kernel: RealKernel) -> None:
    kernel.do(
        """
        def timed_fit(epochs):
            began = time.time()
            fit(epochs)
            return 7.0, time.time() - began
        """
    )
    said = report(
        kernel,
        """
        start_time, rank = time.perf_counter(), accelerator.process_index
        score, took = timed_fit(5)
        end_time = time.perf_counter()
        total_train_time = end_time - start_time
        drawn = rank * 2
        """,
    )
    (line,) = [line for line in said.splitlines() if "differs between the ranks" in line]
    assert line.endswith("gets that of rank 0: drawn"), said


def test_the_last_batch_may_be_used_after_its_loop(kernel: RealKernel) -> None:
    said = report(
        kernel,
        """
        whole = DataLoader(TensorDataset(X[:960], Y[:960]), 32, shuffle=True)
        for epoch in range(30):
            for x, y in whole:
                step(x, y)
            torch.randn_like(x)
        """,
    )
    assert "ok: the cell comes to its end" in said, said


def test_a_function_of_a_cell_that_imports_modules_is_rewritten(kernel: RealKernel) -> None:
    kernel.do(
        """
        import torch
        from torch.nn import functional as F

        def fit_twice(epochs):
            for epoch in range(epochs):
                for x, y in loader:
                    loss = F.cross_entropy(model(x), y)
                with torch.no_grad():
                    for x, y in test_loader:
                        model(x)
        """
    )
    assert "ok: the cell comes to its end" in report(kernel, "fit_twice(5000)")


def test_a_loop_of_another_cell_is_named_by_that_cell(kernel: RealKernel) -> None:
    number = kernel.do(
        """
        def until_small(loss):
            while loss > 1e-9:
                for x, y in loader:
                    loss = step(x, y)
        """
    ).number
    said = report(kernel, "until_small(torch.tensor(9.0))")
    assert f"the loop in line 2 of Cell In[{number}] ends by a condition" in said, said


def test_lines_that_are_not_reached_are_yellow(kernel: RealKernel) -> None:
    said = report(
        kernel,
        "for x, y in loader:\n    loss = step(x, y)\n    if loss.isnan():\n        print('a')\n        print('b')",
    )
    assert "yellow: not reached: lines 5-6" in said


# --- seeds and gradients --------------------------------------------------------------------------------------------

BACKWARD = "    optimizer.zero_grad()\n    accelerator.backward(loss)\n    optimizer.step()"
OWN = """
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
"""
FULL = {
    "a prepared cell": (
        f"{OWN}    loss = F.cross_entropy(model(F.dropout(x, 0.5)), y)\n{BACKWARD}",
        "ok: gradients of 2 ranks are those of one process at step 1",
    ),
    "a cell that prepares nothing": ("fit(3)", "ok: gradients of 2 ranks are those of one process at step 2"),
    "a loss that is a sum, of ranks that average": (
        f"{OWN}    loss = F.cross_entropy(model(x), y, reduction='sum')\n{BACKWARD}",
        "ok: gradients of 2 ranks are those of one process at step 1",
    ),
    "accumulation": (
        f"""
from nbaccel import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=3)
{OWN}
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
""",
        "ok: gradients of 2 ranks are those of one process at step 1",
    ),
    "a reduction without division": (
        f"{OWN}    loss = F.cross_entropy(model(x), y)\n    optimizer.zero_grad()\n    accelerator.backward(loss)\n"
        "    for each in model.parameters():\n        each.grad = accelerator.reduce(each.grad, reduction='sum')\n"
        "    optimizer.step()",
        "red: gradients of 2 ranks differ from those of one process by 100 % at step 1",
    ),
    "augmentation": (
        """
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Noisy(), 32))
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        """,
        "yellow: gradients cannot be compared with those of one process: its samples are others there",
    ),
    "batch statistics": (
        """
        model = nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 2))
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        """,
        "yellow: gradients cannot be compared with those of one process: the model has batch statistics",
    ),
    "a generator without a seed": (
        """
        import numpy
        generator, began = numpy.random.default_rng(), time.time()
        for x, y in loader:
            loss = step(x + float(generator.normal()), y)
        took = time.time() - began
        """,
        "red: two runs with seed 7 differ in model, ",
    ),
}


@pytest.mark.parametrize("cell", FULL)
def test_a_full_check_looks_at_seeds_and_gradients(kernel: RealKernel, cell: str, tmp_path: Path) -> None:
    body, sentence = FULL[cell]
    kernel.do(f"import os; os.chdir({str(tmp_path)!r}); before = model[0].weight.clone()")
    said = report(kernel, f"{textwrap.dedent(body)}\ntorch.save(1, 'model.pt')", "--check full --seed 7")
    assert sentence in said, said
    assert ("red: " in said) == sentence.startswith("red"), said
    assert ("ok: two runs gave the same results" in said) == ("generator" not in cell), said
    assert [path.name for path in tmp_path.iterdir() if path.name != ".nbaccel"] == []
    kernel.do("assert torch.equal(model[0].weight, before) and model[0].weight.grad is None and not optimizer.state")


def test_a_full_check_of_a_cell_that_fails_says_what_was_not_checked(kernel: RealKernel) -> None:
    said = report(kernel, "fit(2)\nprint(histroy)", "--check full")
    assert "yellow: seeds and gradients were not checked: the cell did not come to its end" in said, said


# --- nothing is touched ---------------------------------------------------------------------------------------------

TOUCHES = """
from pathlib import Path
Path('relative.txt').write_text('new')
Path({absolute!r}).write_text('new')
Path('there.txt').write_text('changed')
Path('gone.txt').unlink(missing_ok=True)
torch.save(model.state_dict(), 'model.pt')
accelerator.save_state('state')
model[0].weight.data.fill_(7)
history.append(1)
X.zero_()
new = 1
fit(3)
"""


def test_neither_files_nor_variables_are_touched(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"import os; os.chdir({str(tmp_path)!r})")
    (tmp_path / "there.txt").write_text("old")
    (tmp_path / "gone.txt").write_text("old")
    absolute = tmp_path.parent / "absolute.txt"
    kernel.do(
        "before = {name: value.clone() for name, value in model.state_dict().items()}; states = torch.get_rng_state()"
    )
    said = report(kernel, TOUCHES.format(absolute=str(absolute)))
    assert "red: " not in said, said
    assert "changed by this check" not in said
    assert f"ok: a save to {tmp_path} has" in said, said
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".nbaccel") == ["gone.txt", "there.txt"]
    assert (tmp_path / "there.txt").read_text() == "old"
    assert not absolute.exists()
    kernel.do(
        "assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())\n"
        "assert not history and 'new' not in globals() and X.any() and not optimizer.state\n"
        "assert 'accelerator' not in globals() and torch.equal(states, torch.get_rng_state())"
    )


def test_no_tracker_is_told(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"import os; os.chdir({str(tmp_path)!r})")
    said = report(
        kernel,
        "from nbaccel import Accelerator\n"
        f"accelerator = Accelerator(log_with=['csv', 'jsonl'], project_dir={str(tmp_path)!r})\n"
        "accelerator.init_trackers('run', config={'lr': 1})\n"
        "accelerator.log({'loss': 1.0})\n"
        "accelerator.get_tracker('csv').log({'loss': 2.0})\n"
        "accelerator.end_training()\n"
        "import os\n"
        "print(os.environ['WANDB_MODE'], os.environ['HF_HUB_OFFLINE'])",
    )
    assert "red: " not in said, said
    assert [path.name for path in tmp_path.iterdir() if path.name != ".nbaccel"] == []


UNRUN = """
!touch made-by-a-shell.txt
files = !touch made-by-a-shell.txt
get_ipython().run_cell_magic('bash', '', 'touch made-by-a-shell.txt')
import subprocess, shutil
assert subprocess.run(['touch', 'made.txt'], check=True).returncode == 0 and files == []
shutil.rmtree({beside!r})
fit(1)
torch.load('made.pt')
"""


def test_lines_that_cannot_be_undone_are_not_run(kernel: RealKernel, tmp_path: Path) -> None:
    home, beside = tmp_path / "home", tmp_path / "beside"
    for folder in (home, beside):
        folder.mkdir()
    kernel.do(f"import os; os.chdir({str(home)!r})")
    said = report(kernel, UNRUN.format(beside=str(beside)))
    assert "red: " not in said, said
    assert "yellow: line 9" in said, said
    assert "; line 2, line 3, line 4, line 6, line 7 were not run in this check, so this line" in said, said
    for line in (2, 3, 4):
        assert f"yellow: line {line} was not run, since a check cannot undo it: it starts a program (" in said, said
    assert "yellow: line 6 was not run, since a check cannot undo it: it starts a program (touch made.txt)" in said, (
        said
    )
    assert f"yellow: line 7 was not run, since a check cannot undo it: it removes the folder {beside}, which" in said
    assert "changed by this check" not in said, said
    assert [path.name for path in home.iterdir() if path.name != ".nbaccel"] == []
    assert beside.is_dir()


TRAINER = """
from transformers import Trainer, TrainingArguments
import os, pickle

class Rows(Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return {"x": X[index], "labels": Y[index]}

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 2)
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.linear(x), labels)}

options = {"save_strategy": "epoch", "save_total_limit": 1, "report_to": [], "use_cpu": True}
trainer = Trainer(Classifier(), TrainingArguments("results", num_train_epochs=3, **options), train_dataset=Rows())
trainer.train()
trainer.save_model("final")
with open("large.pkl", "wb") as file:
    pickle.dump([], file)
os.makedirs("plots/a", exist_ok=True)
with open("plots/a/loss.txt", "w") as file:
    file.write("x")
"""


def test_a_trainer_leaves_its_folders_as_they_were(kernel: RealKernel, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "results").mkdir()
    (tmp_path / "large.pkl").write_bytes(b"of the user" * 200_000)
    kernel.do(f"import os; os.chdir({str(tmp_path)!r})")
    said = report(kernel, TRAINER)
    assert "red: " not in said, said
    assert "changed by this check" not in said
    assert sorted(path.name for path in tmp_path.rglob("*") if ".nbaccel" not in path.parts) == ["large.pkl", "results"]
    assert (tmp_path / "large.pkl").read_bytes() == b"of the user" * 200_000


def test_nothing_is_left_in_the_folder_for_temporary_files(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}")
    try:
        assert "ok: the cell comes to its end" in report(kernel, "fit(2)")
    finally:
        kernel.do("tempfile.tempdir = None")
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(1)
def test_a_kernel_that_is_killed_during_a_check_leaves_files_as_they_were(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    scores = kernel.folder / "scores.txt"
    scores.write_text("of last night")
    kernel.begin(
        "%%accelerate --check -n 1\n"
        "import time\n"
        "with open('scores.txt', 'w') as file:\n"
        "    file.write('of a check')\n"
        "open('new.txt', 'w').close()\n"
        "time.sleep(1000)"
    )
    until = time.monotonic() + 60
    while not (kernel.folder / "new.txt").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert scores.read_text() == "of a check"
    kernel.kill()
    while (kernel.folder / "new.txt").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert scores.read_text() == "of last night"
    assert kernel.survivors(within_s=1.0) == {}
