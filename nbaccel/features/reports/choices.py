"""Choices: the possible choices for the next cells, the reasons against some, and their effect.

Pure functions of options and a survey, in the kernel; the form shows their results, and `%accelerate config` prints
them where there is no form.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.events import LoopKind
from nbaccel.base.hardware import Survey, best_precision
from nbaccel.base.settings import FSDP, PRECISIONS, SHRINK, STOP
from nbaccel.errors import LaunchRefused
from nbaccel.features.flag_effects.effect_table import effect_of
from nbaccel.launching.ipc.spec import Devices
from nbaccel.launching.plan import choose_precision, devices_of
from nbaccel.options.configuration import Configuration
from nbaccel.options.parsing import chosen, command_line, text_of
from nbaccel.options.run_options import AUTO, RunOptions

__all__ = [
    "OF_WHICH",
    "Offer",
    "batch_size_of",
    "checkpoint_intervals",
    "effective_batch_size",
    "for_which_loops",
    "memory_policies",
    "overview",
    "precisions",
    "process_counts",
    "seeds",
    "strategies",
    "world_size",
]

_USUAL_BATCH_SIZE = 32
_MOST_CPU_RANKS = 8
"""Largest number of ranks on a CPU that the form offers; a flag takes any number."""


_HOLD_FOR_LOOPS = {"mixed_precision": "precision", "accumulate": "batches per step", "strategy": "strategy"}
"""Choices whose effect depends on the loop, in the form's words, by their names in `FLAGS`."""

