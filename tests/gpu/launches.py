"""Launches from a real kernel that has done this or that before: what `test_g1_launches` runs, and its rehearsal.

Drives kernels, and touches no device in its own process. On ``cpu`` the same cells run on the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.facts import fact
from kernel.harness import RealKernel
from nbaccel.base.hardware import Survey

__all__ = [
    *("HISTORIES", "TENSOR_HISTORY", "Trained", "lent"),
    *("inline", "interrupted", "killed", "mislabelled", "staying", "stopped", "trained"),
]

_CELL_S = 50.0
_BACK_S = 10.0
_NEAR_BYTES = 64_000_000
"""What the driver and other programs move meanwhile."""

MAKE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(80, 6)
y = torch.sin(x.sum(1, keepdim=True))
train_loader = DataLoader(TensorDataset(x, y), batch_size=16)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
"""

LOOP = """
model.to(device)
for a, b in train_loader:
    a, b = a.to(device), b.to(device)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
"""

PREPARED = """
own = DataLoader(TensorDataset(x, y), batch_size=16 // accelerator.num_processes)
net, stepper, batches = accelerator.prepare(model, optimizer, own)
for a, b in batches:
    loss = nn.functional.mse_loss(net(a), b)
    accelerator.backward(loss)
    stepper.step()
    stepper.zero_grad()
    history.append(accelerator.reduce(loss.detach(), "mean").item())
"""

STEP = """
model.to(device)
nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
optimizer.step()
optimizer.zero_grad()
"""

BACKWARD = "torch.ones(1, requires_grad=True).sum().backward()"
PINNED = "torch.ones(1).pin_memory()"
PREVIEW = "next(iter(DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=True)))"
CUINIT = "import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0"
TENSOR = "on_device = torch.ones(3, device=device)"
TF32 = """
on_device = torch.ones(3, device=device)
if hasattr(torch.backends, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
else:
    torch.backends.cuda.matmul.allow_tf32 = True
"""
SAYS_TF32 = """
matmul = torch.backends.cuda.matmul
has_names = hasattr(torch.backends, "fp32_precision")
print("matmul by", matmul.fp32_precision if has_names else {True: "tf32"}.get(matmul.allow_tf32))
"""


@dataclass(frozen=True)
class History:
    """What a notebook did before its first `%%accelerate`.

    code: after the extension was loaded.  before: before that.  start: how ranks must start then, on a card.
    needs_card: the host cannot do it.  loop, first: the training, and what the reference does before it, if anything.
    tolerance: how far losses may lie from the host's.  says: what a rank must print.
    """

    code: str = ""
    start: str = "zygote"
    before: str = ""
    needs_card: bool = False
    loop: str = LOOP
    first: str = ""
    tolerance: float = 1e-4
    says: str = ""


HISTORIES = {
    "clean": History(start="fork"),
    "backward": History(BACKWARD),
    "pin_memory": History(PINNED, needs_card=True),
    "preview": History(PREVIEW, needs_card=True),
    "cuinit": History(CUINIT, needs_card=True),
    "asked_early": History(before="import torch; torch.cuda.is_available()"),
    "optimizer": History(STEP, loop=PREPARED, first=STEP),
    "tf32": History(TF32, loop=SAYS_TF32 + LOOP, tolerance=2e-2, says="matmul by tf32"),
}


TENSOR_HISTORY = History(TENSOR)


@dataclass(frozen=True)
class Trained:
    """start: the method that the run ended up with.  losses, reference: of the ranks, and of the host."""

    start: str
    losses: list[float]
    reference: list[float]
    text: str

    @property
    def off(self) -> float:
        return max(abs(one - other) for one, other in zip(self.losses, self.reference, strict=True))


def line(device: str, flags: str = "", ranks: int | None = None) -> str:
    """The magic: one rank per card, two on the host; single precision, as the reference has it."""
    count = ranks or (2 if device == "cpu" else len(Survey.take().gpus[:2]))
    return f"%%accelerate {'--cpu ' if device == 'cpu' else ''}-n {count} -p no {flags}".rstrip()


def begin(kernel: RealKernel, device: str, history: History = HISTORIES["clean"]) -> None:
    """A notebook up to its first `%%accelerate`."""
    if history.before:
        kernel.do(history.before, _CELL_S)
    kernel.do(f"%load_ext nbaccel\ndevice = {device!r}\n{MAKE}", _CELL_S)
    if history.code:
        kernel.do(history.code, _CELL_S)


def last_start(kernel: RealKernel) -> str:
    """How the ranks of the last run have started in the end."""
    return str(kernel.value("__import__('nbaccel').last_run.start_method"))


