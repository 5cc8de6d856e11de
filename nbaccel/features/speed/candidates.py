"""Changes that may make a training faster, by what is known of it and of the machine. Runs in the kernel; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.speed_comparison import SpeedRow
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState, threads_per_rank

__all__ = ["Machine", "candidates", "refinements"]

_SHARE = 0.05
"""Share of the time of a training that waiting for batches takes at least, where more workers are worth a trial."""

_FACTORS = (2, 4, 8)
_FEWEST_STEPS = 8
"""Steps of an epoch that a larger batch leaves at least."""

_MANY_TENSORS = 8
"""Parameters of an optimizer from which on one call for all of them may be faster than one for each."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and devices of the ranks of a run.

    Args:
        ranks: Their number.
        cpus: The cores of all.
        threads: The threads of torch in each.
        capability: Compute capability of the weakest GPU; None without one.
    """

    ranks: int
    cpus: int
    threads: int
    capability: tuple[int, int] | None = None

    @property
    def cores(self) -> int:
        """The cores of each rank."""
        return max(1, self.cpus // self.ranks)

    def one_rank(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan of a cell with one rank, on the devices of the first, with the threads of all."""
        devices = replace(plan.devices, num_processes=1, gpus=plan.devices.of_rank(0))
        threads = threads_per_rank(self.cpus, 1, ProcessState.now().threads)
        return replace(plan, devices=devices, threads=threads)


def candidates(facts: Mapping[str, Any], machine: Machine, precision: str, has_samples: bool) -> list[SpeedRow]:
    """Return a row for each change that is worth a trial, those first that help most often.

    Args:
        facts: See `TrainingParts.facts`, with the times of the trial.
        precision: The precision of the cell.
        has_samples: The samples of a step are known, so that batch sizes can be compared.
    """
    # The work of a step is often too little to be shared: then one rank alone is faster than several.
    rows = [SpeedRow(SpeedChange(ranks=1), "ranks")] if machine.ranks > 1 and has_samples else []
    if (loader := facts.get("loader")) is not None:
        rows += [
            SpeedRow(SpeedChange(loader={"num_workers": count}), "workers")
            for count in _workers(facts, loader, machine)
        ]
        if has_samples and loader["can_grow"]:
            rows += [SpeedRow(SpeedChange(batch_factor=factor), "batch size") for factor in _factors(loader, machine)]
        if machine.capability is not None and not loader["pin_memory"]:
            rows.append(SpeedRow(SpeedChange(loader={"pin_memory": True}), "pin_memory"))
        if loader["num_workers"]:
            rows += _of_workers(loader, {})
    optimizer, model = facts.get("optimizer"), facts.get("model")
    if optimizer and _may_fuse(optimizer):
        rows.append(SpeedRow(SpeedChange(optimizer={"fused": True}), "optimizer"))
    if machine.capability is not None and precision == "no":
        best = "bf16" if machine.capability >= (8, 0) else "fp16"
        if machine.capability >= (7, 0):
            note = "" if facts.get("is_prepared", True) else "not tried: -p is for what is prepared"
            rows.append(SpeedRow(SpeedChange(precision=best), "precision", note=note))
    if model:
        if model["has_convolutions"]:
            rows.append(SpeedRow(SpeedChange(channels_last=True), "memory format"))
        if not model["is_compiled"]:
            rows.append(SpeedRow(SpeedChange(compiles=True), "compile"))
    if machine.capability is None:
        counts = sorted({1, machine.cores} - {machine.threads})
        rows += [SpeedRow(SpeedChange(threads=count), "threads") for count in counts]
    return rows


def refinements(facts: Mapping[str, Any], best: SpeedRow) -> list[SpeedRow]:
    """Return rows that build upon the best number of workers."""
    loader = facts.get("loader")
    if best.family != "workers" or loader is None or not best.change.loader.get("num_workers"):
        return []
    return _of_workers(loader, best.change.loader)


def _of_workers(loader: Mapping[str, Any], on: Mapping[str, Any]) -> list[SpeedRow]:
    rows = []
    if not loader["persistent_workers"]:
        rows.append(
            SpeedRow(SpeedChange(loader={**on, "persistent_workers": True}), "workers" if on else "persistent_workers")
        )
    rows.append(SpeedRow(SpeedChange(loader={**on, "prefetch_factor": 4}), "workers" if on else "prefetch_factor"))
    return rows


def _workers(facts: Mapping[str, Any], loader: Mapping[str, Any], machine: Machine) -> Iterator[int]:
    """Yield numbers of workers, the smaller first: fewer ones always, more where the program waits for batches."""
    present = int(loader["num_workers"])
    trained_s = float(facts["whole_s"]) - float(facts["first_step_s"])
    waits = trained_s <= 0 or float(facts["loader_s"]) > _SHARE * trained_s
    counts = {0, present // 2} if present else set()
    if waits:
        counts |= {1, 2, 4, machine.cores}
    yield from sorted(count for count in counts - {present} if count <= max(4, 2 * machine.cores))


def _may_fuse(optimizer: Mapping[str, Any]) -> bool:
    is_open = optimizer["is_of_torch"] and optimizer["can_fuse"] and not optimizer["fused"]
    return bool(is_open) and int(optimizer["tensors"]) >= _MANY_TENSORS


def _factors(loader: Mapping[str, Any], machine: Machine) -> Iterator[int]:
    """Yield factors of the batch size that leave an epoch some steps."""
    samples = loader["samples"]
    for factor in _FACTORS:
        size = int(loader["batch_size"]) * factor
        if samples is None or size * machine.ranks * _FEWEST_STEPS <= samples:
            yield factor
