"""``sharded.py cuda|cpu conform|repeated|ahead|short|alone|memory``: models that are sharded over two ranks (FSDP).

By NCCL, on two cards or on one that it takes for two machines' (`one_card`). ``cpu`` runs the same by gloo, where the
host does not run ahead of the device: that proves these programs, and not what they are for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from device import exactly, limited, training_of
from one_card import enter, let_ranks_share
from torch import Tensor, nn

from gpu.facts import fact, tell_cases
from nbaccel import Accelerator, find_executable_batch_size, launch
from nbaccel.base.events import Event, OutOfMemory, outlet
from nbaccel.base.hardware import Survey
from nbaccel.testing import Faults, conformance, run_ranks
from nbaccel.utils import FullyShardedDataParallelPlugin

_STEPS, _BATCH = 4, 32
_SLEEP_CYCLES = 1_000_000_000  # about half a second
_GIB = 2**30


def _accelerator(device: str, **options: Any) -> Accelerator:
    enter(device)
    exactly()
    return Accelerator(cpu=device == "cpu", **options)


class _Net(nn.Module):
    """reads: each block reads a value on the host, which waits for the device."""

    def __init__(self, width: int, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.reads:
                float(x.detach().sum())
        out: Tensor = self.head(x)
        return out


def _net(device: str, reads: bool = False) -> _Net:
    torch.manual_seed(0)
    return _Net(512 if device == "cuda" else 16, reads)


def _batch(device: str, size: int, rank: int, step: int) -> Tensor:
    width = 512 if device == "cuda" else 16
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def _alone(device: str) -> dict[str, Tensor]:
    """The weights after the same batches in one process, on the host."""
    model = _net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(_STEPS):
        batch = torch.cat([_batch(device, _BATCH, rank, step) for rank in range(2)])
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _off(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    return max(float((wanted[name] - got[name]).abs().max()) for name in wanted)


# A batch that is repeated ---------------------------------------------------------------------------------------------


def _trained(
    device: str, make_faults: Callable[[], Faults], reads: bool, inside: str | None, fields: dict[str, Any]
) -> dict[str, Any]:
    accelerator = _accelerator(device, fsdp_plugin=FullyShardedDataParallelPlugin(**fields))
    bare = _net(device, reads)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    faults = make_faults()
    place = bare if inside is None else bare.get_submodule(inside)
    took = []
    with faults, faults.in_model(place):
        for faults.step in range(_STEPS):
            batch = _batch(device, _BATCH, accelerator.process_index, faults.step).to(accelerator.device)
            began = time.perf_counter()
            accelerator.forward_backward(lambda part: model(part).square().mean(), batch)
            took.append(time.perf_counter() - began)
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"state": state, "fired": len(faults.fired), "slowest_s": round(max(took[1:]), 2)}


_PLACES: dict[str, tuple[Callable[[], Faults], bool, str | None, dict[str, Any]]] = {
    "nothing": (Faults, False, None, {}),
    "a forward": (lambda: Faults().oom_at("forward", rank=1, step=1), False, "blocks.2", {}),
    "a forward that reads": (lambda: Faults().oom_at("forward", rank=1, step=1), True, "blocks.2", {}),
    "a backward": (lambda: Faults().oom_at("backward", rank=1, step=1), False, "blocks.1", {}),
    "within a block": (lambda: Faults().oom_at("backward", rank=1, step=2), False, "blocks.1.1", {}),
    "a backward after reads": (lambda: Faults().oom_at("backward", rank=1, step=1), True, "blocks.1", {}),
    "both ranks": (lambda: Faults().oom_at("backward", step=1), False, "blocks.1", {}),
    "rank 0, twice": (
        lambda: Faults().oom_at("backward", rank=0, step=1).oom_at("forward", rank=0, step=3),
        False,
        "blocks.3",
        {},
    ),
    "ZeRO-2": (
        lambda: Faults().oom_at("backward", rank=1, step=1),
        False,
        "blocks.1",
        {"reshard_after_forward": False},
    ),
    "offloaded": (lambda: Faults().oom_at("forward", rank=1, step=1), False, "blocks.1", {"cpu_offload": True}),
}


def repeated(device: str) -> dict[str, Any]:
    """Batches that did not fit on one rank, by where it ran out of memory."""
    told: dict[str, Any] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for place, case in _PLACES.items():
        began = time.perf_counter()
        try:
            ranks = run_ranks(2, _trained, device, *case, timeout_s=45)
            states[place] = ranks[0]["state"]
            told[place] = {
                "fired": [rank["fired"] for rank in ranks],
                "slowest_s": max(rank["slowest_s"] for rank in ranks),
            }
        except Exception as error:
            told[place] = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        fact(place, {**told[place], "s": round(time.perf_counter() - began, 1)})
    wanted = _alone(device)  # at the end: after a backward a fork could not use the device
    for place, state in states.items():
        told[place]["off"] = _off(wanted, state)
    fact("off", {place: told[place]["off"] for place in states})
    return told


# A device that is behind ----------------------------------------------------------------------------------------------


class _Late(torch.autograd.Function):
    """Nothing, whose backward may keep the device busy for half a second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeps: bool) -> Tensor:
        ctx.sleeps = sleeps and x.is_cuda
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.sleeps:
            torch.cuda._sleep(_SLEEP_CYCLES)
        return gradients[0], None


