"""Restarting: decides whether a run whose rank died of memory starts again with smaller batches, and says why if not.

Runs in the kernel, between one attempt and the next. It decides and words; `Launcher` acts. The effective batch does
not change: the ranks of the next attempt cut every batch of a training loop into more parts (`RunSettings.split`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nbaccel.demand import WHAT_HELPS, Demand, in_words
from nbaccel.events import LoopEntered
from nbaccel.failures import Failure, classify
from nbaccel.hardware import Gpu
from nbaccel.launch.group import Ended
from nbaccel.launch.holdings import Holding
from nbaccel.launch.hostmemory import HostMemory
from nbaccel.launch.report import Link, Place, signal_name
from nbaccel.launch.spec import LaunchSpec
from nbaccel.launch.witness import Witness
from nbaccel.settings import SHRINK, RunSettings

__all__ = ["Again", "Attempt", "Over", "Restarting", "wait_for_memory"]

_MOST_RESTARTS = 5
_LONGEST_LOSS_S = 600.0
_NAMES_SHOWN = 3
_KERNEL_IS_TO_BLAME = 0.5
"""Share of a device from which the memory that the notebook itself holds there is taken for the cause."""

_WORTH_SAYING = 0.005
"""Share of a device that the notebook holds, below which it is not mentioned."""

_UNKNOWN_BATCH = 1000

_LONGEST_RELEASE_S = 2.0
_RELEASE_LOOK_S = 0.05
_NOISE_BYTES = 100_000_000
"""Bytes that others, or the notebook, may have taken of a GPU meanwhile; a rank's context alone is more."""

_WHAT_HELPS = f"Smaller batches do not help; what does: {WHAT_HELPS}"

_OPTIMIZERS = os.path.join("torch", "optim", "")
"""Part of the path of a traceback's line: activations are freed by then, and smaller batches may not help."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One ended run of a spec, and the observations of it."""

    spec: LaunchSpec
    ended: Ended
    witness: Witness
    host: HostMemory


def _new_checkpoint(attempt: Attempt) -> str:
    """Return the newest checkpoint of a run that saves itself and whose loop can begin in the middle; else nothing.

    Without one, the next attempt begins where this one did.
    """
    saves_itself = RunSettings.from_env(attempt.spec.environ).checkpoint_every is not None
    return attempt.witness.checkpoint if saves_itself and attempt.witness.announces_epochs else ""


@dataclass(frozen=True, slots=True)
class Again:
    """Decision to start the run again. line: the text for the user."""

    spec: LaunchSpec
    line: str


