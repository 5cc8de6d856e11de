"""Slots: places at which runs of a sweep go side by side, each with devices of its own. Runs in the kernel; pure.

Where there are GPUs, those that other processes use are left out, as the driver reports it, unless they are named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.base.quantities import listed, plural
from nbaccel.errors import LaunchRefused
from nbaccel.launching.ipc.spec import Devices
from nbaccel.launching.preflight import choose_devices

__all__ = [
    "SlotChoice",
    "SweepSlot",
    "choose_slots",
]

_NOISE_BYTES = 100_000_000
"""Bytes of a GPU that may be in use although nobody computes there: a driver's own."""


@dataclass(frozen=True, slots=True)
class SweepSlot:
    """One place for a run.

    Args:
        number: 0 for the first.
        devices: Those of its ranks.
        asked: They as `--devices`.
    """

    number: int
    devices: Devices
    asked: str | None = None

    def __str__(self) -> str:
        """Return the slot in words.

        Example:
            >>> str(SweepSlot(1, Devices(1)))
            'slot 2'
        """
        gpus = [str(gpu.index) for gpu in self.devices.gpus]
        return f"GPU {', '.join(gpus)}" if gpus else f"slot {self.number + 1}"


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The slots of a sweep.

    Args:
        notes: A line for each card that is left out.
    """

    slots: tuple[SweepSlot, ...]
    notes: tuple[str, ...] = ()


def choose_slots(
    slots: int | None,
    gpus_per_run: int,
    devices: str | None,
    cpu: bool,
    survey: Survey,
    *,
    ranks: int | None = None,
    most: int | None = None,
    name_of: Callable[[int], str] = lambda pid: "",
) -> SlotChoice:
    """Return the slots of a sweep.

    Args:
        slots: How many runs go side by side; None for as many as there are free cards over `gpus_per_run`, or one on
            CPUs.
        devices: Cards to use, "2,3", in use or not; None for all that are free.
        ranks: Processes of each run; None for one per card of it, or one.
        most: There are no more runs than these.
        name_of: See `gpu_trouble.troubles`.

    Raises:
        LaunchRefused: No card is free, there are fewer than asked for, or a number is below 1.
    """
    for name, count in (("slots", slots), ("gpus_per_run", gpus_per_run)):
        if count is not None and count < 1:
            raise LaunchRefused(f"{name} must be 1 or more; got {count}.")
    if ranks is not None and ranks > gpus_per_run:
        raise LaunchRefused(
            f"-n {ranks} and --gpus-per-run {gpus_per_run}: a run of a sweep has no more ranks than cards of its own; "
            f"use --gpus-per-run {ranks}."
        )
    chosen = choose_devices(None, devices, cpu, survey)
    if not chosen.gpus:
        here = choose_devices(ranks or gpus_per_run, None, cpu, survey)
        count = min(slots or 1, most or slots or 1)
        return SlotChoice(tuple(SweepSlot(number, here) for number in range(count)))
    return _of_cards(slots, gpus_per_run, devices, survey, ranks, most, name_of, chosen.gpus)


def _of_cards(
    slots: int | None,
    gpus_per_run: int,
    devices: str | None,
    survey: Survey,
    ranks: int | None,
    most: int | None,
    name_of: Callable[[int], str],
    gpus: Sequence[Gpu],
) -> SlotChoice:
    notes = {gpu.index: why for gpu in gpus if devices is None and (why := _in_use(gpu, name_of))}
    free = [gpu for gpu in gpus if gpu.index not in notes]
    if len(free) < gpus_per_run:
        busy = "; ".join(f"GPU {index} {why}" for index, why in notes.items())
        what = "no card is free" if not free else f"{plural(len(free), 'card')} free, and each run takes {gpus_per_run}"
        raise LaunchRefused(
            f"{what}{f': {busy}' if busy else ''}. End what runs there, name cards to use all the same "
            f"(--devices {','.join(str(gpu.index) for gpu in gpus[:gpus_per_run])}), or use --cpu."
        )
    possible = len(free) // gpus_per_run
    if slots is not None and slots > possible:
        raise LaunchRefused(
            f"{slots} slots of {plural(gpus_per_run, 'card')} were asked for, and {plural(len(free), 'card')} "
            f"can be used: use --slots {possible}, or --cpu."
        )
    count = min(slots or possible, most or possible)
    said = tuple(f"left out: GPU {index}, {why}" for index, why in notes.items())
    chosen = []
    for number in range(count):
        own = free[number * gpus_per_run : (number + 1) * gpus_per_run]
        asked = ",".join(str(gpu.index) for gpu in own)
        slot = SweepSlot(number, choose_devices(ranks or gpus_per_run, asked, False, survey), asked)
        if count > 1 and not slot.devices.can_be_told_apart:
            raise LaunchRefused(
                f"these cards ({listed([gpu.name for gpu in own])}) have no names by which a run can be shown its own "
                "alone, so runs cannot go side by side: use --slots 1."
            )
        chosen.append(slot)
    return SlotChoice(tuple(chosen), said)


def _in_use(gpu: Gpu, name_of: Callable[[int], str]) -> str:
    """Return who uses a card besides this process, in words; empty if nobody does."""
    others = [pid for pid, _ in gpu.processes if pid != os.getpid()]
    if not others:
        return ""
    if all(not name_of(pid) for pid in others) and gpu.used_bytes < _NOISE_BYTES:
        return ""
    names = [f"process {pid}{f' ({name})' if (name := name_of(pid)) else ''}" for pid in others]
    return f"in use by {listed(names)}"
