"""Fill a configuration of DeepSpeed: every "auto", and what a run here decides. Pure functions; imports no deepspeed.

What the program and the configuration both say has to agree. Every contradiction is named in one error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from nbaccel.features.deepspeed.facts import Facts
from nbaccel.features.deepspeed.plugin import AUTO, DeepSpeedPlugin

__all__ = ["filled"]

_AUTO_CLIPPING = 1.0
"""What Accelerate takes for a gradient_clipping of "auto"."""

_NO_PRINT = 10**9
"""Steps between lines of DeepSpeed's own progress, which ours replaces."""


def filled(
    plugin: DeepSpeedPlugin, precision: str, batch_size: int | None, world_size: int, window: int, facts: Facts
) -> dict[str, Any]:
    """Return the configuration that DeepSpeed gets.

    Windows of accumulation are counted here, not in the engine, which is told that every batch is a step.

    Args:
        plugin: The options.
        precision: "no", "fp16" or "bf16".
        batch_size: Samples per rank of the first loader; None where none is known.
        world_size: The number of ranks.
        window: Batches of a step.
        facts: Values of the model, the optimizer and the schedule.

    Raises:
        ValueError: The configuration contradicts the program; names every such value.
    """
    config: dict[str, Any] = copy.deepcopy(plugin.hf_ds_config.config)
    wrong = list(_contradictions(config, batch_size, world_size, window, facts))
    if wrong:
        raise ValueError(
            "the DeepSpeed configuration contradicts the program: "
            + "; ".join(wrong)
            + '. Write "auto" there, or make them equal'
        )
    written = config.get("train_micro_batch_size_per_gpu", AUTO)
    total = config.get("train_batch_size", AUTO)
    told = written if written != AUTO else 1 if total == AUTO else total // (world_size * window)
    size = batch_size or told
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.pop(key, None)
    config["train_micro_batch_size_per_gpu"] = size
    config["gradient_accumulation_steps"] = 1
    config["train_batch_size"] = size * world_size
    if config.get("gradient_clipping") == AUTO:
        config["gradient_clipping"] = _AUTO_CLIPPING
    config.setdefault("steps_per_print", _NO_PRINT)
    for half in ("fp16", "bf16"):
        table = config.setdefault(half, {})
        table["enabled"] = half == precision
    if not config["fp16"]["enabled"]:
        config["fp16"] = {"enabled": False}
    _fill_zero(config["zero_optimization"], facts.hidden_size)
    if facts.is_dummy:
        _fill_table(config["optimizer"].setdefault("params", {}), facts.optimizer)
    else:
        config.pop("optimizer", None)
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    if facts.schedule is None:
        config.pop("scheduler", None)
    elif "scheduler" in config:
        _fill_table(config["scheduler"].setdefault("params", {}), facts.schedule)
    left = sorted(_autos(config))
    if left:
        raise ValueError(
            f'the DeepSpeed configuration has "auto" where nothing here says a value: {", ".join(left)}. Write numbers'
        )
    return config


def _contradictions(
    config: Mapping[str, Any], batch_size: int | None, world_size: int, window: int, facts: Facts
) -> Iterator[str]:
    written, total = (config.get(key, AUTO) for key in ("train_micro_batch_size_per_gpu", "train_batch_size"))
    per_rank = written if batch_size is None else batch_size
    if total != AUTO and per_rank == AUTO and total % (world_size * window):
        yield f"train_batch_size is {total}, which {world_size} ranks x {window} batches per step do not divide"
    elif total != AUTO and per_rank != AUTO and total != per_rank * world_size * window:
        yield (
            f"train_batch_size is {total}, and {per_rank} samples per rank x {world_size} ranks x {window} batches per "
            f"step are {per_rank * world_size * window}"
        )
    if batch_size is not None and written not in (AUTO, batch_size):
        yield f"train_micro_batch_size_per_gpu is {written}, and the first loader has batches of {batch_size} per rank"
    if "optimizer" in config and not facts.is_dummy:
        yield (
            f"it has an optimizer ({config['optimizer'].get('type')}), and the program prepares one of its own: "
            "prepare DummyOptim in its place, or take the optimizer out"
        )
    if "optimizer" not in config and facts.is_dummy:
        yield "the program prepares DummyOptim, and it has no optimizer for it"
    if "scheduler" in config and facts.schedule is None:
        yield (
            f"it has a scheduler ({config['scheduler'].get('type')}), and the program prepares no DummyScheduler for it"
        )
    if "scheduler" not in config and facts.needs_schedule:
        yield "the program prepares DummyScheduler without lr_scheduler_callable, and it has no scheduler for it"


def _fill_zero(zero: dict[str, Any], hidden: int | None) -> None:
    """Fill sizes of buckets, which are those of DeepSpeed where the model does not say its width."""
    sizes = (
        {}
        if hidden is None
        else {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    )
    for key in [key for key, value in zero.items() if value == AUTO]:
        if key in sizes:
            zero[key] = sizes[key]
        else:
            del zero[key]  # DeepSpeed's own default
    for table in [value for value in zero.values() if isinstance(value, dict)]:
        for key in [key for key, value in table.items() if value == AUTO]:
            del table[key]
    if zero["stage"] < 3:
        for key in [key for key in zero if key.startswith("stage3_")]:
            del zero[key]


def _fill_table(params: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key in [key for key, value in params.items() if value == AUTO]:
        if values.get(key) is not None:
            params[key] = values[key]
        else:
            del params[key]  # the default of its class


def _autos(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{before}{key}.")
        elif value == AUTO:
            yield before + key
