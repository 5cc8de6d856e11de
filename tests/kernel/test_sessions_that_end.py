"""A cell that is stopped, by its time limit or by the user, leaves a checkpoint, and the next one goes on from it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from environments import NEWEST, Environment
from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate
from nbaccel.train.checkpoint.manifest import Manifest

TRAINS = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = torch.utils.data.DataLoader(torch.arange(600.).reshape(-1, 3), 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = accelerator.remember(rows=[])
rows = seen.rows
for epoch in accelerator.epochs(1):
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        rows += x[:, 0].tolist()
        if len(rows) == 8: print("under way")
        time.sleep({pause})
"""
QUICK, SLOW = TRAINS.format(pause=0), TRAINS.format(pause=0.2)
FLAGS = "--checkpoint-every 1000steps --checkpoint-dir {folder} --out rows"


def checkpoints(kernel: RealKernel, folder: str) -> list[str]:
    return sorted(path.name for path in (kernel.folder / folder).iterdir())


@pytest.mark.slow
def test_a_time_limit_ends_the_cell_well_and_resume_goes_on_at_the_next_batch(kernel: RealKernel) -> None:
    flags = FLAGS.format(folder="limited")
    cell = kernel.do(accelerate(SLOW, flags=f"{flags} --time-limit 4s"))
    (steps,) = re.findall(r"stopped after (\d+) steps at the time limit of 4 s; --resume goes on", cell.stdout)
    assert 0 < int(steps) < 50
    assert checkpoints(kernel, "limited") == [f"checkpoint_{steps}"]
    cell = kernel.do(accelerate(QUICK, flags=f"{flags} --resume"))
    assert f"step {steps}, epoch 1, batch {steps}/50\n" in cell.stdout
    assert re.search(rf"^done in [^,]*, {50 - int(steps)} steps,", cell.stdout, re.M)
    # Rank 0 has every other batch of two rows of three numbers.
    assert kernel.value("rows") == [float(12 * batch + 3 * row) for batch in range(50) for row in range(2)]


@pytest.mark.slow
def test_an_interrupt_saves_before_the_cell_ends(kernel: RealKernel, start: str) -> None:
    running = kernel.begin(accelerate(SLOW, start, flags=FLAGS.format(folder=f"pressed-{start}")))
    running.until_text("under way")
    kernel.interrupt()
    running.end().failed("KeyboardInterrupt")
    (name,) = checkpoints(kernel, f"pressed-{start}")
    assert int(name.removeprefix("checkpoint_")) >= 2
    kernel.do(accelerate(QUICK, start, flags=f"--resume pressed-{start} --out rows"))
    assert kernel.value("len(rows)") == 100


PREPARES_NOTHING = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = torch.utils.data.DataLoader(torch.arange(300.).reshape(-1, 3), 2)
pause = {pause}
"""
LOOP = """
step = 0
for x in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 4: print("under way")
    time.sleep(pause)
"""


@pytest.mark.slow
def test_an_interrupted_loop_that_prepares_nothing_says_what_it_saved(kernel: RealKernel, start: str) -> None:
    kernel.do(PREPARES_NOTHING.format(pause=0.2))
    flags = f"--checkpoint-every 1000steps --checkpoint-dir plain-{start} --out step"
    running = kernel.begin(accelerate(LOOP, start, flags=flags))
    running.until_text("under way")
    kernel.interrupt()
    cell = running.end()
    cell.failed("KeyboardInterrupt")
    (name,) = checkpoints(kernel, f"plain-{start}")
    done = f"every rank had done {name.removeprefix('checkpoint_')} steps"
    saved = f"{done}. Its training is saved in plain-{start}/{name}: --resume goes on from there."
    assert cell.error is not None
    assert cell.error.evalue.endswith(saved)
    kernel.do(PREPARES_NOTHING.format(pause=0))
    kernel.do(accelerate(LOOP, start, flags=f"--resume plain-{start} --out step"))
    assert kernel.value("step") == 50


def test_without_the_flag_nothing_is_written_to_the_working_directory(kernel: RealKernel, start: str) -> None:
    kernel.do(accelerate(QUICK, start))
    assert not (kernel.folder / "nbaccel_checkpoints").exists()


ENDS: dict[str, Callable[[RealKernel], None]] = {
    "SIGTERM to the kernel": lambda kernel: os.kill(kernel.pid, signal.SIGTERM),
    "SIGTERM to a rank": lambda kernel: os.kill(rank_of(kernel, 1), signal.SIGTERM),
    "SIGTERM to all": lambda kernel: [os.kill(pid, signal.SIGTERM) for pid in everybody(kernel)],
    "SIGKILL to the kernel": lambda kernel: kernel.kill(),
}


def rank_of(kernel: RealKernel, rank: int) -> int:
    return int((kernel.folder / f"pid-{rank}").read_text())


def everybody(kernel: RealKernel) -> list[int]:
    return [rank_of(kernel, 0), rank_of(kernel, 1), kernel.pid]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "end"),
    [*(("fork", end) for end in ENDS), ("zygote", "SIGTERM to the kernel"), ("zygote", "SIGKILL to the kernel")],
)
def test_a_session_that_is_ended_leaves_a_checkpoint_of_a_later_step_and_no_process(
    environment: Environment, new_kernel: Kernels, start: str, end: str
) -> None:
    if environment != NEWEST:
        pytest.skip("signals are the same under every front end")
    kernel = new_kernel()
    kernel.do("import torch\n%load_ext nbaccel")
    body = TRAINS.format(pause=0.2).replace(
        'print("under way")',
        "import os; from pathlib import Path; rank = accelerator.process_index; "
        'Path(f"pid-{rank}").write_text(str(os.getpid())); print("under way", rank)',
    )
    flags = "--checkpoint-every 1000steps --checkpoint-dir saved"
    running = kernel.begin(accelerate(body, start, flags=flags))
    running.until_text("under way 0", "under way 1")
    ENDS[end](kernel)
    if end == "SIGTERM to a rank":
        running.end().failed("KeyboardInterrupt")
        kernel.kill()
    assert kernel.survivors(within_s=15.0) == {}
    (name,) = checkpoints(kernel, "saved")
    assert Manifest.read(kernel.folder / "saved" / name).step >= 2


@pytest.mark.slow
def test_a_run_that_saves_nothing_does_not_outlive_its_kernel(new_kernel: Kernels, start: str) -> None:
    kernel = new_kernel()
    kernel.do("import torch\n%load_ext nbaccel")
    kernel.begin(accelerate(SLOW, start)).until_text("under way")
    os.kill(kernel.pid, signal.SIGTERM)
    assert kernel.survivors(within_s=2.0) == {}
