"""Compare what a program trained with Accelerate and with nbaccel; the table of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from public_programs.runs import SHARDED, Run

__all__ = ["Comparison", "table"]

_ROUNDING = 1e-3
"""Relative difference of a loss that the order of sums explains: rows are reduced in other pieces than a replica."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """theirs, ours: results of `carry_out`, None where the run was not made.

    replicated: nbaccel's result with the model on every rank, of a run that shards it; None otherwise.
    """

    run: Run
    theirs: dict[str, Any] | None
    ours: dict[str, Any] | None
    replicated: dict[str, Any] | None = None

    @property
    def theirs_works(self) -> bool:
        return self.theirs is not None and self.theirs["ok"]

    @property
    def is_defect(self) -> bool:
        """Whether it works with Accelerate and was found not to work with nbaccel.

        With several ranks losses are no part of it: the order of a shuffled loader is nbaccel's own. In shards they
        have to be those of the same program without. What an inference generates has to be Accelerate's.
        """
        if not self.theirs_works or self.ours is None:
            return False
        if self.is_to_be_refused:
            return not self.is_refused
        if self.ours["ok"] and self._is_replicated_known and self._distance_to_replicated() > _ROUNDING:
            return True
        if not _ends(self.ours) and _outputs(self.ours) != _outputs(self.theirs):
            return True
        ranks_are_equal = self.ranks_end_equal(self.ours) or not self.ranks_end_equal(self.theirs)
        return not (self.ours["ok"] and ranks_are_equal and self.steps_are_equal)

    @property
    def is_to_be_refused(self) -> bool:
        return self.run.starter in SHARDED and self.run.program.refused_sharded != ""

    @property
    def is_refused(self) -> bool:
        return self.ours is not None and not self.ours["ok"] and self.run.program.refused_sharded in self.ours["error"]

    @property
    def _is_replicated_known(self) -> bool:
        return self.replicated is not None and self.replicated["ok"]

    def _distance_to_replicated(self) -> float:
        theirs, ours = _losses(self.replicated), _losses(self.ours)
        return max(map(_distance, theirs, ours), default=0.0) if len(theirs) == len(ours) else math.inf

    @property
    def steps_are_equal(self) -> bool:
        """Where they follow from the losses, of a program that stops early, those of one process are compared only."""
        follow = self.run.program.steps_follow_losses and self.run.ranks > 1
        return follow or _steps(self.theirs) == _steps(self.ours)

    @staticmethod
    def ranks_end_equal(result: dict[str, Any] | None) -> bool:
        ends = [[optimizer["hash"] for optimizer in rank["optimizers"]] for rank in result["ranks"]] if result else []
        return all(end == ends[0] for end in ends)

    def verdict(self) -> str:
        if self.ours is None:
            return "not run"
        if self.is_to_be_refused and self.is_refused:
            return f"refused: {self.ours['error']}"
        if self.is_to_be_refused and self.ours["ok"]:
            return "works, and was to be refused"
        if not self.ours["ok"]:
            return self.ours["error"]
        if not self.ranks_end_equal(self.ours):
            return "ranks end unequal" + ("" if self.ranks_end_equal(self.theirs) else ", with Accelerate too")
        if not self.theirs_works:
            return "works" if self.theirs else "works, not compared"
        if not self.steps_are_equal:
            return f"steps {_steps(self.ours)}, with Accelerate {_steps(self.theirs)}"
        if self._is_replicated_known:
            return "of replicas: " + ", ".join(self._compared(self.replicated))
        return ", ".join(self._compared(self.theirs))

    def _compared(self, other: dict[str, Any] | None) -> list[str]:
        if not _ends(self.ours) and _outputs(self.ours):  # inference
            return [self._generated(other)]
        return [self._losses(other), self._parameters(other)]

    def _generated(self, other: dict[str, Any] | None) -> str:
        theirs, ours = _outputs(other), _outputs(self.ours)
        return (
            f"{len(ours)} outputs equal"
            if theirs == ours
            else f"{len(ours)} outputs, unlike Accelerate's {len(theirs)}"
        )

    def _losses(self, other: dict[str, Any] | None) -> str:
        theirs, ours = _losses(other), _losses(self.ours)
        if theirs == ours or (len(theirs) == len(ours) and all(map(_same, theirs, ours))):
            return f"{len(ours)} losses equal"
        if len(theirs) != len(ours):
            return f"{len(ours)} losses for {len(theirs)}"
        return f"losses differ by up to {max(map(_distance, theirs, ours)):.1g}"

    def _parameters(self, other: dict[str, Any] | None) -> str:
        theirs, ours = (_ends(r) for r in (other, self.ours))
        if not ours:
            return "nothing trained"
        if [end["hash"] for end in theirs] == [end["hash"] for end in ours]:
            return "parameters equal"
        return (
            f"parameters differ by {max(_distance(a['sum'], b['sum']) for a, b in zip(theirs, ours, strict=True)):.1g}"
        )


def _ends(result: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The optimizers of rank 0."""
    return result["ranks"][0]["optimizers"] if result and result["ranks"] else []


def _losses(result: dict[str, Any] | None) -> list[float]:
    """Of all ranks, one after the other."""
    return [loss for rank in result["ranks"] for loss in rank["losses"]] if result else []


def _outputs(result: dict[str, Any] | None) -> list[str]:
    """Hashes of what was generated, of all ranks, one after the other."""
    return [output for rank in result["ranks"] for output in rank.get("outputs", ())] if result else []


def _steps(result: dict[str, Any] | None) -> list[int]:
    return [optimizer["steps"] for optimizer in _ends(result)]


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _distance(one: float, other: float) -> float:
    """Relative; infinite where only one is finite."""
    if _same(one, other):
        return 0.0
    distance = abs(one - other) / max(abs(one), abs(other))
    return distance if math.isfinite(distance) else math.inf


def table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """A Markdown table, a line per run, and the sums."""
    yield "| program | repository | path | commit | started by | ranks | Accelerate | nbaccel |"
    yield "|---|---|---|---|---|---|---|---|"
    for comparison in comparisons:
        run, theirs = comparison.run, comparison.theirs
        program = run.program
        with_accelerate = "not run" if theirs is None else "works" if theirs["ok"] else theirs["error"]
        cells = (program.name, program.repository, program.path, program.commit, run.starter, str(run.ranks),
                 with_accelerate, comparison.verdict())  # fmt: skip
        yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
    yield ""
    yield from _sums(comparisons)


def _sums(comparisons: Iterable[Comparison]) -> Iterator[str]:
    kinds: dict[tuple[str, int], list[Comparison]] = {}
    for comparison in comparisons:
        kinds.setdefault((comparison.run.starter, comparison.run.ranks), []).append(comparison)
    for (starter, ranks), those in kinds.items():
        working = [comparison for comparison in those if comparison.theirs_works]
        done = [comparison for comparison in working if comparison.ours is not None]
        good = [comparison for comparison in done if not comparison.is_defect]
        equal = [c for c in good if "differ" not in c.verdict() and "losses for" not in c.verdict()]
        yield (
            f"{starter}, {ranks} rank{'s' * (ranks > 1)}: {len(working)} of {len(those)} work with Accelerate; "
            f"of the {len(done)} of these that were run {len(good)} work with nbaccel, {len(equal)} with equal bits."
        )
