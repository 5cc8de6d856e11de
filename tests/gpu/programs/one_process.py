"""``one_process.py cuda|cpu CASES``: one process, its batches, values, saves, precisions, and how often it waits.

``cpu`` runs the same on the host, without streams: that proves the loops and the counting, and nothing of what could
go wrong between streams.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device import busy, exactly, memory_of, reserved_bytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpu.facts import fact, tell_cases
from nbaccel import Accelerator
from nbaccel.train.step.readings import Reading

_BATCHES, _ROWS = 64, 8
_COLUMNS = {"cuda": 65536, "cpu": 16}


def accelerator_of(device: str, precision: str = "no") -> Accelerator:
    return Accelerator(precision, cpu=device == "cpu")


# Batches on their way -------------------------------------------------------------------------------------------------


class Opaque:
    """A batch of a class of its own: it can be moved and pinned, and nobody can look into it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, device: Any, **options: Any) -> Opaque:
        return Opaque(self.rows.to(device, **options))

    def pin_memory(self) -> Opaque:
        return Opaque(self.rows.pin_memory())


def _opaque(rows: list[Tensor]) -> Opaque:
    return Opaque(torch.stack(rows))


def opaque(device: str) -> dict[str, Any]:
    """Sums of distinct batches, each dropped while the device has not got to it yet."""
    rows = torch.randn(_BATCHES * _ROWS, 1, generator=torch.Generator().manual_seed(0)).expand(-1, _COLUMNS[device])
    data = [row.contiguous() for row in rows]
    loader: DataLoader[Any] = DataLoader(data, _ROWS, collate_fn=_opaque, pin_memory=device == "cuda")  # type: ignore[arg-type]
    sums = []
    for batch in accelerator_of(device).prepare(loader):
        busy(device)
        sums.append(batch.rows.double().sum())
        del batch
    expected = rows.double().sum(1).view(_BATCHES, _ROWS).sum(1)
    off = (torch.stack(sums).cpu() - expected).abs()
    return {"batches": len(sums), "wrong": int((off > 1e-3).sum()), "off": float(off.max())}


