"""The rows of ``make bench-gpu``: steps in every precision, batches that are moved, first steps, saves, recovery, two
ranks on one card, and a loop that prepares nothing. In wall time, up to the moment when the device has done everything.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.gpu.place import Place
from benchmarks.gpu.work import REAL, SMALL, Work
from benchmarks.harness import Row, installed
from benchmarks.party import Bout, Sample
from benchmarks.rows import recovery
from benchmarks.rows.saves import OURS, Store, available
from benchmarks.rows.starts import LAUNCHES, Function, Launch, bout
from nbaccel.base.hardware import Survey

__all__ = ["GROUPS", "Steps"]

_NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TOLERANCE = {"no": 1e-4, "tf32": 2e-3, "bf16": 2e-3, "fp16": 2e-3}
_FASTER = 1 / 1.7
_PATIENCE_S = 250.0  # that of a party is 300
_SETUP = "nbaccel.train.setup:setup_rank"  # as a cell has it


@dataclass(frozen=True)
class Steps:
    """A training as every contender runs it."""

    place: Place
    work: Work
    precision: str = "no"
    ranks: int = 1

    @property
    def mixed_precision(self) -> str:
        """What the toolkits are told; TF32 is a switch of torch."""
        return "no" if self.precision == "tf32" else self.precision

    def things(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        model, optimizer = self.work.make(self.place)
        samples = self.work.samples(self.place, self.place.steps * self.place.batch * self.ranks)
        is_pinned = self.place.device_type == "cuda"
        return model, optimizer, DataLoader(TensorDataset(samples), self.place.batch, pin_memory=is_pinned)

    def enter(self) -> torch.device:
        """In each process. Two ranks on one card exchange by gloo: NCCL would refuse them."""
        device = self.place.enter()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        if self.ranks > 1:
            os.environ["LOCAL_RANK"] = "0"
            dist.init_process_group("gloo")
        return device

    def bout(self, model: torch.nn.Module, epoch: Callable[[], None]) -> Bout:
        def turn() -> None:
            epoch()
            self.place.wait()

        return Bout(turn, lambda: torch.cat([part.detach().flatten()[:1000].cpu() for part in model.parameters()]))


def raw(steps: Steps) -> Bout:
    device = steps.enter()
    model, optimizer, loader = steps.things()
    model.to(device)
    if steps.ranks > 1:
        model = DistributedDataParallel(model)
        sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, shuffle=False)
        loader = DataLoader(loader.dataset, steps.place.batch, sampler=sampler, pin_memory=loader.pin_memory)
    dtype = _DTYPES.get(steps.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def epoch() -> None:
        for (batch,) in loader:
            moved = batch.to(device, non_blocking=True)
            with nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
                output = model(moved)
            scaler.scale(steps.work.loss(output, moved)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return steps.bout(model, epoch)


def _prepared(accelerator: Any, steps: Steps) -> Bout:
    model, optimizer, loader = accelerator.prepare(*steps.things())

    def epoch() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(steps.work.loss(model(batch), batch))
                optimizer.step()
                optimizer.zero_grad()

    return steps.bout(model, epoch)


def _is_cpu(steps: Steps) -> bool:
    return steps.place.device_type == "cpu"


def accelerate(steps: Steps) -> Bout:
    steps.enter()
    return _prepared(_accelerates(steps.place, mixed_precision=steps.mixed_precision), steps)


def _accelerates(place: Place, **options: Any) -> Any:
    """An `Accelerator` of theirs that copies pinned batches as raw does, which by default it does not."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    copying = DataLoaderConfiguration(non_blocking=True)
    return Accelerator(cpu=place.device_type == "cpu", dataloader_config=copying, **options)


def nbaccel(steps: Steps) -> Bout:
    steps.enter()
    from nbaccel import Accelerator

    return _prepared(Accelerator(steps.mixed_precision, cpu=_is_cpu(steps)), steps)