def trained(kernel: RealKernel, name: str, device: str, flags: str = "", tell: Callable[..., None] = fact) -> Trained:
    """Train after a history, and then on the host, in the kernel, as if nothing had been."""
    history = HISTORIES[name]
    begin(kernel, device, history)
    began = time.monotonic()
    cell = kernel.do(f"{line(device, flags)}\n{history.loop}", _CELL_S)
    tell("first_run_s", round(time.monotonic() - began, 2), "s")
    start = last_start(kernel)
    tell("start", start)
    assert history.says in cell.text, cell.text
    losses = kernel.value("history")
    kernel.do(f"device = 'cpu'\n{MAKE}\n{history.first}\n{LOOP}")
    told = Trained(start, losses, kernel.value("history"), cell.text)
    tell("off", told.off)
    return told


def inline(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> Trained:
    """In the notebook's own process; the device can be used there as before."""
    begin(kernel, device, TENSOR_HISTORY)
    cell = kernel.do(f"{line(device, '--start inline', ranks=1)}\n{LOOP}", _CELL_S)
    start, losses = last_start(kernel), kernel.value("history")
    assert kernel.value("(on_device + 1).sum().item()") == 6
    kernel.do(f"device = 'cpu'\n{MAKE}\n{LOOP}")
    told = Trained(start, losses, kernel.value("history"), cell.text)
    tell("off", told.off)
    return told


_LENDS = """
big = nn.Linear(8000, 4000, bias=False, device=device)
at_first = big.weight.detach().double().mean().item()
"""

_BORROWS = """
with torch.no_grad():
    big.weight += 1
where = big.weight.device.type
"""


def lent(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Let a model of the notebook leave its card while a rank changes it: where it was, and how far it got."""
    kernel.do(f"device = {device!r}\n{_LENDS}")
    cell = kernel.do(f"{line(device, '--free-kernel --start zygote', ranks=1)}\n{_BORROWS}", _CELL_S)
    grew = kernel.value("big.weight.detach().double().mean().item() - at_first")
    tell("lent_grew", round(grew, 6))
    return {"grew": grew, "where": kernel.value("[where, big.weight.device.type]"), "text": cell.text}


_ENDLESS = """
from pathlib import Path
net, stepper = accelerator.prepare(model, optimizer)
a, b = x.to(accelerator.device), y.to(accelerator.device)
held = torch.ones({held}, device=accelerator.device)
for step in range(10**9):
    with accelerator.accumulate(net):
        loss = nn.functional.mse_loss(net(a), b)
        accelerator.backward(loss)
        stepper.step()
        stepper.zero_grad()
        loss.item()
    Path(f"finished-{{accelerator.process_index}}").write_text(str(step + 1))
    if step == 20:
        print("training")
"""


def endless(device: str) -> str:
    """A training without an end, whose ranks hold memory that would be missed. It must not come to the notebook."""
    return f"{line(device, '--out step')}\n{_ENDLESS.format(held=500_000_000 // 4 if device == 'cuda' else 1)}"


def stopped(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Interrupt a training once: after which steps the ranks ended, and how long it took."""
    running = kernel.begin(endless(device))
    running.until_text("training", timeout_s=_CELL_S)
    used = _used()
    kernel.interrupt()
    began = time.monotonic()
    cell = running.end(timeout_s=20)
    took_s = time.monotonic() - began
    error = cell.failed("KeyboardInterrupt")
    steps = [int(path.read_text()) for path in sorted(kernel.folder.glob("finished-*"))]
    back_s = _until_used(sum(used) - 400_000_000) if device == "cuda" else 0.0
    tell("stop_s", round(took_s, 2), "s")
    tell("memory_back_s", back_s, "s")
    return {"steps": steps, "took_s": took_s, "back_s": back_s, "error": error.text}


def killed(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Kill a kernel while its ranks train: how long until nothing is left of them.

    back_s: until the cards' memory is what it was before; None where it is not after ten seconds.
    """
    before, shared = _used(), _shared_memory()
    running = kernel.begin(endless(device))
    running.until_text("training", timeout_s=_CELL_S)
    if device == "cuda":
        assert sum(_used()) > sum(before) + 400_000_000, "the ranks hold nothing"
    kernel.kill()
    back_s = _until_used(sum(before))
    survivors = kernel.survivors(within_s=2.0)
    left = sorted(_shared_memory() - shared)
    tell("memory_back_s", back_s, "s")
    tell("left_in_shm", left)
    return {"back_s": back_s, "survivors": survivors, "left": left}


# Two ranks that need each other ---------------------------------------------------------------------------------------

SHARE = "from one_card import let_ranks_share; let_ranks_share(device)"
"""Two ranks on the one card, if there is only one. In a kernel whose path leads to `programs`."""

_PAIR = """
net, stepper = accelerator.prepare(model, optimizer)
a, b = x.to(accelerator.device), y.to(accelerator.device)
rank = accelerator.process_index

def step():
    loss = nn.functional.mse_loss(net(a), b)
    accelerator.backward(loss)
    stepper.step()
    stepper.zero_grad()
    return loss.item()
"""

_STUCK = """
import time
for number in range(3):
    step()
print("training", rank)
if rank == 1:
    time.sleep(1000)
step()  # rank 0 waits here for the device, which waits for rank 1
"""


def interrupted(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Interrupt twice while rank 0 waits for its device and that for a peer which never comes; then train anew."""
    begin(kernel, device)
    kernel.do(SHARE)
    flags = "--start fork --out rank"  # nothing of a device, which would keep the notebook from being forked again
    running = kernel.begin(f"{line(device, flags, ranks=2)}\n{_PAIR}{_STUCK}")
    running.until_text("training 0", "training 1", timeout_s=_CELL_S)
    time.sleep(0.5)  # until rank 0 waits in C, of which nobody tells
    began = time.monotonic()
    kernel.interrupt()
    time.sleep(0.5)  # a person's
    kernel.interrupt()
    cell = running.end(timeout_s=30)
    took_s = round(time.monotonic() - began, 2)
    tell("interrupt_s", took_s, "s")
    error = cell.failed("KeyboardInterrupt")
    anew = kernel.do(f"{line(device, flags, ranks=2)}\n{_PAIR}print('loss', step())", _CELL_S)
    return {"took_s": took_s, "error": error.text, "anew": anew.text}


_MISLABELLED = """
import time
net, stepper = accelerator.prepare(model, optimizer)
a, labels = x.to(accelerator.device), torch.zeros(80, dtype=torch.long, device=accelerator.device)
for number in range(3):
    if number == 2 and accelerator.process_index == accelerator.num_processes - 1:
        labels[3] = 1000
    loss = nn.functional.cross_entropy(net(a), labels)
    accelerator.backward(loss)
    stepper.step()
    stepper.zero_grad()
    time.sleep(0.5)  # torch's watchdog has met the error
    loss.item()
"""


def mislabelled(kernel: RealKernel, device: str, ranks: int, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """A label out of range in the last rank: on a card an assertion in a kernel, which its host learns of later."""
    begin(kernel, device)
    if ranks > 1:
        kernel.do(SHARE)
    cell = kernel.run(f"{line(device, '--start fork', ranks=ranks)}\n{_MISLABELLED}", _CELL_S)
    assert cell.error is not None, cell.text
    tell("error", f"{cell.error.ename}: {cell.error.evalue.splitlines()[0]}")
    tell("failed_s", round(cell.seconds, 2), "s")
    return {"class": cell.error.ename, "error": cell.error.text, "took_s": cell.seconds}


_FAILS = {"in_gather": "accelerator.gather(a.mean())", "in_loss_item": "step()"}
"""Where rank 0 is when rank 1 has failed: it waits on the host, or its device does."""


def staying(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Ranks that stay: one fails while the other waits for it, which lives, and gives back what it has.

    Where their devices waited, rank 0 gives nothing back before they are connected anew, which the cell that follows
    does; else they are out of step, and that cell is refused. They are started anew in any case.
    """
    begin(kernel, device)
    kernel.do(SHARE)
    start = line(device, "--start fork", ranks=2).replace("%%accelerate", "%accelerate start")
    told: dict[str, Any] = {"errors": [], "took_s": [], "pulled": [], "losses": [], "refused": [], "after": []}
    for number, (name, waits) in enumerate(_FAILS.items()):
        kernel.do(start if not number else "%accelerate restart", _CELL_S)
        trains = f"%%accelerate\n{_PAIR}mark = (a[0] * 0 + {number}).cpu()\nprint('loss', step())"
        told["losses"].append(kernel.do(trains, _CELL_S).text)
        cell = kernel.run(f"%%accelerate\nif rank == 1: raise ValueError('on purpose')\n{waits}", _CELL_S)
        told["took_s"].append(round(cell.seconds, 2))
        tell(f"failed_{name}_s", told["took_s"][-1], "s")
        told["errors"].append(cell.failed("ValueError").text)
        pulled = kernel.run("%accelerate pull mark")
        told["refused"].append("" if pulled.error is None else pulled.error.evalue)
        after = kernel.run("%%accelerate\nprint('loss', step())", _CELL_S)
        told["after"].append(after.text if after.error is None else after.error.evalue)
        tell(f"after_{name}", told["after"][-1])
        if pulled.error is not None:
            kernel.do("%accelerate pull mark")
        told["pulled"].append(kernel.value("mark.tolist()"))
    kernel.do("%accelerate stop")
    return told


def _used() -> list[int]:
    return [gpu.used_bytes for gpu in Survey.take().gpus]


def _until_used(at_most: int) -> float | None:
    """Seconds until all cards together hold about that; NVML sends no event, so it is asked again."""
    began = time.monotonic()
    while sum(_used()) > at_most + _NEAR_BYTES:
        if time.monotonic() - began > _BACK_S:
            return None
        time.sleep(0.02)
    return round(time.monotonic() - began, 2)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