OF_WHICH = (
    "(a prepared loop: your DataLoader's batch size x ranks x batches; an unmodified one: your DataLoader's batch size "
    "x batches)"
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A value that a setting may take.

    Args:
        note: What the value means here, or the reason against it, half a sentence.
        is_refused: Whether the next cell would not start.

    Example:
        >>> str(Offer("bf16", "Tesla T4 has no bf16 units", is_refused=True))
        'bf16 (not here: Tesla T4 has no bf16 units)'
    """

    value: str
    note: str = ""
    is_refused: bool = False

    def __str__(self) -> str:
        where = "not here: " if self.is_refused else ""
        return f"{self.value} ({where}{self.note})" if self.note else self.value


def for_which_loops() -> str:
    """Return which choices hold for an unmodified loop, and which only for one that prepares its model.

    Example:
        >>> print(for_which_loops().partition(". ")[0])
        Precision and batches per step that you choose hold for unmodified loops, too
    """
    works = {name: effect_of(name, LoopKind.UNMODIFIED).works for name in _HOLD_FOR_LOOPS}
    both, prepared = (
        " and ".join(_HOLD_FOR_LOOPS[name] for name in works if works[name] is it) for it in (True, False)
    )
    return (
        f"{both.capitalize()} that you choose hold for unmodified loops, too. What is automatic, and {prepared}, holds "
        "for what is prepared."
    )


def precisions(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return every precision, with the reason against those that do not suit the devices of `options`."""
    devices = _devices(options, survey)
    best, reason = best_precision(devices.weakest_gpu)
    offers = [Offer(AUTO, f"{best}: {reason}")]
    for precision in PRECISIONS:
        exceeds = PRECISIONS.index(precision) > PRECISIONS.index(best)
        offers.append(Offer(precision, reason if exceeds else "", _is_refused(precision, devices)))
    return offers


def process_counts(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return as many ranks as there are devices, and every smaller number; on the CPU, as many as there are cores.

    Of devices that were named each rank has an equal share, so their number is a multiple of the ranks'.
    """
    automatic = _devices(RunOptions(devices=options.devices, cpu=options.cpu), survey)
    most = len(automatic.gpus) or min(survey.cpu_count, _MOST_CPU_RANKS)
    fitting = [count for count in range(1, most + 1) if options.devices is None or most % count == 0]
    counts = {*fitting, *([options.world_size] if options.world_size else [])}
    return [Offer(AUTO, str(automatic)), *(Offer(str(count)) for count in sorted(counts))]


def strategies(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return the ways to share a prepared model between ranks; also another one that was chosen by a flag or a file."""
    is_alone = world_size(options, survey) == 1
    offers = [
        Offer(AUTO, "one rank holds the model" if is_alone else "ddp"),
        Offer("ddp", "every rank holds the whole model"),
        Offer(FSDP, "one rank has nothing to shard over" if is_alone else "every rank holds a part of the model"),
    ]
    is_known = options.strategy is None or options.strategy in [offer.value for offer in offers]
    return offers if is_known else [*offers, Offer(str(options.strategy))]


def memory_policies(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return the possible reactions when a rank dies of memory; the default comes first."""
    return [Offer(SHRINK, "start again with smaller batches"), Offer(STOP, "end with the error")]


def seeds(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return the drawn seed, the default; no seed is better than another."""
    return [Offer("drawn for each run")]


def checkpoint_intervals(options: RunOptions, survey: Survey) -> list[Offer]:
    """Return intervals at which a training saves itself, by time or by steps; the default comes first."""
    return [Offer("never"), Offer("10min"), Offer("30min"), Offer("500steps")]


def world_size(options: RunOptions, survey: Survey) -> int:
    """Return the number of ranks that the next cell would have."""
    return _devices(options, survey).num_processes


def effective_batch_size(batch_size: int, world_size: int, accumulate: int) -> str:
    """Return the number of samples of one optimizer step: per device x devices x batches per step.

    Example:
        >>> effective_batch_size(32, 2, 4)
        '32 x 2 x 4 = 256'
    """
    return f"{batch_size} x {world_size} x {accumulate} = {batch_size * world_size * accumulate}"


def batch_size_of(namespace: Mapping[str, Any]) -> int:
    """Return the batch size of the notebook's data loaders, if they agree on one; else a usual one, 32."""
    data = sys.modules.get("torch.utils.data")
    if data is None:  # then the notebook has no loader either
        return _USUAL_BATCH_SIZE
    # The true type: the ``__class__`` of a proxy is code of the user's, and may raise anything.
    loaders = [value for value in list(namespace.values()) if issubclass(type(value), data.DataLoader)]
    sizes = {loader.batch_size for loader in loaders}
    return (sizes.pop() if len(sizes) == 1 else None) or _USUAL_BATCH_SIZE


def overview(configuration: Configuration, survey: Survey, batch_size: int) -> str:
    """Return the form as text: the choices, the alternatives, their effect, and the equivalent flags."""
    options = configuration.options
    accumulate = options.accumulate or 1
    settings = {
        "num-processes": _describe_offer(process_counts(options, survey), options.num_processes),
        "mixed-precision": _describe_offer(precisions(options, survey), options.mixed_precision),
        "strategy": _describe_offer(strategies(options, survey), options.strategy),
        "accumulate": f"{accumulate} batch{'es' * (accumulate > 1)} per optimizer step",
        "seed": str(seeds(options, survey)[0]),
        "oom": _describe_offer(memory_policies(options, survey), options.oom),
    }
    rest = chosen(configuration.parser, options).items()
    settings |= {key: text_of(value) for key, value in rest if key == "seed" or key not in settings}
    width = max(map(len, settings))
    formula = effective_batch_size(batch_size, world_size(options, survey), accumulate)
    return "\n".join(
        [
            "what the next %%accelerate cells use; %accelerate config KEY=VALUE … changes it, --save keeps it",
            *(f"  {key:<{width}}  {text}" for key, text in settings.items()),
            f"effective batch size: {formula} {OF_WHICH}",
            for_which_loops(),
            f"the same by flags: {command_line(configuration.parser, options)}",
        ]
    )


def _describe_offer(offers: list[Offer], value: int | str | None) -> str:
    """Return the chosen offer, by default the first, and those that are refused."""
    holds = next(offer for offer in offers if offer.value == str(value or offers[0].value))
    return "; ".join(map(str, [holds, *(offer for offer in offers if offer.is_refused and offer is not holds)]))


def _devices(options: RunOptions, survey: Survey) -> Devices:
    """Return the devices of the next cell; if it would be refused, those of the machine."""
    try:
        return devices_of(options, survey)
    except LaunchRefused:
        return Devices(options.world_size or max(1, len(survey.gpus)), survey.gpus)


def _is_refused(precision: str, devices: Devices) -> bool:
    try:
        choose_precision(precision, devices)
    except LaunchRefused:
        return True
    return False