def recovering(steps: Steps) -> Bout:
    """The same by `forward_backward`."""
    steps.enter()
    from nbaccel import Accelerator

    accelerator = Accelerator(steps.mixed_precision, cpu=_is_cpu(steps))
    model, optimizer, loader = accelerator.prepare(*steps.things())

    def loss_fn(batch: Tensor) -> Tensor:
        return steps.work.loss(model(batch), batch)

    def epoch() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.forward_backward(loss_fn, batch)
                optimizer.step()
                optimizer.zero_grad()

    return steps.bout(model, epoch)


def fabric(steps: Steps) -> Bout:
    steps.enter()
    from lightning.fabric import Fabric

    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[steps.mixed_precision]
    one = Fabric(accelerator=steps.place.device_type, devices=1, precision=precision)
    bare, optimizer, loader = steps.things()
    model, optimizer = one.setup(bare, optimizer)
    loader = one.setup_dataloaders(loader)

    def epoch() -> None:
        for (batch,) in loader:
            one.backward(steps.work.loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()

    return steps.bout(bare, epoch)


Way = Callable[[Steps], Bout]


def _step_row(name: str, steps: Steps, ways: Mapping[str, Way], target: float) -> Row:
    makes = {way: (lambda make=make: make(steps)) for way, make in ways.items()}  # type: ignore[misc]
    return Row(
        name,
        installed(makes, _NEEDS),
        units=steps.place.steps,
        world_size=steps.ranks,
        turns=20,
        judged="wall",
        targets=_targets(steps.place, {way: target for way in ways if way.startswith("nbaccel")}),
        tolerance=_TOLERANCE[steps.precision],
    )


def _targets(place: Place, targets: Mapping[str, float]) -> Mapping[str, float]:
    """None on the host, whose times say nothing about a card."""
    return targets if place.device_type == "cuda" else {}


def steps(place: Place) -> Sequence[Row]:
    """Prepared loops, and `forward_backward`."""
    ways = {
        "raw": raw,
        "Accelerate": accelerate,
        "Fabric": fabric,
        "nbaccel": nbaccel,
        "nbaccel, forward_backward": recovering,
    }
    gpus = Survey.take().gpus if place.device_type == "cuda" else ()
    without = ("tf32", "bf16") if gpus and gpus[0].compute_capability < (8, 0) else ()  # emulated there, very slowly
    return [
        _step_row(f"step on {place.device_type}, {work.name}, {precision}", Steps(place, work, precision), ways, 1.05)
        for work in (SMALL, REAL)
        for precision in place.precisions
        if precision not in without
    ]


def ranks(place: Place) -> Sequence[Row]:
    """Two gloo ranks on one device. Gradients go through the host's memory, so a few steps make a turn."""
    place = replace(place, steps=min(place.steps, 4), batch=min(place.batch, 4))  # ten processes share a T4's memory
    ways = {"raw": raw, "Accelerate": accelerate, "nbaccel": nbaccel, "nbaccel, forward_backward": recovering}
    name = f"step of 2 gloo ranks on one {place.device_type}, transformer"
    return [_step_row(name, Steps(place, REAL, ranks=2), ways, 1.05)]


class _Blocks(Dataset[Tensor]):
    """Whole batches, pinned already where there is a card: what is left is the way to the device."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(0)
        blocks = [torch.randn(place.block) for _ in range(2)]
        self._blocks = [block.pin_memory() for block in blocks] if place.device_type == "cuda" else blocks
        self._count = place.steps

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return self._blocks[index % len(self._blocks)]


def _moving(place: Place, loader_of: Callable[[DataLoader[Any]], Any], device: torch.device) -> Bout:
    """A loop whose computing takes about as long as the way of a batch to the device."""
    torch.manual_seed(0)
    columns = place.block[1]
    weight = torch.randn(columns, columns // 4, device=device) / columns
    loader = loader_of(DataLoader(_Blocks(place), batch_size=None))
    total = torch.zeros((), device=device)

    def turn() -> None:
        total.zero_()
        for batch in loader:
            total.add_((batch.to(device, non_blocking=True) @ weight).square().mean())
        place.wait()

    return Bout(turn, lambda: total.cpu()[None])


def _moving_accelerate(place: Place) -> Bout:
    device = place.enter()
    return _moving(place, _accelerates(place).prepare, device)


def _moving_fabric(place: Place) -> Bout:
    device = place.enter()
    from lightning.fabric import Fabric

    return _moving(place, Fabric(accelerator=place.device_type, devices=1).setup_dataloaders, device)


def _moving_nbaccel(place: Place) -> Bout:
    device = place.enter()
    from nbaccel import Accelerator

    return _moving(place, Accelerator(cpu=place.device_type == "cpu").prepare, device)


def transfers(place: Place) -> Sequence[Row]:
    """The copy of the next batch while the program computes on this one."""
    ways: dict[str, Callable[[], Bout]] = {
        "raw": lambda: _moving(place, lambda loader: loader, place.enter()),
        "Accelerate": lambda: _moving_accelerate(place),
        "Fabric": lambda: _moving_fabric(place),
        "nbaccel": lambda: _moving_nbaccel(place),
    }
    name = f"batches moved to {place.device_type}"
    targets = _targets(place, {"nbaccel": 1.0})
    return [Row(name, installed(ways, _NEEDS), units=place.steps, turns=20, judged="wall", targets=targets)]


def _unmodified(place: Place) -> tuple[float, Tensor]:
    """Seconds of a pass that is not the first, and the parameters. As people write it: "cuda", without a number."""
    device = torch.device(place.device_type)
    model, optimizer = REAL.make(place)
    model.to(device)
    batch_size = 2 * place.batch
    samples = REAL.samples(place, place.steps * batch_size)
    loader = DataLoader(TensorDataset(samples), batch_size, pin_memory=device.type == "cuda")
    began = 0.0
    for _ in range(2):
        place.wait()
        began = time.perf_counter()
        for (batch,) in loader:
            moved = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            REAL.loss(model(moved), moved).backward()
            optimizer.step()
        place.wait()
    seconds = time.perf_counter() - began
    return seconds, torch.cat([part.detach().flatten()[:1000].cpu() for part in model.parameters()])


def _by_the_line(place: Place) -> tuple[float, Tensor]:
    """The same in two ranks, each with a card of its own."""
    from nbaccel import launch

    told: tuple[float, Tensor] = launch(_unmodified, 2, (place,), cpu=place.device_type == "cpu", setup=_SETUP).value
    return told


def _sharing_a_card(place: Place) -> tuple[float, Tensor]:
    """The same in two ranks on one card, which a launch refuses: by gloo, since NCCL would, too."""
    from nbaccel.testing import run_ranks

    told: tuple[float, Tensor] = run_ranks(2, _in_a_rank, place, timeout_s=_PATIENCE_S)[0]
    return told


def _in_a_rank(place: Place) -> tuple[float, Tensor]:
    from nbaccel.train.setup import setup_rank

    place.enter()
    dist.init_process_group("gloo")
    watch = setup_rank(None)
    assert watch is not None
    watch.begin(None)
    try:
        told = _unmodified(place)
        watch.end()
    finally:
        watch.stop()
        dist.destroy_process_group()
    return told


def _loops(place: Place, train: Callable[[Place], tuple[float, Tensor]]) -> Bout:
    """A training in each turn, of which a pass counts."""
    place.enter()
    ends: list[Tensor] = []

    def turn() -> Sample:
        seconds, end = train(place)
        ends.append(end)
        return Sample(seconds, 0.0)

    return Bout(turn, lambda: ends[-1])


def line(place: Place) -> Sequence[Row]:
    """An unmodified loop by the line alone, beside itself in one process. On one card it says what sharing costs."""
    place = replace(place, steps=min(place.steps, 10))
    has_two = place.device_type == "cpu" or len(Survey.take().gpus) > 1
    ways = {"raw": _unmodified, "nbaccel": _by_the_line if has_two else _sharing_a_card}
    cards = f"two {place.device_type}s" if has_two else f"one {place.device_type}"
    return [
        Row(
            f"unmodified loop, 2 ranks on {cards}, transformer",
            {way: (lambda train=train: _loops(place, train)) for way, train in ways.items()},  # type: ignore[misc]
            units=place.steps,
            turns=5,
            judged="wall",
            targets=_targets(place, {"nbaccel": _FASTER}) if has_two else {},
            tolerance=_TOLERANCE["no"],
        )
    ]


# The first step, saves, recovery --------------------------------------------------------------------------------------


def _first_step(way: Way, steps: Steps) -> Function:
    """In a fresh process: a device is made ready, a model prepared, and trained for one step."""

    def function() -> float:
        training = way(steps)
        training.turn()
        return float(training.result().double().sum())

    return function


def _launched(start_method: str, place: Place) -> Launch:
    def start(function: Callable[[Path], None], folder: Path, ranks: int) -> None:
        from nbaccel import launch

        launch(function, ranks, (folder,), start_method=start_method, cpu=place.device_type == "cpu")

    return start


def _first_bout(package: str, begin: Launch, function: Function) -> Bout:
    """package: loaded beforehand: how long that takes is another matter."""
    importlib.import_module(package)
    return bout(begin, function, 1, until_mark=True)


def first(place: Place) -> Sequence[Row]:
    """From the start of a process to the end of its first step; raw's, and those of the peers, are forks."""
    steps = Steps(replace(place, steps=1), SMALL)
    raw_launch = LAUNCHES["raw"]
    ways: dict[str, tuple[str, Launch, Way]] = {
        "raw": ("torch", raw_launch, raw),
        "Accelerate": ("accelerate", raw_launch, accelerate),
        "Fabric": ("lightning.fabric", raw_launch, fabric),
        "nbaccel": ("nbaccel.train", raw_launch, nbaccel),
        "nbaccel, launched": ("nbaccel.launch", _launched("fork", place), nbaccel),
        "nbaccel, by the zygote": ("nbaccel.launch", _launched("zygote", place), nbaccel),
    }
    present = installed({name: lambda: Bout(lambda: None, lambda: torch.zeros(0)) for name in ways}, _NEEDS)
    makes: dict[str, Callable[[], Bout]] = {
        name: partial(_first_bout, package, begin, _first_step(way, steps))
        for name, (package, begin, way) in ways.items()
        if name in present
    }
    targets = _targets(place, {"nbaccel": 1.1})
    name = f"first step on {place.device_type}"
    return [Row(name, makes, unit="ms", turns=5, judged="wall", targets=targets, tolerance=_TOLERANCE["no"])]


def saved(place: Place) -> Sequence[Row]:
    """Saves of what lies on the device; "in background" is how long a training is held up."""

    def saving(make: Callable[[int], Store]) -> Bout:
        place.enter()
        store = make(place.saved_mb)
        return Bout(store.save, store.loaded, store.close)

    makes: dict[str, Callable[[], Bout]] = {
        name: partial(saving, make) for name, make in available(place.device_type).items()
    }
    name = f"save of {place.saved_mb} MB from {place.device_type}"
    targets = _targets(place, {OURS: 1.15})
    return [Row(name, makes, unit="ms", turns=5, judged="wall", targets=targets)]


def recoveries(place: Place) -> Sequence[Row]:
    """From running out of memory, on purpose, to the next step that is done; two ranks where there are two devices."""
    has_two = place.device_type == "cpu" or len(Survey.take().gpus) > 1
    return [recovery.row(ranks, place.device_type) for ranks in ((1, 2) if has_two else (1,))]


GROUPS = {
    "steps": steps,
    "transfers": transfers,
    "first": first,
    "saves": saved,
    "recovery": recoveries,
    "ranks": ranks,
    "line": line,
}
