"""Compare two runs of a cell, and the gradients of all ranks with those of one process. Runs in the kernel.

Two more runs of the cell end at its first step, in fp32, without dropout and without clipping: one with all ranks, and
one with a process that takes their batches one after the other. The means of their gradients have to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbaccel.base.quantities import duration, listed
from nbaccel.base.settings import EACH
from nbaccel.features.check.findings import DryRunResult
from nbaccel.features.check.report import OK, RED, YELLOW, ReportLine
from nbaccel.launching.plan import LaunchPlan

__all__ = ["FullCheck", "StepGradients", "compared"]

_TOLERANCE = 1e-4
"""Relative difference of gradients that fp32 explains: sums of 1e6 products in another order differ by about
sqrt(1e6) * 2**-24 = 6e-5 of their size (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8)."""

_ORDER_OF_SUMS = (
    "; or a kernel of the GPU adds in another order each time, as torch.use_deterministic_algorithms(True) says"
)

_NOT_COMPARED = "gradients cannot be compared with those of one process"

_CAUSES_PREPARED = (
    "a model that is called around what prepare returned, an all_reduce without division, or work that depends on the "
    "rank"
)
_CAUSES_RAW = (
    "a loss that depends on the batch as a whole, such as one weighted by its number of tokens, or work that depends "
    "on the rank; --batches each gives ranks whole batches"
)


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The gradients of one rank at the step.

    Args:
        record: See `GradientProbe`.
        values: All of them, as a tensor.
    """

    record: Mapping[str, Any]
    values: Any

    @classmethod
    def read(cls, found: DryRunResult, folder: Path, rank: int) -> StepGradients | None:
        """Return what a rank has recorded; None if it came to no step."""
        import torch

        record = found.last("gradients", rank)
        if not record:
            return None
        data = bytearray((folder / f"gradients-{rank}.f32").read_bytes())
        return cls(record, torch.frombuffer(data, dtype=torch.float32) if data else torch.zeros(0, device="cpu"))

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter's name and values."""
        yield from zip(self.record["names"], self.values.split(self.record["sizes"]), strict=True)