@dataclass(frozen=True, slots=True)
class Over:
    """Decision that the run is over. report: the text on memory beside the error; empty if it has another cause."""

    report: str = ""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A request for memory that was refused.

    places: the lines that led to it.
    """

    rank: int
    places: tuple[Place, ...]
    demand: Demand

    @classmethod
    def of(cls, rank: int, link: Link) -> _Refusal | None:
        return None if link.demand is None else cls(rank, tuple(link.places), link.demand)

    def hopeless(self, loop: LoopEntered, earlier: Sequence[tuple[_Refusal, LoopEntered]]) -> str:
        """Return why no batch would fit, with sizes; empty if that is not known.

        loop: the loop of the request.  earlier: the requests of earlier attempts, with their loops.
        """
        demand = self.demand
        if demand.is_beyond_the_limit:
            return (
                f"parameters ({in_words(demand.parameters_bytes)}), gradients "
                f"({in_words(demand.gradients_bytes)}), optimizer states ({in_words(demand.states_bytes)}) and "
                f"the {in_words(demand.asked_bytes)} that were asked for exceed the limit of "
                f"{in_words(demand.limit_bytes)} without any batch. {_WHAT_HELPS}"
            )
        for other, other_loop in earlier:
            one, larger = _samples_at_once(loop), _samples_at_once(other_loop)
            is_alike = other.rank == self.rank and other.places == self.places
            if is_alike and demand.is_hopeless(one, other.demand, larger):
                needed_bytes = demand.needed_for_one(one, other.demand, larger)
                return (
                    f"the same {in_words(demand.asked_bytes)} were asked for at the same line as with "
                    f"{_sizes(other_loop, other_loop.parts)}, and a single sample would not fit either: "
                    f"{in_words(demand.used_bytes)} were in use (with {_sizes(other_loop, other_loop.parts)}: "
                    f"{in_words(other.demand.used_bytes)}), the limit is {in_words(demand.limit_bytes)}, and "
                    f"one sample needs {in_words(needed_bytes)}. {_WHAT_HELPS}"
                )
        return ""


@dataclass(frozen=True, slots=True)
class _Death:
    """A rank's death of memory.

    how: "ran out of memory".  why: the known or likely reason.
    doubt: a sign against memory, or against smaller batches, if it occurs a second time; empty for none.
    refusal: the request for memory that it died of, if one is known.
    """

    rank: int
    how: str
    why: str = ""
    doubt: str = ""
    refusal: _Refusal | None = None

    @classmethod
    def of(cls, attempt: Attempt) -> _Death | None:
        """Return the death of memory; None if the run ended well, was stopped, or failed for another reason."""
        ended, rank = attempt.ended, attempt.ended.first_failed
        if rank is None or ended.is_interrupted or ended.is_timed_out or ended.hang is not None:
            return None
        report = ended.reports[rank]
        if report is None:
            if ended.exit_codes[rank] != -signal.SIGKILL:
                return None
            return cls(rank, f"was killed by {signal_name(signal.SIGKILL)}", attempt.host.explain_kill())
        for link in _causes(report.links) if report.status == "failed" else ():
            demand = link.demand or Demand()
            # `classify` takes the class and the text apart: a headline begins with the class.
            text = "\n".join(link.headline).partition(": ")[2]
            match classify(link.type_name, text, demand.fullness):
                case Failure.OUT_OF_MEMORY if any(_OPTIMIZERS in place[0] for place in link.places):
                    where = "the optimizer's step"
                    return cls(rank, "ran out of memory", "in an optimizer's step", where, _Refusal.of(rank, link))
                case Failure.OUT_OF_MEMORY:
                    return cls(rank, "ran out of memory", refusal=_Refusal.of(rank, link))
                case Failure.DEVICE_LOST:
                    return cls(rank, "lost its device", link.headline[-1], doubt=link.headline[-1])
        return None


class Restarting:
    """Restart policy of one run, asked after every attempt.

    holdings: returns the memory that the notebook itself holds on devices.
    """

    def __init__(self, holdings: Callable[[], Sequence[Holding]] = tuple) -> None:
        self._holdings = holdings
        self._restarts = 0
        self._left_behind: dict[str, None] = {}  # an ordered set
        self._doubts: set[str] = set()
        self._refusals: list[tuple[_Refusal, LoopEntered]] = []

    def after(self, attempt: Attempt) -> Again | Over:
        """Decide what follows `attempt`."""
        death = _Death.of(attempt)
        if death is None:
            return Over()
        loop = attempt.witness.loop(death.rank)
        held = [holding for holding in self._holdings() if holding.nbytes]
        checkpoint = _new_checkpoint(attempt)
        happened = f"rank {death.rank} {death.how}{_at(loop)}{death.why and f' ({death.why})'}"
        reason = self._reason_to_stop(attempt, death, loop, held, checkpoint)
        if reason or loop is None:
            return Over("; ".join([happened, f"not started again: {reason}", *_said_of(held)]) + ".")
        self._restarts += 1
        self._doubts.add(death.doubt)
        if death.refusal is not None:
            self._refusals.append((death.refusal, loop))
        spec = _smaller(attempt.spec, attempt.ended, loop, checkpoint)
        return Again(spec, "; ".join([happened, *self._said(attempt, loop, spec), *_said_of(held)]))

    def _reason_to_stop(
        self,
        attempt: Attempt,
        death: _Death,
        loop: LoopEntered | None,
        held: Sequence[Holding],
        checkpoint: str,
    ) -> str:
        """Return why the run is not started again; empty if it is."""
        if loop is None:
            return "nothing of ours can be cut, since no batch of a DataLoader had been handed out"
        if loop.obstacle:
            return f"nothing of ours can be cut, since {loop.obstacle}"
        if loop.parts < (RunSettings.from_env(attempt.spec.environ).split or 1):
            return "batches of this loop came whole all the same"
        if attempt.witness.smallest:
            return f"forward_backward has cut the batches down to {_samples(attempt.witness.smallest)} already"
        large = [holding for holding in held if holding.share > _KERNEL_IS_TO_BLAME]
        if large:
            return f"smaller batches do not help where the notebook itself holds {large[0].share:.0%} of the device"
        hopeless = "" if death.refusal is None else death.refusal.hopeless(loop, self._refusals)
        if hopeless:
            return hopeless
        if death.doubt and death.doubt in self._doubts:
            return "it was the same with larger batches, so smaller ones will not help"
        parts = _parts_of_next(loop)
        if attempt.spec.stays:
            return (
                "ranks that stay never are (--oom is for cells that have ranks of their own: after %accelerate stop "
                f"this one would go on {_in_parts(loop, parts)})"
            )
        if attempt.spec.oom != SHRINK:
            return f"--oom shrink, or oom='shrink' in a launch, would go on {_in_parts(loop, parts)}"
        if attempt.spec.no_restart:
            return f"{attempt.spec.no_restart} it would go on {_in_parts(loop, parts)}"
        if self._restarts >= _MOST_RESTARTS:
            return f"it was {_MOST_RESTARTS} times already"
        if attempt.ended.seconds > _LONGEST_LOSS_S and not checkpoint:
            minutes = attempt.ended.seconds / 60
            return (
                f"{minutes:.0f} minutes of work would be lost, and there is no checkpoint to go on from (by hand: a "
                f"batch_size of {_half(loop)} and twice the accumulation)"
            )
        return ""

    def _said(self, attempt: Attempt, loop: LoopEntered, spec: LaunchSpec) -> list[str]:
        """Return what changes in the next attempt, that of `spec`, and what the earlier ones leave behind."""
        parts = _parts_of_next(loop)
        resume = RunSettings.from_env(spec.environ).resume
        whence = "" if resume is None else f" from {resume or 'the newest checkpoint'}"
        said = [
            f"started again{whence} {_in_parts(loop, parts)}{_effective(loop, attempt.spec.world_size)}",
        ]
        rounds = -(-parts // loop.sharing_ranks)
        if rounds > 1:
            said.append(f"the loop's body runs {rounds} times per batch, each loss weighed as a mean over its samples")
        if loop.batch_norms:
            said.append(f"BatchNorm layers see the samples of one part at a time: {_some(loop.batch_norms)}")
        self._left_behind |= dict.fromkeys([*attempt.witness.opened, *attempt.ended.open_files])
        if self._left_behind:
            whose = "the first attempt" if self._restarts == 1 else "earlier attempts"
            said.append(f"files and trackers {whose} opened: {', '.join(self._left_behind)}")
        return said


def wait_for_memory(gpus: Sequence[Gpu], ended: Ended, look: Callable[[], Sequence[Gpu]]) -> None:
    """Wait until the driver has freed the memory of killed ranks, for at most 2 s.

    It frees the memory of a killed process some 100 ms late, and the next attempt would find it taken.
    gpus: those of the attempt, as they were before it.  look: returns their present state.
    """
    if not gpus or not any(code < 0 for code in ended.exit_codes):
        return
    before = {gpu.uuid: gpu.used_bytes for gpu in gpus}
    deadline = time.monotonic() + _LONGEST_RELEASE_S
    while any(gpu.used_bytes > before.get(gpu.uuid, gpu.used_bytes) + _NOISE_BYTES for gpu in look()):
        if time.monotonic() > deadline:
            return
        time.sleep(_RELEASE_LOOK_S)


def _causes(links: Sequence[Link]) -> Sequence[Link]:
    """Return the error that left the cell, and those that directly caused it: ``raise … from``."""
    causes: list[Link] = []
    for link in reversed(links):
        if causes and link.relation != "which directly caused:":
            break
        causes.append(link)
    return causes


def _smaller(spec: LaunchSpec, ended: Ended, loop: LoopEntered, checkpoint: str) -> LaunchSpec:
    environ = {**spec.environ, **RunSettings(split=_parts_of_next(loop), resume=checkpoint or None).environ()}
    left_s = None if spec.timeout_s is None else max(0.0, spec.timeout_s - ended.seconds)
    return replace(spec, environ=environ, timeout_s=left_s, program_limit=ended.program_limit)


def _parts_of_next(loop: LoopEntered) -> int:
    """Return the parts of each batch in the next attempt; ranks that share one divide it before it is cut further."""
    return loop.sharing_ranks if loop.parts < loop.sharing_ranks else 2 * loop.parts


def _samples_at_once(loop: LoopEntered) -> float:
    """Return the samples of one forward; if batches have no size, the number for batches of 1,000."""
    return max(1.0, (loop.samples or _UNKNOWN_BATCH) / loop.parts)


def _at(loop: LoopEntered | None) -> str:
    if loop is None or loop.samples is None:
        return ""
    return f" at {_sizes(loop, loop.parts)}" + (" per rank" if loop.sharing_ranks == 1 else "")


def _in_parts(loop: LoopEntered, parts: int) -> str:
    return f"with {_sizes(loop, parts) if loop.samples is not None else f'each batch in {parts} parts'}"


def _sizes(loop: LoopEntered, parts: int) -> str:
    samples = loop.samples or 0
    return str(samples) if parts == 1 else f"{min(parts, samples)} x {-(-samples // parts)}"


def _samples(count: int) -> str:
    return "single samples" if count == 1 else f"{count} samples"  # with BatchNorm it takes two


def _half(loop: LoopEntered) -> str:
    return "half the size" if loop.samples is None else str(max(1, loop.samples // (2 * loop.parts)))


def _effective(loop: LoopEntered, world_size: int) -> str:
    if loop.samples is None:
        return ", effective batch unchanged"
    ranks = world_size if loop.sharing_ranks == 1 else 1
    return f", effective batch {loop.samples * loop.batches_per_step * ranks} unchanged"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _said_of(held: Sequence[Holding]) -> list[str]:
    return [f"the notebook itself holds {holding}" for holding in held if holding.share >= _WORTH_SAYING]
