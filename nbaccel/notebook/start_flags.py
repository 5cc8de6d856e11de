"""Start flags: the choices for the start of ranks, which the cells that run in them cannot change. Pure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nbaccel.errors import LaunchRefused
from nbaccel.notebook.options import AUTO, Options
from nbaccel.notebook.plan import Plan

__all__ = ["OF_THE_START", "of_the_start", "refuse_another_start", "refuse_flags_of_a_cell"]

OF_THE_START = {
    "num_processes": "-n",
    "mixed_precision": "-p",
    "accumulate": "-a",
    "devices": "-d",
    "cpu": "--cpu",
    "start": "--start",
    "seed": "--seed",
    "debug": "--debug",
    "independent": "--independent",
    "strict": "--strict",
    "batches": "--batches",
    "oom": "--oom",
    "checkpoint_every": "--checkpoint-every",
    "checkpoint_dir": "--checkpoint-dir",
    "keep_checkpoints": "--keep-checkpoints",
    "resume": "--resume",
}
"""Flags of settings that a rank gets once, before its first cell."""


def of_the_start(options: Options) -> Options:
    """Return the options without those that apply to single cells only."""
    return Options(**{name: getattr(options, name) for name in OF_THE_START})


def refuse_flags_of_a_cell(options: Options) -> None:
    """Refuse flags of a cell in a start.

    Raises:
        LaunchRefused: a start was given what only a cell can have.
    """
    for name in (field.name for field in fields(options)):
        if name not in OF_THE_START and getattr(options, name) is not None:
            flag = "--in" if name == "inputs" else f"--{name.replace('_', '-')}"
            raise LaunchRefused(f"{flag} belongs to a cell, not to the start: write it behind %%accelerate.")


def refuse_another_start(asked: Options, plan: Plan) -> None:
    """Refuse flags of a cell that differ from the start of its ranks.

    asked: the options of the cell's own line.  plan: of the persistent ranks.

    Raises:
        LaunchRefused: a cell cannot have that from ranks that were started otherwise.
    """
    for name, flag in OF_THE_START.items():
        wanted, has = getattr(asked, name), _chosen(name, plan)
        if wanted in (None, AUTO, has):
            continue
        text = flag if wanted is True else f"{flag} {wanted}"
        raise LaunchRefused(
            f"{text} belongs to the start of the ranks, and those that stay were started with "
            f"{'another choice' if has is None else f'{flag} {has}'}: leave it out, or begin anew with "
            f"%accelerate stop and %accelerate start {text}."
        )


def _chosen(name: str, plan: Plan) -> Any:
    """Return the value with which the ranks were started."""
    settled = {
        "num_processes": plan.devices.num_processes,
        "mixed_precision": plan.settings.mixed_precision,
        "accumulate": plan.settings.gradient_accumulation_steps,
        "start": plan.start.method,
        "seed": plan.settings.seed,
        "cpu": True if not plan.devices.gpus else None,
    }
    return settled.get(name, getattr(plan.options, name))
