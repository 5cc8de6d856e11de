"""Estimate the memory of a training on one rank, by strategy and number of ranks, before it runs. Runs anywhere.

`estimate_memory` counts parameters, gradients, optimizer states and, if a batch is given, activations; it computes
nothing, uses no device and calls no collective. `MemoryEstimate` is the result: a table, and which of the strategies
fits on the devices of this machine. Not counted: what kernels need inside of one operation (of cuBLAS it is), and what
an allocator loses between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import gigabytes, three_digits
from nbaccel.base.values import frozen
from nbaccel.errors import CannotSplit
from nbaccel.features.batch_size.examples import examples_of
from nbaccel.features.batch_size.fake_step import CannotFake, FakeModel
from nbaccel.features.batch_size.optimizer_trial import CannotTry, OptimizerUse, optimizer_class, try_optimizer
from nbaccel.features.batch_size.step_memory import StepSchedule, StepUse, replicated, sharded, without_batch
from nbaccel.features.sharded.groups import GroupPolicy
from nbaccel.train.oom.microbatch.slicing import Samples

__all__ = [
    "EstimateSetting",
    "EstimatedDevices",
    "MemoryEstimate",
    "StrategyUse",
    "estimate_memory",
    "estimate_of_accelerator",
]

SINGLE, DDP, ZERO2, FSDP = "single", "ddp", "fsdp zero2", "fsdp"

_DRIVER_BYTES = 800_000_000
"""Share of CUDA in each process: a context, and the kernels that it has loaded; 790 MB on an H100 (CUDA 13.0)."""

_NCCL_BYTES = 400_000_000
"""More of it in each of several processes: the buffers of NCCL; 390 MB there."""

_CUBLAS_BYTES = 75_000_000
"""Workspaces of cuBLAS, which come from torch's allocator: 72 MB on an H100, of which older cards take 8."""

_MOST_RANKS = 4096


@frozen
class EstimateSetting:
    """Choices of a run that change its memory.

    Args:
        views: DDP's gradients are views of its buckets.
        keeps: Gradients stay from one batch to the next (accumulation).
        policy: The rule by which FSDP forms groups.
        device_type: Where the optimizer steps.
    """

    mixed_precision: str = "no"
    views: bool = False
    keeps: bool = False
    policy: GroupPolicy | None = None
    device_type: str = "cpu"


@frozen
class EstimatedDevices:
    """Devices to fit on.

    Args:
        count: How many; 0 for the CPU, whose memory all ranks share.
        nbytes: The size of each in bytes.
        driver_bytes: CUDA's share of it.
        nccl_bytes: More of it where there are several ranks.
    """

    count: int
    nbytes: int
    name: str = ""
    driver_bytes: int = 0
    nccl_bytes: int = 0

    @classmethod
    def here(cls, survey: Survey | None = None) -> EstimatedDevices:
        """Return the GPUs of this machine, the smallest one counting, or its CPU."""
        found = Survey.take() if survey is None else survey
        if not found.gpus:
            return cls(0, found.ram.available_bytes, "CPU")
        least = min(found.gpus, key=lambda gpu: gpu.total_bytes)
        return cls(len(found.gpus), least.total_bytes, least.name, _DRIVER_BYTES, _NCCL_BYTES)

    def room(self, ranks: int) -> int:
        """Return the bytes that each of `ranks` ranks may take."""
        return self.nbytes - self.share(ranks) if self.count else self.nbytes // ranks

    def share(self, ranks: int) -> int:
        """Return the bytes of each device that CUDA takes for one of `ranks` ranks."""
        return self.driver_bytes + (self.nccl_bytes if ranks > 1 else 0)

    def __str__(self) -> str:
        if not self.count:
            return f"{gigabytes(self.nbytes)} of host memory"
        return f"{self.count} x {gigabytes(self.nbytes)}{f' ({self.name})' if self.name else ''}"


@frozen
class StrategyUse:
    """Bytes of one rank under a strategy.

    Args:
        strategy: "single", "ddp", "fsdp", or "fsdp zero2", which is fsdp with ``reshard_after_forward=False``.
    """

    strategy: str
    ranks: int
    use: StepUse