class FullCheck:
    """The further runs of one cell.

    Args:
        again: Runs the dry run once more, from the folder of the first one's records, and returns what it found.
        attempt: Runs the cell to its first step, by a plan, see `GradientTask` for both numbers; returns what was
            found, and the gradients of each rank.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        again: Callable[[], DryRunResult],
        attempt: Callable[[LaunchPlan, int, int | None], tuple[DryRunResult, list[StepGradients | None]]],
    ) -> None:
        self._plan = plan
        self._again = again
        self._attempt = attempt

    def lines(self, first: DryRunResult) -> Iterator[ReportLine]:
        """Run the cell again, and yield the lines about it.

        Args:
            first: What the dry run has found.
        """
        if first.error is not None:
            yield ReportLine(YELLOW, "seeds and gradients were not checked: the cell did not come to its end")
            return
        began = time.monotonic()
        second = self._again()
        yield self._repeated(first, second)
        if first.world_size > 1 and not self._plan.settings.independent:
            are_alike = second.error is None and not _differing(first, second, "checksums")
            may_vary = second.error is None and bool(self._plan.devices.gpus)
            line = self._gradients() if are_alike or may_vary else None
            if line is None or (not are_alike and line.level == RED):
                line = ReportLine(YELLOW, f"{_NOT_COMPARED}: two runs of the ranks differ already")
            yield line
        yield ReportLine(OK, f"the further runs of --check full took {duration(time.monotonic() - began)}")

    # --- two runs

    def _repeated(self, first: DryRunResult, second: DryRunResult) -> ReportLine:
        if second.error is not None:
            return ReportLine(
                YELLOW, f"a second run of the cell failed, and the first one did not: {second.error.text}"
            )
        trained, seen = (_differing(first, second, key) for key in ("checksums", "seen"))
        names = trained + [name for name in seen if name not in first.incomparable and name not in trained]
        if not names:
            return ReportLine(OK, "two runs gave the same results")
        seed = self._plan.options.seed
        runs = "two runs" if seed is None else f"two runs with seed {seed}"
        if not trained and not set(names) & set(self._plan.options.names_back or ()):
            return ReportLine(YELLOW, f"{runs} differ in {listed(names)}, though not in what they trained")
        gpus = self._plan.devices.gpus
        return ReportLine(
            YELLOW if seed is None or gpus else RED,
            f"{runs} differ in {listed(names)}: random numbers come from outside of the seeds, such as "
            "np.random.default_rng() without a seed, os.urandom, or from the order in which threads or a set come"
            + (_ORDER_OF_SUMS if gpus else ""),
        )

    # --- gradients

    def _gradients(self) -> ReportLine:
        plan = replace(self._plan, settings=replace(self._plan.settings, mixed_precision="no", raw_precision=None))
        ranks = plan.devices.num_processes
        found, several = self._attempt(plan, 1, None)
        if why := _why_no_step(found, "in fp32"):
            return ReportLine(YELLOW, f"{_NOT_COMPARED}: {why}")
        of_ranks = [each for each in several if each is not None]
        if not of_ranks:
            return ReportLine(OK, "no optimizer steps, so there are no gradients to compare")
        if len(of_ranks) < ranks:
            return ReportLine(RED, f"{len(of_ranks)} of {ranks} ranks take a step: each of them has to")
        if why := next(filter(None, (_why_not(each.record) for each in of_ranks)), ""):
            return ReportLine(YELLOW, f"{_NOT_COMPARED}: {why}")
        record = of_ranks[0].record
        if plan.settings.batches == EACH and not {"prepared", "split"} & set(record["kinds"]):
            return ReportLine(YELLOW, f"{_NOT_COMPARED}: with --batches each, which one process does not know")
        is_own = "prepared" in record["kinds"] and "split" not in record["kinds"]
        alone = replace(plan, devices=replace(plan.devices, num_processes=1, gpus=plan.devices.of_rank(0)))
        found, (one, *_) = self._attempt(alone, ranks, None) if is_own else self._attempt(alone, 1, record["step"])
        if why := _why_no_step(found, "there"):
            return ReportLine(YELLOW, f"{_NOT_COMPARED}: {why}")
        if one is None:
            return ReportLine(YELLOW, f"{_NOT_COMPARED}: there no optimizer steps in {ranks} batches")
        return compared(of_ranks, one, is_own)


def _why_no_step(found: DryRunResult, where: str) -> str:
    """Return why a run that is to end at its first step has not come to it; empty if nothing has ended it before."""
    if found.is_late:
        return "the cell takes too long to its first step: load data and models in a cell before"
    return "" if found.error is None else f"{where} the cell fails: {found.error.text}"


def _why_not(record: Mapping[str, Any]) -> str:
    kinds = set(record["kinds"])
    if record["why_not"]:
        return str(record["why_not"])
    if "batch norm" in kinds:
        return "the model has batch statistics, which are those of a rank's batch"
    if "ddp" in kinds and not kinds & {"prepared", "split"}:
        return "its model is distributed, and no prepared loader hands out the batches"
    return ""


def compared(of_ranks: Sequence[StepGradients], one: StepGradients, is_own: bool) -> ReportLine:
    """Return the line on the gradients of ranks, beside those of one process.

    Args:
        is_own: Ranks have batches of their own.
    """
    ranks, step = len(of_ranks), of_ranks[0].record["step"]
    if why := _why_not(one.record):
        return ReportLine(YELLOW, f"{_NOT_COMPARED}: {why}")
    if one.record["parameters"] != of_ranks[0].record["parameters"]:
        return ReportLine(
            YELLOW, f"{_NOT_COMPARED}: the model begins with other weights there; --seed 7 makes them equal"
        )
    if not _have_same_samples(of_ranks, one):
        return ReportLine(
            YELLOW,
            f"{_NOT_COMPARED}: its samples are others there: the data set draws random numbers, or pads samples to the "
            "longest of their batch",
        )
    rows, its = sum(each.record.get("rows", 0) for each in of_ranks), one.record.get("rows", 0)
    if is_own and rows and its and rows != its:
        return ReportLine(
            YELLOW,
            f"{_NOT_COMPARED}: there are {its} samples in {ranks} batches, and {rows} in those of the ranks: the size "
            "of a batch depends on the number of processes",
        )
    if "draws" in one.record["kinds"]:
        return ReportLine(YELLOW, f"{_NOT_COMPARED}: the cell draws random numbers between its batches")
    if any(each.record["sizes"] != one.record["sizes"] for each in of_ranks):
        return ReportLine(RED, f"the ranks train other parameters than one process does, at step {step}")
    whole = float(one.values.norm())
    differences = [float((each.values - one.values).norm()) for each in of_ranks]
    worst = max(range(ranks), key=lambda rank: differences[rank])
    relative = differences[worst] / whole if whole else float(differences[worst] > 0)
    if relative <= _TOLERANCE:
        how = f"to {relative:.0e} of their size" if relative else "bit by bit"
        return ReportLine(OK, f"gradients of {ranks} ranks are those of one process at step {step} in fp32, {how}")
    shares = {
        name: float((mine - its).norm())
        for (name, mine), (_, its) in zip(of_ranks[worst].parts(), one.parts(), strict=True)
    }
    largest = max(shares, key=lambda name: shares[name])
    whose = f"{ranks} ranks" if differences[worst] < 1.01 * min(differences) else f"rank {worst}"
    causes = _CAUSES_PREPARED if is_own else _CAUSES_RAW
    return ReportLine(
        RED,
        f"gradients of {whose} differ from those of one process by {_percent(relative)} at step {step} (most in "
        f"{largest}): {causes}",
    )


def _percent(share: float) -> str:
    """
    >>> _percent(0.5), _percent(0.00043)
    ('50 %', '0.043 %')
    """
    return f"{share * 100:.0f} %" if share >= 0.1 else f"{share * 100:.2g} %"


def _have_same_samples(of_ranks: Sequence[StepGradients], one: StepGradients) -> bool:
    """Return whether one process has had the samples of all ranks. Some loaders have read ahead of the step."""
    several = {sample for each in of_ranks for sample in each.record["samples"]}
    alone = set(one.record["samples"])
    return several <= alone or alone <= several


def _differing(first: DryRunResult, second: DryRunResult, key: str) -> list[str]:
    """Return names that differ between two runs in some rank.

    Args:
        key: The key of the facts: "checksums" of parameters, or "seen".
    """
    found: dict[str, None] = {}
    for one, other in zip(first.facts, second.facts, strict=True):
        mine, its = one.get(key, {}), other.get(key, {})
        found |= {name: None for name in mine if name in its and mine[name] != its[name]}
    return list(found)