def _behind(device: str) -> dict[str, Any]:
    """Rank 0's device is late with the sums of step 1, and in step 2 rank 1 runs out of memory at once."""
    accelerator = _accelerator(device, strategy="fsdp")
    rank = accelerator.process_index
    bare = _net(device)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    step, events, behind = 0, [], []

    def loss_fn(part: Tensor) -> Tensor:
        if step == 2 and not behind:
            behind.append(bool(events) and not events[0].query())
            if rank == 1:
                raise torch.OutOfMemoryError("on purpose")
        out = model(part)
        return (_Late.apply(out, rank == 0) if step == 1 else out).square().mean()

    batches = [_batch(device, _BATCH, rank, step).to(accelerator.device) for step in range(_STEPS)]
    for step, batch in enumerate(batches):
        accelerator.forward_backward(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and device == "cuda":
            events.append(torch.cuda.Event())
            events[0].record()
    state = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"state": state, "behind": behind}


def ahead(device: str) -> dict[str, Any]:
    """A step whose sums are not done yet when the next one runs out of memory."""
    ranks = run_ranks(2, _behind, device, timeout_s=45)
    found = {"off": _off(_alone(device), ranks[0]["state"]), "behind": [rank["behind"] for rank in ranks]}
    fact("ahead", found)
    return found


# Memory that is short -------------------------------------------------------------------------------------------------


def _short(device: str) -> dict[str, Any]:
    accelerator = _accelerator(device, strategy="fsdp")
    rank = accelerator.process_index
    training = training_of(device)
    size = 16
    events: list[Event] = []
    losses = []
    with limited(device, (6 if rank else 30) * _GIB, 700_000 if rank else 10**9), outlet(events.append):
        bare, optimizer = training.make()
        model, optimizer = accelerator.prepare(bare, optimizer)
        batch = training.batch(size).to(accelerator.device)
        for _ in range(3):
            loss = accelerator.forward_backward(lambda part: training.loss(model, part), batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss, "mean")))
    return {"losses": losses, "failed": [event.micro_batch_size for event in events if isinstance(event, OutOfMemory)]}


def _function(device: str) -> dict[str, Any]:
    accelerator = _accelerator(device, strategy="fsdp")
    rank = accelerator.process_index
    training = training_of(device)
    tried: list[int] = []
    with limited(device, (6 if rank else 30) * _GIB, 700_000 if rank else 10**9):

        @find_executable_batch_size(starting_batch_size=16)
        def train(batch_size: int) -> list[float]:
            accelerator.free_memory()
            tried.append(batch_size)
            bare, optimizer = training.make()
            model, optimizer = accelerator.prepare(bare, optimizer)
            losses = []
            for _ in range(2):
                loss = training.loss(model, training.batch(batch_size).to(accelerator.device))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            return losses

        losses = train()
    return {"tried": tried, "losses": losses}


def _planned(device: str) -> dict[str, Any]:
    accelerator = _accelerator(device, strategy="fsdp")
    training = training_of(device)
    with limited(device, (6 if accelerator.process_index else 30) * _GIB, 900_000):
        bare, optimizer = training.make()
        model, optimizer = accelerator.prepare(bare, optimizer)
        began = time.perf_counter()
        batch = training.batch(8).to(accelerator.device)
        size = accelerator.find_batch_size(lambda part: training.loss(model, part), batch, max_batch_size=256)
        took_s = time.perf_counter() - began
        batch = training.batch(size).to(accelerator.device)
        accelerator.backward(training.loss(model, batch))
        optimizer.step()
    return {"size": size, "took_s": round(took_s, 1)}


