"""Restart after memory ran out: whether a run starts again, smaller, and why if not. Runs in the kernel.

`OomRestartPolicy` decides and words, between one attempt and the next; `Launcher` acts. The effective batch does not
change: the ranks of the next attempt cut every batch of a training loop into more parts (`RunSettings.split`).
`PartsRestartPolicy` restarts a run that failed on parts of batches, for no want of memory, with whole ones.
Both are made at the first failure of a run; what they read of each attempt is in `attempts`.

Reasons: docs/design/out-of-memory.md
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nbaccel.base.events import LoopEntered
from nbaccel.base.failures import Failure
from nbaccel.base.hardware import Gpu
from nbaccel.base.memory_request import WHAT_HELPS, MemoryRequest
from nbaccel.base.settings import SHRINK, STATES, WHOLE, RunSettings
from nbaccel.launching.attempts import LaunchAttempt
from nbaccel.launching.ipc.reports import ErrorLink, Place, signal_name
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.kernel_holdings import KernelHolding
from nbaccel.launching.processes.rank_results import RankResults

__all__ = [
    "GiveUp",
    "OomRestartPolicy",
    "PartsRestartPolicy",
    "Restart",
    "wait_for_memory",
]

_MOST_RESTARTS = 5
_LONGEST_LOSS_S = 600.0
_NAMES_SHOWN = 3
_KERNEL_IS_TO_BLAME = 0.5
"""Share of a device from which the memory that the notebook itself holds there is taken for the cause."""

_WORTH_SAYING = 0.005
"""Share of a device that the notebook holds, below which it is not mentioned."""

_UNKNOWN_BATCH = 1000

_LONGEST_ERROR = 100

_LONGEST_RELEASE_S = 2.0
_RELEASE_LOOK_S = 0.05
_NOISE_BYTES = 100_000_000
"""Bytes that others, or the notebook, may have taken of a GPU meanwhile; a rank's context alone is more."""

_WHAT_HELPS = f"Smaller batches do not help; what does: {WHAT_HELPS}"

_OPTIMIZERS = os.path.join("torch", "optim", "")
"""Part of the path of a traceback's line: activations are freed by then, and smaller batches may not help."""


