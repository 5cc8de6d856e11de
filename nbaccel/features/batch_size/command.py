"""`%accelerate estimate`: the memory that a training of the notebook's model would take. Runs in the kernel.

It computes nothing; `estimate` counts.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from IPython.core.error import UsageError

from nbaccel.base.hardware import Survey, best_precision
from nbaccel.features.batch_size.estimate import EstimatedDevices, EstimateSetting, estimate_memory
from nbaccel.options.run_options import RunOptions

__all__ = ["estimate_report"]

_USE = (
    "%accelerate estimate MODEL [OPTIMIZER] [BATCH] [-n 2 4] [--strategy fsdp] [--mixed_precision bf16] [--loss_fn F]"
)


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%accelerate estimate: {message}. It is {_USE}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Words(prog="%accelerate estimate", add_help=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("-n", "--num_processes", nargs="+", type=int, default=[])
    parser.add_argument("--strategy", choices=("single", "ddp", "fsdp"))
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"))
    parser.add_argument("--loss_fn")
    return parser


def estimate_report(line: str, names: Mapping[str, Any], survey: Survey, config: RunOptions) -> str:
    """Return the table for `line`, the words after `%accelerate estimate`.

    Args:
        names: The notebook's variables.
        config: Its choices, which hold where the line says nothing.

    Raises:
        UsageError: A name is unknown, is no model, or the line is wrong.
    """
    words = _parser().parse_args(shlex.split(line))
    if not words.names:
        raise UsageError(f"%accelerate estimate needs the name of a model: {_USE}.")
    model, *others = (_value(name, names) for name in words.names)
    loss_fn = None if words.loss_fn is None else _value(words.loss_fn, names)
    optimizer, batch = _sorted(others)
    devices = EstimatedDevices.here(survey)
    chosen = words.mixed_precision or config.mixed_precision or "auto"
    setting = EstimateSetting(
        best_precision(survey.gpus[0] if survey.gpus else None)[0] if chosen == "auto" else chosen,
        keeps=(config.accumulate or 1) > 1,
        device_type="cuda" if devices.count else "cpu",
    )
    count = config.num_processes
    ranks = words.num_processes or ([count] if isinstance(count, int) else [])
    try:
        estimate = estimate_memory(model, optimizer, batch, loss_fn, ranks=ranks, setting=setting, devices=devices)
    except (TypeError, ValueError) as error:
        raise UsageError(f"%accelerate estimate {words.names[0]}: {error}.") from None
    return str(estimate.only(words.strategy) if words.strategy else estimate)


def _value(name: str, names: Mapping[str, Any]) -> Any:
    if name not in names:
        raise UsageError(f"%accelerate estimate: the notebook has no variable {name}. It is {_USE}.")
    return names[name]


def _sorted(values: list[Any]) -> tuple[Any, Any]:
    """Return the optimizer and the batch of the words behind the model, in whichever order they stand."""
    optimizer: Any = "AdamW"
    batch = None
    for value in values:
        inner = getattr(value, "optimizer", value)
        if hasattr(inner, "param_groups") or isinstance(inner, type):
            optimizer = inner
        else:
            batch = value
    return optimizer, batch