def epochs(device: str) -> dict[str, Any]:
    """What forty short epochs make the allocator keep."""
    size, side = (
        (128, 112) if device == "cuda" else (32, 4)
    )  # above 10 MiB a tensor is a segment of the allocator's own
    images = torch.randn(3 * size, 3, side, side)
    loader = accelerator_of(device).prepare(DataLoader(TensorDataset(images), size, pin_memory=device == "cuda"))
    total = torch.zeros((), device=device)
    reserved = []
    for _ in range(40):
        for (batch,) in loader:
            total += batch.sum()
        reserved.append(reserved_bytes(device))
    batch_bytes = size * images[0].nbytes
    fact("reserved", [value // batch_bytes for value in reserved[::8]], "batches")
    return {"batch_bytes": batch_bytes, "growth": reserved[-1] - reserved[1], "total": float(total)}


class _Refilled(IterableDataset[Tensor]):
    """Batches in one pinned buffer, which the next batch fills again, as fast loaders have them."""

    def __init__(self, device: str) -> None:
        self._buffer = torch.empty(_ROWS, _COLUMNS[device], pin_memory=device == "cuda")

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(_BATCHES):
            yield self._buffer.fill_(number)


def refilled(device: str) -> dict[str, Any]:
    """The batches that arrive of a loader with one buffer."""
    arrived = []
    for batch in accelerator_of(device).prepare(DataLoader(_Refilled(device), batch_size=None)):
        busy(device)
        arrived.append(batch.mean())
    return {"arrived": torch.stack(arrived).tolist(), "expected": list(map(float, range(_BATCHES)))}


def slow_consumer(device: str) -> dict[str, Any]:
    """A program that computes longer than a batch takes to come: no more than three batches are there at once."""
    data = torch.arange(16.0).repeat_interleave(_ROWS)[:, None].expand(-1, _COLUMNS[device]).contiguous()
    loader = accelerator_of(device).prepare(DataLoader(TensorDataset(data), _ROWS, pin_memory=device == "cuda"))
    arrived = []
    with memory_of(device) as memory:
        for (batch,) in loader:
            time.sleep(0.005)
            busy(device)
            arrived.append(batch.mean())
    peak = memory.peak / (data[0].nbytes * _ROWS)
    fact("peak", round(peak, 2), "batches")
    return {"arrived": torch.stack(arrived).tolist(), "expected": list(map(float, range(16))), "peak": peak}


# Values and saves -----------------------------------------------------------------------------------------------------


def readings(device: str) -> dict[str, Any]:
    """Values that are computed late and changed early; with two cards also on the one that is not current."""
    devices = [device] if device == "cpu" else [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    if len(devices) == 1:
        fact("values_of_another_card", "left out: there is one card")
    read = []
    for place in devices:
        value = torch.zeros((), device=place)
        for step in range(20):
            busy(device, place)
            value.add_(1.0)
            reading = Reading({"loss": value, "step": step})
            value.mul_(1.0).add_(0.0)  # changed while it travels
            read.append((reading, {"loss": step + 1.0, "step": step}))
    return {"wrong": [[told.values(), expected] for told, expected in read if told.values() != expected]}


def saves(device: str) -> dict[str, Any]:
    """A save in the background, of a state that steps go on changing meanwhile, is that of its moment."""
    exactly()
    torch.manual_seed(0)
    accelerator = accelerator_of(device)
    width = 2048 if device == "cuda" else 64
    bare = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    weight = bare.get_parameter("0.weight")
    weight.data = weight.data.t()  # one that is not contiguous
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    batch = torch.randn(16, width, device=device)

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def state() -> list[Tensor]:
        moments = [value for values in optimizer.state.values() for value in values.values()]
        return [tensor.detach().clone() for tensor in (*bare.parameters(), *moments) if isinstance(tensor, Tensor)]

    step()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "state")
        blocked = []
        for _ in range(2):  # the second one into buffers that are there
            busy(device)
            step()
            expected = state()
            began = time.perf_counter()
            accelerator.save_state(target, blocking=False)
            blocked.append(round(time.perf_counter() - began, 3))
            for _ in range(5):
                step()
        accelerator._checkpoints.writer.join()
        accelerator.load_state(target)
    fact("blocked", blocked, "s")
    wrong = sum(not torch.equal(*pair) for pair in zip(state(), expected, strict=True))
    return {"tensors": len(expected), "wrong": wrong, "blocked_s": blocked}


# Precisions -----------------------------------------------------------------------------------------------------------

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CASES = {"no": False, "bf16": False, "fp16": False, "fp16, fused": True, "bf16, fused": True}


def _training(device: str, is_fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    exactly()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    x = torch.randn(6, 16, 32)
    batches = [(a, a.sum(1, keepdim=True)) for a in x]
    return model.to(device), torch.optim.AdamW(model.parameters(), lr=1e-2, fused=is_fused), [
        (a.to(device), b.to(device)) for a, b in batches
    ]  # fmt: skip


def precisions(device: str) -> dict[str, Any]:
    """How far the parameters of a prepared loop lie from those of plain torch; by precision."""
    off = {}
    for name, is_fused in _CASES.items():
        precision = name.partition(",")[0]
        plain, optimizer, batches = _training(device, is_fused)
        dtype = _DTYPES.get(precision)
        scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        for a, b in batches:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                output = plain(a)
            scaler.scale(F.mse_loss(output.float(), b)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        bare, inner, batches = _training(device, is_fused)
        accelerator = accelerator_of(device, precision)
        model, prepared = accelerator.prepare(bare, inner)
        for a, b in batches:
            accelerator.backward(F.mse_loss(model(a).float(), b))
            prepared.step()
            prepared.zero_grad()
        pairs = zip(plain.parameters(), bare.parameters(), strict=True)
        off[name] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    fact("off", off)
    return off


# Waits ----------------------------------------------------------------------------------------------------------------


class _Waits:
    """How often the program waits for the device while the block runs.

    On a card torch itself warns at each operation that waits; on the host numbers that are read are counted.
    """

    def __init__(self, device: str) -> None:
        self.count = 0
        self.where: list[str] = []
        self._is_card = device == "cuda"
        self._warnings: Any = warnings.catch_warnings(record=True)
        self._reads: Any = _Reads()
        self._caught: list[Any] = []

    def __enter__(self) -> _Waits:
        if self._is_card:
            self._caught = self._warnings.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        else:
            self._reads.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_card:
            torch.cuda.set_sync_debug_mode("default")
            self._warnings.__exit__(*exception)
            found = [one for one in self._caught if "synchronizing CUDA operation" in str(one.message)]
            self.count = len(found)
            self.where = [f"{Path(one.filename).name}:{one.lineno}" for one in found]
        else:
            self._reads.__exit__(*exception)
            self.count = self._reads.count


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _raw(device: str, precision: str) -> Callable[[], None]:
    model, optimizer, batches = _training(device, False)
    dtype = _DTYPES.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def step() -> None:
        a, b = batches[0]
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            output = model(a)
        scaler.scale(F.mse_loss(output.float(), b)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _prepared(device: str, precision: str, clips: bool = False) -> Callable[[], None]:
    bare, inner, batches = _training(device, False)
    accelerator = accelerator_of(device, precision)
    model, optimizer = accelerator.prepare(bare, inner)

    def step() -> None:
        a, b = batches[0]
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(a).float(), b))
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def _recovering(device: str, precision: str, parts: int = 1) -> Callable[[], None]:
    bare, inner, batches = _training(device, False)
    accelerator = accelerator_of(device, precision)
    model, optimizer = accelerator.prepare(bare, inner)

    def loss_fn(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1])

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.forward_backward(loss_fn, batches[0], micro_batch_size=16 // parts)
            optimizer.step()
            optimizer.zero_grad()

    return step


def waits(device: str) -> dict[str, Any]:
    """By way of training: how often one step waits for the device, in the median of several."""
    ways: dict[str, Callable[[], None]] = {}
    for precision in ("no", "bf16", "fp16"):
        ways[f"raw, {precision}"] = _raw(device, precision)
        ways[f"prepared, {precision}"] = _prepared(device, precision)
    ways["prepared, clipped"] = _prepared(device, "no", clips=True)
    ways["forward_backward"] = _recovering(device, "no")
    ways["forward_backward in 2 parts"] = _recovering(device, "no", parts=2)
    counts, where = {}, {}
    for name, step in ways.items():
        for _ in range(3):
            step()
        seen = []
        for _ in range(9):  # a loss is looked at once in a while
            with _Waits(device) as waiting:
                step()
            seen.append((waiting.count, waiting.where))
        counts[name], where[name] = sorted(seen)[len(seen) // 2]
    fact("waits", counts)
    fact("waits_where", {name: places for name, places in where.items() if places})
    return counts


CASES = {case.__name__: case for case in (opaque, epochs, refilled, slow_consumer, readings, saves, precisions, waits)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