@frozen
class MemoryEstimate:
    """Memory of a training by strategy and number of ranks; prints as a table with a sentence.

    Args:
        rows: From the least communication to the most.
        notes: What was assumed, and what is not in it.
        sample_bytes: The bytes of activations for each sample of a batch; None if they are not known.
        needed_ranks: With which fsdp would fit on devices like these; None where no number helps.
    """

    rows: tuple[StrategyUse, ...]
    devices: EstimatedDevices
    notes: tuple[str, ...] = ()
    sample_bytes: int | None = None
    needed_ranks: int | None = None
    has_activations: bool = False

    def of(self, strategy: str, ranks: int = 1) -> StepUse:
        """Return the bytes of one rank.

        Raises:
            KeyError: They were not estimated; names what was.
        """
        for row in self.rows:
            if (row.strategy, row.ranks) == (strategy, ranks):
                return row.use
        known = ", ".join(f"{row.strategy} on {row.ranks}" for row in self.rows)
        raise KeyError(f"{strategy} on {ranks} was not estimated; there is {known}")

    def only(self, strategy: str) -> MemoryEstimate:
        """Return the rows of `strategy` alone; those of "fsdp" are both of its ways."""
        rows = tuple(row for row in self.rows if row.strategy.split()[0] == strategy)
        return replace(self, rows=rows) if rows else self

    @property
    def cheapest(self) -> StrategyUse | None:
        """The row of the least communication that fits on the devices; None if none does."""
        most = max(self.devices.count, 1) if self.devices.count else _MOST_RANKS
        fitting = (row for row in self.rows if row.ranks <= most)
        return next((row for row in fitting if row.use.peak <= self.devices.room(row.ranks)), None)

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self.notes, self.what_fits])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _table(self) -> Iterator[str]:
        rows: list[tuple[str, ...]] = [
            ("strategy", "ranks", "parameters", "gradients", "optimizer", "exchange", "activations", "peak")
        ]
        for row in self.rows:
            use = row.use
            parts = (use.parameters + use.buffers, use.gradients, use.states, use.exchange)
            activations = three_digits(use.activations) if self.has_activations else "not counted"
            rows.append((row.strategy, str(row.ranks), *map(three_digits, parts), activations, three_digits(use.peak)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for cells in rows:
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            yield "  ".join([first, *others]).rstrip()

    @property
    def what_fits(self) -> str:
        """One sentence: the cheapest strategy that fits, or what would."""
        devices, row = self.devices, self.cheapest
        least = min(self.rows, key=lambda row: row.use.peak)
        share_bytes = devices.share((row or least).ranks)
        share = f"with {gigabytes(share_bytes)} for the driver" if share_bytes else ""
        without = "" if share else "without the driver's share"
        if row is not None:
            where = "in one process" if row.ranks == 1 else f"on {row.ranks} ranks"
            said = f"{row.strategy} {where} is the cheapest that fits: {three_digits(row.use.peak)} per rank"
            return f"{said} ({share or without}), and there is {devices}."
        said = (
            f"It does not fit on {devices} under any strategy: {least.strategy} on {least.ranks} ranks takes "
            f"{three_digits(least.use.peak)} per rank ({share or without})"
        )
        helps = "mixed_precision, accelerator.gradient_checkpointing(model), a smaller batch or frozen layers"
        if self.needed_ranks is None:
            return f"{said}. More ranks do not help; {helps} need less."
        return f"{said}. fsdp needs about {self.needed_ranks} ranks; {helps} need less."


def estimate_memory(
    model: Module,
    optimizer: Optimizer | type[Optimizer] | Callable[..., Optimizer] | str = "AdamW",
    batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    ranks: Sequence[int] = (),
    setting: EstimateSetting | None = None,
    devices: EstimatedDevices | None = None,
) -> MemoryEstimate:
    """Return what training `model` takes; see `Accelerator.estimate`.

    Args:
        model: Without DDP around it.
        batch: Also a loader, of which some samples are read.
        ranks: Numbers of ranks; by default those of the devices, and twice as many.
        devices: By default this machine's.

    Raises:
        ValueError: There is no such optimizer, or a number of ranks is not positive.
        TypeError: `model` is no module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"estimate needs a torch.nn.Module, and this is a {type(model).__name__}")
    there = EstimatedDevices.here() if devices is None else devices
    chosen = EstimateSetting(device_type="cuda" if there.count else "cpu") if setting is None else setting
    several = sorted(set(ranks)) or [max(2, there.count), 2 * max(2, there.count)]
    if isinstance(batch, DataLoader):
        batch = examples_of(batch).take(getattr(batch, "batch_size", None) or 1)
    if several[0] < 1:
        raise ValueError(f"a number of ranks is at least 1, got {several[0]}")
    return _Estimate(model, optimizer, chosen, there).of(several, batch, loss_fn)


class _Estimate:
    """The parts of one estimate, and the sentences about what is missing in it."""

    def __init__(self, model: Module, optimizer: Any, setting: EstimateSetting, devices: EstimatedDevices) -> None:
        self._model, self._setting, self._devices = model, setting, devices
        self._notes: list[str] = []
        on_gpu = setting.device_type != "cpu"
        self._cublas = _CUBLAS_BYTES if on_gpu else 0
        self._fake = FakeModel(model, setting.mixed_precision, setting.policy, on_gpu)
        self._optimizer = optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
        self._tried: dict[int, OptimizerUse] = {}

    def of(self, ranks: Sequence[int], batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> MemoryEstimate:
        whole, rows_wise, sample_bytes = self._schedules(batch, loss_fn)
        setting = self._setting
        one = self._optimizer_use(1)
        alone = replicated(whole, one.states, one.temporaries, buckets=False, keeps=setting.keeps)
        rows = [StrategyUse(SINGLE, 1, self._with_cublas(alone))]
        for count in (count for count in ranks if count > 1):
            use = replicated(whole, one.states, one.temporaries, buckets=True, views=setting.views, keeps=setting.keeps)
            rows.append(StrategyUse(DDP, count, self._with_cublas(use)))
            rows += [
                StrategyUse(name, count, self._sharded(rows_wise, count, reshards))
                for name, reshards in ((ZERO2, False), (FSDP, True))
            ]
        estimate = MemoryEstimate(
            tuple(rows),
            self._devices,
            tuple(self._notes),
            sample_bytes,
            has_activations=bool(whole.activations),
        )
        if estimate.cheapest is not None:
            return estimate
        return replace(estimate, needed_ranks=self._needed(rows_wise, max(ranks)))

    def _sharded(self, schedule: StepSchedule, ranks: int, reshards: bool) -> StepUse:
        of_optimizer = self._optimizer_use(ranks)
        use = sharded(
            schedule,
            ranks,
            of_optimizer.states,
            of_optimizer.temporaries,
            reshards=reshards,
            keeps=self._setting.keeps,
            on_cpu=self._setting.device_type == "cpu",
        )
        return self._with_cublas(use)

    def _with_cublas(self, use: StepUse) -> StepUse:
        return replace(use, peak=use.peak + self._cublas)

    def _needed(self, schedule: StepSchedule, ranks: int) -> int | None:
        """Return with how many ranks fsdp fits, doubled from `ranks`; their optimizer is reckoned, not tried."""
        one, whole = self._optimizer_use(1), max(1, schedule.gradients())
        count = max(2, ranks)
        while count <= _MOST_RANKS and self._devices.count:
            part = schedule.gradients(count) / whole
            use = sharded(
                schedule, count, int(one.states * part), int(one.temporaries * part), keeps=self._setting.keeps
            )
            if use.peak + self._cublas <= self._devices.room(count):
                return count
            count *= 2
        return None

    # -- activations

    def _schedules(self, batch: Any, loss_fn: Any) -> tuple[StepSchedule, StepSchedule, int | None]:
        """Return a step of replicas, one of shards, and the activations of a sample."""
        fake = self._fake
        empty = without_batch(fake.weights, fake.root, fake.buffers)
        if batch is None:
            self._notes.append(
                "Without activations: accelerator.estimate(model, optimizer, batch, loss_fn=…) counts them too, where "
                "loss_fn(model, batch) returns the loss."
            )
            return empty, empty, None
        try:
            whole = fake.schedule(batch, loss_fn, False)
            rows_wise = whole if self._setting.mixed_precision == "no" else fake.schedule(batch, loss_fn, True)
        except CannotFake as error:
            self._notes.append(f"Without activations: the step cannot run without values ({error}).")
            return empty, empty, None
        sample_bytes = self._of_a_sample(whole, batch, loss_fn)
        if sample_bytes is not None:
            self._notes.append(f"Each sample of a batch takes {three_digits(sample_bytes)} of activations.")
        if loss_fn is None:
            self._notes.append("The loss is the model's own, or one like a cross entropy; loss_fn=… gives yours.")
        return whole, rows_wise, sample_bytes

    def _of_a_sample(self, whole: StepSchedule, batch: Any, loss_fn: Any) -> int | None:
        try:
            samples = Samples.of(batch)
            half = samples.count // 2
            if not half:
                return None
            fewer = self._fake.schedule(samples.take(0, half), loss_fn, False)
        except (CannotSplit, CannotFake):
            return None
        return max(0, whole.activations - fewer.activations) // (samples.count - half)

    # -- the optimizer

    def _optimizer_use(self, ranks: int) -> OptimizerUse:
        if ranks not in self._tried:
            self._tried[ranks] = self._try(ranks)
        return self._tried[ranks]

    def _try(self, ranks: int) -> OptimizerUse:
        known = {id(copy): original for original, copy in self._fake.copies.items()}
        originals = {id(parameter): parameter for parameter in self._model.parameters()}
        weights = [
            (originals[known[id(copy)]], weight.rows(ranks), _kept_as(copy.dtype, weight.item_bytes))
            for copy, weight in zip(self._fake.model.parameters(), self._fake.weights, strict=True)
            if weight.is_trained
        ]
        try:
            return try_optimizer(self._optimizer, weights, self._setting.device_type) if weights else OptimizerUse(0, 0)
        except CannotTry as error:
            if not any(note.startswith("The optimizer") for note in self._notes):
                self._notes.append(
                    f"The optimizer cannot be tried without values ({error}): two states for each parameter "
                    "are assumed."
                )
            trained = sum(prod(shape) * dtype.itemsize for _, shape, dtype in weights)
            return OptimizerUse(2 * trained, trained)


def _kept_as(dtype: torch.dtype, item_bytes: int) -> torch.dtype:
    """Return the dtype of a parameter that is trained: fp32, where mixed precision raises it."""
    return dtype if dtype.itemsize == item_bytes else torch.float32


def estimate_of_accelerator(
    model: Module,
    optimizer: Optimizer | type[Optimizer] | str,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    ranks: Sequence[int],
    setting: Mapping[str, Any],
) -> MemoryEstimate:
    """Return the estimate that `Accelerator.estimate` documents; `setting` has the fields of `EstimateSetting`."""
    return estimate_memory(model, optimizer, batch, loss_fn, ranks=ranks, setting=EstimateSetting(**setting))
