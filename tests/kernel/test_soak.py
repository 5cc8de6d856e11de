"""A training notebook under random faults, for as many minutes as are given: `make soak MINUTES=30`.

Each round trains the same model with one fault, in ranks of one kernel after the other. A fault that can be recovered
from must end with the weights of the undisturbed run; any other must be blamed on the right rank, and the next cell,
which resumes, ends with those weights. Nothing may be left behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from environments import Environment
from kernel.harness import Cell, RealKernel, accelerate

MINUTES = float(os.environ.get("MINUTES") or 5)
STEPS = 36

TRAINS = """
import torch, warnings
from nbaccel import Accelerator
from nbaccel.testing import Faults

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, on_nan="stop", on_save_error="warn")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(96, 8, dtype=torch.float64))
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
faults, done = {faults}, 0
with faults, faults.in_model(model), faults.in_optimizer(optimizer), faults.in_saves():
    for epoch in accelerator.epochs(3):
        for (x,) in loader:
            faults.step = done
            accelerator.forward_backward(lambda x: model(x).square().mean(), x)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == 3: print("under way", accelerator.process_index)
            if {pause}: __import__("time").sleep({pause})
weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
"""


@dataclass(frozen=True)
class Trouble:
    """One kind of fault.

    faults: the expression that makes it, with {rank}, {step} and {seed}.  act: what is done to the kernel instead.
    error: the class that the cell raises for it; None where the run recovers, "" where the kernel ends.
    says: what the error must tell, with {rank} and {step}.  flags: of the cell.
    """

    faults: str = "Faults()"
    error: str | None = None
    says: str = ""
    flags: str = "--oom stop"
    act: Callable[[RealKernel], None] | None = None


def signalled(number: int) -> Callable[[RealKernel], None]:
    return lambda kernel: os.kill(kernel.pid, number)


TROUBLES = {
    "nothing": Trouble(),
    "raise": Trouble(
        "Faults().raise_at('forward', ValueError('boom'), rank={rank}, step={step})",
        "ValueError",
        "on rank {rank} of 2",
    ),
    "kill": Trouble(
        "Faults().kill_at('optimizer', rank={rank}, step={step})",
        "RankDied",
        "rank {rank} of 2 was killed by SIGKILL",
    ),
    "leave": Trouble(
        "Faults().leave_at('forward', 3, rank={rank}, step={step})",
        "RankDied",
        "rank {rank} of 2 ended with exit code 3",
    ),
    "hang": Trouble(
        "Faults().hang_at('forward', rank={rank}, step={step})",
        "RanksFailed",
        "rank {rank} seems to hold up the others",
        "--oom stop --hang-timeout 3",
    ),
    "nan": Trouble("Faults().nan_at('output', rank={rank}, step={step})", "FloatingPointError", "step {step}"),
    "out of memory": Trouble("Faults().oom_at('backward', rank={rank}, step={step})"),
    "a full disk": Trouble("Faults().enospc_at('sync', rank=0, times=3)"),
    "killed while saving": Trouble(
        "Faults().kill_at('sync', rank=0, times=1, passing={seed} % 12)",
        "RankDied",
        "rank 0 of 2 was killed by SIGKILL",
    ),
    "an interrupt": Trouble(error="KeyboardInterrupt", says="interrupted", act=RealKernel.interrupt),
    "SIGTERM to the kernel": Trouble(error="", act=signalled(signal.SIGTERM)),
    "SIGKILL to the kernel": Trouble(error="", act=RealKernel.kill),
}


class Soak:
    """Rounds in one kernel after the other; a line per round."""

    def __init__(self, environment: Environment, folder: Path, chance: random.Random) -> None:
        self.environment, self.folder, self.chance = environment, folder, chance
        self.kernel = self._new_kernel()
        self.reference = self._weights("fork", "nbaccel_reference")

    def _new_kernel(self) -> RealKernel:
        kernel = RealKernel(self.environment, self.folder)
        kernel.do("import torch\n%load_ext nbaccel")
        for start in ("fork", "zygote"):
            kernel.do(f"import nbaccel; nbaccel.launch(int, 1, start_method={start!r})")
        self.before = kernel.family()
        return kernel

    def close(self) -> None:
        self.kernel.close()

    def _train(self, trouble: Trouble, start: str, folder: str, **place: int) -> str:
        body = TRAINS.format(faults=trouble.faults.format(**place), pause=0.05 if trouble.act else 0)
        saves = f"--checkpoint-every 5steps --checkpoint-dir {folder} --keep-checkpoints 2"
        return accelerate(body, start, flags=f"--seed 3 {saves} {trouble.flags} --out weights")

    def _weights(self, start: str, folder: str) -> list[float]:
        code = self._train(Trouble(), start, folder)
        if (self.folder / folder).exists():
            code = code.replace("--seed 3", "--seed 3 --resume")
        self.kernel.do(code)
        weights: list[float] = self.kernel.value("weights")
        return weights

    def round(self, number: int) -> str:
        """Play one round; what happened, in a line.

        Raises:
            AssertionError: something was lost, left or blamed wrongly.
        """
        name = self.chance.choice(list(TROUBLES))
        trouble, start = TROUBLES[name], self.chance.choice(["fork", "zygote"])
        place = {"rank": self.chance.randrange(2), "step": self.chance.randrange(STEPS), "seed": number}
        folder = f"round-{number}"
        began = time.monotonic()
        execution = self.kernel.begin(self._train(trouble, start, folder, **place))
        if trouble.act is not None:
            execution.until_text("under way 0", "under way 1")
            time.sleep(self.chance.uniform(0, 1))
            trouble.act(self.kernel)
        if trouble.error == "":
            assert self.kernel.survivors(within_s=30) == {}, name
            self.kernel.close()
            self.kernel = self._new_kernel()
        else:
            self._check(trouble, execution.end(timeout_s=60), place)
        if trouble.error is None:
            assert self.kernel.value("weights") == pytest.approx(self.reference, rel=1e-9, abs=1e-12), name
        weights = self._weights(start, folder)
        assert weights == pytest.approx(self.reference, rel=1e-9, abs=1e-12), name
        self.kernel.settle()
        assert self.kernel.extra(self.before) == {}, name
        seconds = time.monotonic() - began
        return f"{number:5d} {start:6} {name:22} rank {place['rank']} step {place['step']:2d} {seconds:5.1f} s"

    def _check(self, trouble: Trouble, cell: Cell, place: dict[str, int]) -> None:
        if trouble.error is None:
            cell.succeeded()
            return
        if cell.error is None and "passing" in trouble.faults:  # the save has fewer points than that
            return
        error = cell.failed(trouble.error)
        assert trouble.says.format(**place) in f"{error.evalue}\n{error.text}", error.text


@pytest.fixture
def soak(environment: Environment, tmp_path: Path) -> Iterator[Soak]:
    soak = Soak(environment, tmp_path, random.Random(int(time.time())))
    yield soak
    soak.close()


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 300)
def test_a_training_notebook_survives_random_faults(soak: Soak, capsys: pytest.CaptureFixture[str]) -> None:
    ends_at = time.monotonic() + 60 * MINUTES
    for number in count(1):
        line = soak.round(number)
        with capsys.disabled():
            print(line, flush=True)
        if time.monotonic() > ends_at:
            break
