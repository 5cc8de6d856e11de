"""Launch a function as Accelerate does: in this process if one is enough, else in ranks. Runs in the kernel.

It is loaded by the first call of a launcher: starting processes needs half of the package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.settings import STOP
from nbaccel.launching.api import ARGUMENTS, check_call, launch, launch_inline
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import refuse_nested_launch
from nbaccel.launching.plan import devices_of, settings_of
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.options.given_flags import given_flags
from nbaccel.options.run_options import RunOptions

__all__ = ["launch_as_accelerate"]


def launch_as_accelerate(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_processes: int | None,
    precision: str,
    oom: str,
    strategy: str | None,
    max_restarts: int,
) -> Any:
    """Run the function as `notebook_launcher` does, in this process if one is enough, and return its result."""
    if num_processes in (None, 1) and oom == STOP:
        check_call(function, args, {})
        refuse_nested_launch()
        survey = Survey.take()
        chosen = devices_of(RunOptions(num_processes), survey)
        if chosen.num_processes == 1:
            spec, news = _in_place(function, args, precision, strategy, chosen)
            return launch_inline(spec, survey, news=news).value
    for restart in range(1, max_restarts + 1):
        run = launch(function, num_processes, args, mixed_precision=precision, strategy=strategy, oom=oom, check=False)
        if run.error is None:
            return run.value
        if not isinstance(run.error, Exception):  # an interrupt
            raise run.error
        warnings.warn(
            f"the ranks failed with {_in_short(run.error)}, and are started again: restart {restart} of "
            f"max_restarts={max_restarts}. The function begins anew.",
            stacklevel=4,  # the line that calls notebook_launcher
        )
    return launch(function, num_processes, args, mixed_precision=precision, strategy=strategy, oom=oom).value


def _in_short(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _in_place(
    function: Callable[..., Any], args: tuple[Any, ...], precision: str, strategy: str | None, devices: Devices
) -> tuple[LaunchSpec, str]:
    """Return the call of the function as Accelerate makes it if one process is enough, and the line that says so."""
    start = Start("inline", "one process of notebook_launcher is this one, as in Accelerate")
    name = getattr(function, "__name__", "")
    news = (
        "in this process, as in Accelerate: no restart for memory, no watch for hangs, no clean kernel; "
        f"launch({name if name.isidentifier() else 'function'}, num_processes=1) has them"
    )
    task = FunctionTask(function, args)
    options = RunOptions(mixed_precision=precision, strategy=strategy)
    task.flags = given_flags(options, options, words=ARGUMENTS)
    return LaunchSpec(task, devices.started_by(start), start, settings_of(options, precision)), news