def short(device: str) -> dict[str, Any]:
    """Rank 1 has less memory than rank 0: within a step, in a function that begins anew, and in a search."""
    told: dict[str, Any] = {}
    for name, function in {"step": _short, "function": _function, "search": _planned}.items():
        began = time.perf_counter()
        try:
            told[name] = run_ranks(2, function, device, timeout_s=60)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"[-3000:]
        fact(name, {"found": told[name], "s": round(time.perf_counter() - began, 1)})
    return told


# Memory that is counted -----------------------------------------------------------------------------------------------


def _counted(device: str, strategy: str, precision: str) -> dict[str, Any]:
    accelerator = _accelerator(device, strategy=strategy, mixed_precision=precision)
    training = training_of(device)
    bare, optimizer = training.make()
    tokens = training.batch(4)
    estimate = accelerator.estimate(bare, optimizer, tokens, training.loss, ranks=[2])
    model, optimizer = accelerator.prepare(bare, optimizer)
    batch = tokens.to(accelerator.device)
    for step in range(4):
        if step == 2 and device == "cuda":
            torch.cuda.synchronize()  # DDP makes its buckets anew in the second step, and frees the old ones behind it
            torch.cuda.reset_peak_memory_stats()
        accelerator.backward(training.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"estimated_mb": round(estimate.of(strategy, 2).peak / 1e6)}
    if device == "cuda":
        torch.cuda.synchronize()
        found["counted_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
        found["reserved_mb"] = round(torch.cuda.memory_reserved() / 1e6)
        accelerator.wait_for_everyone()
        found["card_mb"] = Survey.take().gpus[0].used_bytes // 10**6
        accelerator.wait_for_everyone()
    return found


def memory(device: str) -> dict[str, Any]:
    """Peaks of a small GPT-2, beside what `Accelerator.estimate` says."""
    told: dict[str, Any] = {}
    for strategy, precision in (("fsdp", "no"), ("ddp", "no"), ("fsdp", "bf16")):
        name = f"{strategy}, {precision}"
        told[name] = run_ranks(2, _counted, device, strategy, precision, timeout_s=60)
        fact(name, told[name])
    return told


# A rank that asks alone -----------------------------------------------------------------------------------------------


def _asked_alone(device: str, what: str) -> None:
    """Rank 0 alone does what needs the rows of both; its peer goes on training."""
    accelerator = _accelerator(device, strategy="fsdp")
    bare = _net(device)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    for step in range(4):
        if step == 2 and accelerator.is_main_process:
            if what == "state":
                accelerator.get_state_dict(model)
            elif what == "item":
                float(next(model.parameters()).detach().norm())
            else:
                model.eval()
                with torch.no_grad():
                    float(model(_batch(device, 4, 0, 0).to(accelerator.device)).sum())
                model.train()
        loss = model(_batch(device, _BATCH, accelerator.process_index, step).to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    accelerator.end_training()


def alone(device: str) -> dict[str, Any]:
    """How a run ends in which rank 0 alone reads the state, evaluates, or reads a number of a parameter."""
    told: dict[str, Any] = {}
    for what in ("state", "evaluation", "item"):
        began = time.monotonic()
        try:
            launch(
                _asked_alone,
                2,
                (device, what),
                cpu=device == "cpu",
                start_method="fork",
                setup="nbaccel.train.setup:setup_rank",
                timeout_s=40.0,
                hang_timeout_s={"cuda": 12.0, "cpu": 3.0}[device],
            )
            error = ""
        except Exception as raised:
            error = "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", [])])[:3000]
        told[what] = {"error": error, "took_s": round(time.monotonic() - began, 1)}
        fact(what, told[what])
    return told


def conform(device: str) -> dict[str, Any]:
    """The programs of `nbaccel.testing.conformance`; one process trains on the host."""

    def options() -> dict[str, Any]:
        enter(device)
        exactly()
        return {"cpu": device == "cpu"}

    programs = [name for name, program in conformance.PROGRAMS.items() if not program.is_launched]
    differences = conformance.check("fsdp", programs, options=options, timeout_s=100)
    told = {each.program: {"largest": each.largest, "other": each.other} for each in differences}
    fact("conform", told)
    return told


CASES = {case.__name__: case for case in (conform, repeated, ahead, short, alone, memory)}


if __name__ == "__main__":
    let_ranks_share(sys.argv[1])
    tell_cases(CASES, sys.argv[1:])