def _new_checkpoint(attempt: LaunchAttempt) -> str:
    """Return the newest checkpoint of a run that saves itself and whose loop can begin in the middle; else nothing.

    Without one, the next attempt begins where this one did.
    """
    saves_itself = attempt.spec.settings.checkpoint_every is not None
    recorder = attempt.recorder
    return recorder.checkpoint if saves_itself and (recorder.announces_epochs or recorder.goes_on) else ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Decision to start the run again.

    Args:
        line: The text for the user.
    """

    spec: LaunchSpec
    line: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision that the run is over.

    Args:
        report: The text on memory beside the error; empty if it has another cause.
    """

    report: str = ""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A request for memory that was refused.

    Args:
        places: The lines that led to it.
    """

    rank: int
    places: tuple[Place, ...]
    demand: MemoryRequest

    @classmethod
    def of(cls, rank: int, link: ErrorLink) -> _Refusal | None:
        return None if link.demand is None else cls(rank, tuple(link.places), link.demand)

    def hopeless(self, loop: LoopEntered, earlier: Sequence[tuple[_Refusal, LoopEntered]]) -> str:
        """Return why no batch would fit, with sizes; empty if that is not known.

        Args:
            loop: The loop of the request.
            earlier: The requests of earlier attempts, with their loops.
        """
        demand = self.demand
        if demand.is_beyond_the_limit:
            return (
                f"parameters ({describe_size(demand.parameters_bytes)}), gradients "
                f"({describe_size(demand.gradients_bytes)}), optimizer states ({describe_size(demand.states_bytes)}) "
                f"and the {describe_size(demand.asked_bytes)} that were asked for exceed the limit of "
                f"{describe_size(demand.limit_bytes)} without any batch. {_WHAT_HELPS}"
            )
        for other, other_loop in earlier:
            one, larger = _samples_at_once(loop), _samples_at_once(other_loop)
            is_alike = other.rank == self.rank and other.places == self.places
            if is_alike and demand.is_hopeless(one, other.demand, larger):
                needed_bytes = demand.needed_for_one(one, other.demand, larger)
                return (
                    f"the same {describe_size(demand.asked_bytes)} were asked for at the same line as with "
                    f"{_sizes(other_loop, other_loop.parts)}, and a single sample would not fit either: "
                    f"{describe_size(demand.used_bytes)} were in use (with {_sizes(other_loop, other_loop.parts)}: "
                    f"{describe_size(other.demand.used_bytes)}), the limit is {describe_size(demand.limit_bytes)}, and "
                    f"one sample needs {describe_size(needed_bytes)}. {_WHAT_HELPS}"
                )
        return ""


@dataclass(frozen=True, slots=True)
class _Death:
    """A rank's death of memory.

    Args:
        how: "ran out of memory".
        why: The known or likely reason.
        doubt: A sign against memory, or against smaller batches, if it occurs a second time; empty for none.
        refusal: The request for memory that it died of, if one is known.
    """

    rank: int
    how: str
    why: str = ""
    doubt: str = ""
    refusal: _Refusal | None = None

    @classmethod
    def of(cls, attempt: LaunchAttempt) -> _Death | None:
        """Return the death of memory; None if the run ended well, was stopped, or failed for another reason."""
        ended, rank = attempt.ended, attempt.ended.first_failed
        if rank is None or ended.is_interrupted or ended.is_timed_out or ended.hang is not None:
            return None
        report = ended.reports[rank]
        if report is None:
            if ended.exit_codes[rank] != -signal.SIGKILL:
                return None
            doubt = "nothing shows that memory ran out" if attempt.host.kills == 0 else ""
            return cls(rank, f"was killed by {signal_name(signal.SIGKILL)}", attempt.host.explain_kill(), doubt=doubt)
        if (link := report.cause) is None:
            return None
        match link.kind:
            case Failure.OUT_OF_MEMORY if any(_OPTIMIZERS in place[0] for place in link.places):
                where = "the optimizer's step"
                return cls(rank, "ran out of memory", "in an optimizer's step", where, _Refusal.of(rank, link))
            case Failure.OUT_OF_MEMORY:
                return cls(rank, "ran out of memory", refusal=_Refusal.of(rank, link))
            case Failure.DEVICE_LOST:
                return cls(rank, "lost its device", link.headline[-1], doubt=link.headline[-1])
            case _:
                return None


class OomRestartPolicy:
    """Restart policy of one run, asked after every attempt.

    Args:
        holdings: Returns the memory that the notebook itself holds on devices.
    """

    def __init__(self, holdings: Callable[[], Sequence[KernelHolding]] = tuple) -> None:
        self._holdings = holdings
        self._restarts = 0
        self._left_behind: dict[str, None] = {}  # an ordered set
        self._doubts: set[str] = set()
        self._refusals: list[tuple[_Refusal, LoopEntered]] = []

    def after(self, attempt: LaunchAttempt) -> Restart | GiveUp:
        """Decide what follows `attempt`."""
        death = _Death.of(attempt)
        if death is None:
            return GiveUp()
        loop = attempt.recorder.loop(death.rank)
        held = [holding for holding in self._holdings() if holding.nbytes]
        checkpoint = _new_checkpoint(attempt)
        happened = f"rank {death.rank} {death.how}{_at(loop)}{death.why and f' ({death.why})'}"
        reason = self._reason_to_stop(attempt, death, loop, held, checkpoint)
        if reason or loop is None:
            return GiveUp("; ".join([happened, f"not started again: {reason}", *_said_of(held)]) + ".")
        self._restarts += 1
        self._doubts.add(death.doubt)
        if death.refusal is not None:
            self._refusals.append((death.refusal, loop))
        spec = _smaller(attempt.spec, attempt.ended, loop, checkpoint)
        return Restart(spec, "; ".join([happened, *self._said(attempt, loop, spec.settings.resume), *_said_of(held)]))

    def _reason_to_stop(
        self,
        attempt: LaunchAttempt,
        death: _Death,
        loop: LoopEntered | None,
        held: Sequence[KernelHolding],
        checkpoint: str,
    ) -> str:
        """Return why the run is not started again; empty if it is."""
        if loop is None:
            return "nothing of ours can be cut, since no batch of a DataLoader had been handed out"
        if loop.obstacle:
            return f"nothing of ours can be cut, since {loop.obstacle}"
        if loop.parts < (attempt.spec.settings.split or 1):
            return "batches of this loop came whole all the same"
        if attempt.recorder.smallest:
            return f"forward_backward has cut the batches down to {_samples(attempt.recorder.smallest)} already"
        large = [holding for holding in held if holding.share > _KERNEL_IS_TO_BLAME]
        if large:
            return f"smaller batches do not help where the notebook itself holds {large[0].share:.0%} of the device"
        hopeless = "" if death.refusal is None else death.refusal.hopeless(loop, self._refusals)
        if hopeless:
            return hopeless
        if death.doubt and death.doubt in self._doubts:
            return "it was the same with larger batches, so smaller ones will not help"
        parts = _parts_of_next(loop)
        if attempt.spec.end.stays:
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

    def _said(self, attempt: LaunchAttempt, loop: LoopEntered, resume: str | None) -> list[str]:
        """Return what changes in the next attempt, and what the earlier ones leave behind.

        Args:
            attempt: The one that ran out of memory.
            loop: The loop that it was in.
            resume: The checkpoint from which the next one goes on; None for none.
        """
        parts = _parts_of_next(loop)
        whence = "" if resume is None else f" from {resume or 'the newest checkpoint'}"
        said = [
            f"started again{whence} {_in_parts(loop, parts)}{_effective(loop, attempt.spec.world_size)}",
        ]
        rounds = -(-parts // loop.sharing_ranks)
        if rounds > 1:
            how = ", each loss weighed as a mean over its samples"
            if loop.sharing_ranks > 1:  # then losses are weighed by their divisors, see `TurnWeights`
                how = ", and each time does what it counts, draws or averages by itself"
            said.append(f"the loop's body runs {rounds} times per batch{how}")
        if loop.batch_norms:
            said.append(f"BatchNorm layers see the samples of one part at a time: {_some(loop.batch_norms)}")
        self._left_behind |= dict.fromkeys([*attempt.recorder.opened, *attempt.ended.open_files])
        if self._left_behind:
            whose = "the first attempt" if self._restarts == 1 else "earlier attempts"
            said.append(f"files and trackers {whose} opened: {', '.join(self._left_behind)}")
        return said


def wait_for_memory(gpus: Sequence[Gpu], ended: RankResults, look: Callable[[], Sequence[Gpu]]) -> None:
    """Wait until the driver has freed the memory of killed ranks, for at most 2 s.

    It frees the memory of a killed process some 100 ms late, and the next attempt would find it taken.

    Args:
        gpus: Those of the attempt, as they were before it.
        look: Returns their present state.
    """
    if not gpus or not any(code < 0 for code in ended.exit_codes):
        return
    before = {gpu.uuid: gpu.used_bytes for gpu in gpus}
    deadline = time.monotonic() + _LONGEST_RELEASE_S
    while any(gpu.used_bytes > before.get(gpu.uuid, gpu.used_bytes) + _NOISE_BYTES for gpu in look()):
        if time.monotonic() > deadline:
            return
        time.sleep(_RELEASE_LOOK_S)


def _smaller(spec: LaunchSpec, ended: RankResults, loop: LoopEntered, checkpoint: str) -> LaunchSpec:
    settings = RunSettings(split=_parts_of_next(loop), resume=checkpoint or None).over(spec.settings)
    end = replace(spec.end.after(ended.seconds), program_limit=ended.program_limit)
    return replace(spec, settings=settings, end=end)


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


def _said_of(held: Sequence[KernelHolding]) -> list[str]:
    return [f"the notebook itself holds {holding}" for holding in held if holding.share >= _WORTH_SAYING]


@dataclass(slots=True)
class PartsRestartPolicy:
    """Restart policy of one run, asked after every attempt that did not fail of memory.

    A loop that prepares nothing is given parts of its batches. One that counts on whole ones, as by ``view(64, -1)`` or
    by labels that it has made before, fails on the first part. One that makes a state of its batches, as a running
    mean, fails once the ranks' states differ; one whose loss compares samples from some step on, at that step. So the
    run starts again, once, with whole batches in every rank, while little is lost by it. The ranks of before are gone,
    with all that they have trained; files that a rank has written would be written twice.

    Args:
        failed: The attempt that failed on its parts, and was followed by one with whole batches; None for none.
    """

    failed: LaunchAttempt | None = None

    def after(self, attempt: LaunchAttempt) -> Restart | None:
        """Return how the run starts again, the first time that it failed on parts; None where it does not."""
        ended, rank = attempt.ended, attempt.ended.first_failed
        if self.failed is not None or rank is None or ended.is_interrupted or ended.is_timed_out or ended.hang:
            return None
        report = ended.reports[rank]
        if report is None or not report.facts.get("fails_on_parts") or report.cause is None:
            return None
        if attempt.spec.end.stays or attempt.spec.no_restart or self._has_written(attempt):
            return None
        has_states = report.facts["fails_on_parts"] == STATES
        if has_states and ended.seconds > _LONGEST_LOSS_S:
            return None
        self.failed = attempt
        text = (report.cause.headline or [report.cause.type_name])[0]
        text = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
        happened = f"rank {rank} failed on its first part of a batch ({text}), as code does that counts on whole ones"
        if has_states:
            happened = f"rank {rank} stopped ({text})"
        settings = RunSettings(batches=WHOLE).over(attempt.spec.settings)
        return Restart(
            replace(attempt.spec, settings=settings, end=attempt.spec.end.after(ended.seconds)),
            f"{happened}; started again with whole batches in each of {attempt.spec.world_size} ranks, the same work",
        )

    def the_one_to_tell(self, last: LaunchAttempt) -> tuple[LaunchAttempt, str]:
        """Return the attempt whose error is shown, and a hint for the reader, after `last`, the last one.

        It is the first one if whole batches have failed, too; the other's results are released.
        """
        if self.failed is None:
            return last, ""
        if last.ended.first_failed is None or last.ended.is_interrupted or last.ended.is_timed_out:
            self.failed.ended.close()
            return last, ""
        last.ended.close()
        return (
            self.failed,
            "With whole batches in every rank it failed, too, so the size of the parts may not be the cause.",
        )

    @staticmethod
    def _has_written(attempt: LaunchAttempt) -> bool:
        return bool(attempt.recorder.opened or attempt.ended.open_files or attempt.ended.has_written)


def describe_size(size: int) -> str:
    """Format a number of bytes; gigabytes with two digits after the point, unlike `quantities.amount`.

    Example:
        >>> describe_size(64_000_000), describe_size(1_234_000_000), describe_size(3_400), describe_size(800)
        ('64.0 MB', '1.23 GB', '3.4 kB', '800 bytes')
    """
    for unit, digits, name in ((1e9, 2, "GB"), (1e6, 1, "MB"), (1e3, 1, "kB")):
        if size >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size} bytes"
