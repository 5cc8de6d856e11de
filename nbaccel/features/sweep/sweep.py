"""The public function `sweep`: one function for each of several configurations. Runs in the kernel.

It checks the call, combines the values, and chooses devices; `Sweeping` does the rest.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import amount, plural
from nbaccel.base.settings import STOP
from nbaccel.base.short_tracebacks import without_our_frames
from nbaccel.base.world import World
from nbaccel.errors import LaunchRefused, NestedLaunch
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.features.sweep.finished_runs import FinishedRuns, describe_configuration, describe_value
from nbaccel.features.sweep.slots import choose_slots
from nbaccel.features.sweep.sweep_runs import SweepRuns
from nbaccel.features.sweep.sweeping import Sweeping
from nbaccel.launching.api import how_it_ended
from nbaccel.launching.gpu_trouble import holder_name
from nbaccel.launching.ipc.spec import Task
from nbaccel.launching.launcher import default_launcher, refuse_nested_launch
from nbaccel.launching.made_in_cells import refuse_what_stays_here
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.run import Run, RunOrigin
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.namespace.nbytes import bytes_by_sharing
from nbaccel.options.run_options import RunOptions
from nbaccel.output.screens import ConsoleScreen, shell_here

__all__ = [
    "FOLDER",
    "configurations",
    "line_on_copies",
    "own_bytes",
    "refuse_a_full_host",
    "sweep",
]

FOLDER = ".nbaccel/sweeps"
"""Default folder of the runs, in the working directory."""

_SEED, _ACCELERATOR = "seed", "accelerator"
_SETUP = "nbaccel.train.setup:setup_rank"
_CALLER = "nbaccel.features.sweep.rank_setup:call_with_accelerator"
_MANY = (list, tuple, range, set, frozenset)
"""Types of several values; an iterator and an array are several values, too. Any other object is one value."""


@without_our_frames
def sweep(
    function: Callable[..., Any],
    *,
    slots: int | None = None,
    gpus_per_run: int = 1,
    devices: str | None = None,
    cpu: bool = False,
    seed: Any = 0,
    folder: str = FOLDER,
    check: bool = False,
    hang_timeout_s: float | None = None,
    start_method: str = "auto",
    **values: Any,
) -> SweepRuns:
    """Run a function once for each combination of values, some runs side by side.

    Each run has its own ranks. The function gets the values by keyword, and the rank's `accelerator` if it has a
    parameter of that name. The order is that of nested loops: the last name varies fastest.

    A run that an earlier sweep has finished, with the same source, values and seed, is not done again. The source is
    the text of the function, and of the functions and classes of the notebook or of its own file that it uses, with the
    plain values that these read. Data, models and other files do not count: take another `folder` after a change of
    them.

    Args:
        function: Called as ``function(**values)`` in every rank of a run.
        slots: The number of runs side by side. None is the number of free cards over `gpus_per_run`; on CPUs it is one.
        gpus_per_run: The number of cards, and of ranks, of each run; on CPUs the number of ranks.
        devices: The cards to use, such as "2,3". None is all that no other process uses.
        cpu: Use no card.
        seed: The seed of every run; several values are swept like all others. A parameter `seed` of the function gets
            it if it has no default, or if this is not 0. With None no run is seeded, and none is found again.
        folder: The folder for what the runs print, for their checkpoints and trackers, and for what is finished.
        check: Raise the error of the first failed run after all are over. Otherwise it is in its `Run.error`.
        hang_timeout_s, start_method: For each run, as for `launch`.
        **values: For each parameter a list, tuple, range, iterator or array of values; any other object is one value.

    Returns:
        The runs, in the order of the combinations.

    Raises:
        LaunchRefused, TypeError, ValueError: Nothing was started. The message says why.
        KeyboardInterrupt: The sweep was interrupted. `nbaccel.last_run.runs` has the runs so far.

    Example:
        >>> runs = nbaccel.sweep(train, lr=[1e-3, 1e-4], fold=range(5))  # doctest: +SKIP
        >>> runs[0].config, runs[0].value  # doctest: +SKIP
        ({'lr': 0.001, 'fold': 0}, 0.91)
    """
    _refuse_in_ranks()
    own = {"slots": slots, "gpus_per_run": gpus_per_run, "devices": devices, "cpu": cpu, "folder": folder,
           "check": check, "hang_timeout_s": hang_timeout_s, "start_method": start_method}  # fmt: skip
    swept = values if isinstance(seed, int) or seed is None else {**values, _SEED: seed}
    configs = configurations(swept)
    work = _SweptFunction(function, seed if _SEED not in swept else None)
    work.refuse_names_of_ours(own)
    _refuse_wrong_kinds(own, configs)
    work.refuse_wrong_names(configs)
    survey = Survey.take(looks_for_gpus=not cpu)
    chosen = choose_slots(slots, index(gpus_per_run), devices, cpu, survey, most=len(configs), name_of=holder_name)
    options = RunOptions(
        num_processes=chosen.slots[0].devices.num_processes,
        cpu=cpu or None,
        hang_timeout=hang_timeout_s,
        start=start_method,
        oom=STOP,
    )
    here, task = ProcessState.now(), work.task(configs[0])
    plans = [LaunchPlan.of(replace(options, devices=slot.asked), task, survey, here) for slot in chosen.slots]
    history: Any = getattr(shell_here(), "history_manager", None)
    cells = list(getattr(history, "input_hist_raw", ()))
    refuse_what_stays_here(plans[0].left_out, gpus_per_run, cells, "the function", "another start_method")
    refuse_a_full_host(plans[0], len(plans), survey)
    copies = line_on_copies(plans[0], len(plans), task, survey, own_bytes())
    origin = RunOrigin(_in_arguments(swept), {}, None if _SEED in swept else seed)
    sweeping = Sweeping(work, configs, chosen.slots, plans, survey, FinishedRuns(folder), origin=origin)
    runs = sweeping.run(default_launcher(), shell_here(), notes=[*chosen.notes, *filter(None, [copies])])
    if all(run.error is None and run.value is None for run in runs):
        name = work.name
        ConsoleScreen().write("stdout", f"no run of {name} returned a value: what it is to leave has to be returned\n")
    if check and (failed := next((run for run in runs if run.error is not None), None)) is not None:
        assert failed.error is not None
        failed.error.add_note(
            f"in the run with {describe_configuration(failed.config)}; its output is in {failed.log_path}"
        )
        raise failed.error
    return runs


def _refuse_in_ranks() -> None:
    refuse_nested_launch()
    world = World.from_env()
    if world.is_distributed:
        raise NestedLaunch(
            f"this is {world.place} that torchrun or another launcher has started, and each "
            "would do the whole sweep: start the script by python alone; nbaccel.sweep starts the ranks of its runs."
        )


def _refuse_wrong_kinds(own: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse arguments of `sweep` itself, and seeds, of a wrong kind.

    Raises:
        TypeError: With the argument.
    """
    needs: dict[str, tuple[Callable[[Any], bool], str]] = {
        "slots": (lambda value: value is None or hasattr(value, "__index__"), "a whole number, or None"),
        "gpus_per_run": (lambda value: hasattr(value, "__index__"), "a whole number"),
        "devices": (lambda value: value is None or isinstance(value, str), 'a text such as "0,1", or None'),
        "folder": (lambda value: isinstance(value, str | os.PathLike), "a path"),
        "check": (lambda value: isinstance(value, int), "True or False"),
        "cpu": (lambda value: isinstance(value, int), "True or False"),
    }
    for name, (is_right, kind) in needs.items():
        if not is_right(own[name]):
            raise TypeError(f"{name} must be {kind}; got {own[name]!r}. Nothing was started.")
    for seed in [config[_SEED] for config in configs if _SEED in config]:
        if not hasattr(seed, "__index__"):
            raise TypeError(
                f"seed must be a whole number, several of them, or None; got {seed!r}. Nothing was started."
            )


def _in_arguments(values: Mapping[str, Any]) -> str:
    """Return the swept names with their values, as they are remembered."""
    lists = {name: _several(value) for name, value in values.items() if not isinstance(value, Iterator)}
    return ", ".join(f"{name}=[{', '.join(describe_value(one) for one in each)}]" for name, each in lists.items())


def configurations(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of `values`, the last name varying fastest.

    Raises:
        ValueError: A name has no value at all.

    Example:
        >>> configurations({"lr": (0.1, 0.2), "fold": range(2)})[:3]
        [{'lr': 0.1, 'fold': 0}, {'lr': 0.1, 'fold': 1}, {'lr': 0.2, 'fold': 0}]
        >>> configurations({"epochs": 3})
        [{'epochs': 3}]
    """
    lists = {name: _several(value) for name, value in values.items()}
    for name, each in lists.items():
        if not each:
            raise ValueError(f"{name} has no value: a sweep needs one or more for each name. Nothing was started.")
    return [dict(zip(lists, row, strict=True)) for row in itertools.product(*lists.values())]


def _several(value: Any) -> list[Any]:
    if _is_array(value):
        return list(value.tolist())
    return list(value) if _is_several(value) else [value]


def _is_several(value: Any) -> bool:
    return isinstance(value, (*_MANY, Iterator)) or _is_array(value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1


_RANK_BYTES = 20_000_000
"""Least host memory that a rank adds to what it shares: 18 to 22 MB after five steps of DDP on CPUs, forked or started
from a clean process (private pages in smaps_rollup; torch 2.13)."""

_CUDA_BYTES = 110_000_000
"""Least that CUDA adds in a rank with a GPU: 117 MB with the first tensor there, by pytorch#113326, which has a case of
1.7 GB, too."""


def refuse_a_full_host(plan: LaunchPlan, slots: int, survey: Survey) -> None:
    """Refuse a sweep whose runs need more memory than the host has, by what is known to be the least.

    That is a process for each rank, and a copy of what is sent to ranks of a clean process; forked ranks share what the
    notebook has.

    Raises:
        LaunchRefused: The runs of all slots do not fit.
    """
    ranks, available = plan.devices.num_processes, survey.ram.available_bytes
    copies = plan.bytes_to_copy + ranks * plan.bytes_of_each if plan.start.method == "zygote" else 0
    each = copies + ranks * (_RANK_BYTES + _CUDA_BYTES * bool(plan.devices.gpus))
    if slots * each <= available or not available:
        return
    fitting = int(available // each)
    if copies > each / 2:
        instead = f"use --slots {fitting}" if fitting else "read less of the notebook's data, and load it in the run"
        raise LaunchRefused(
            f"{plural(slots, 'run')} side by side would each get a copy of {amount(copies)}, since they start from a "
            f"clean process ({plan.start.reason}), and the host has {amount(available)} available: {instead}."
        )
    instead = f"use --slots {fitting}" if fitting else "end what else uses it, or take a larger machine"
    raise LaunchRefused(
        f"{plural(slots, 'run')} side by side, of {plural(ranks, 'rank')} each, need {amount(slots * each)} of host "
        f"memory before they load anything, and the host has {amount(available)} available: {instead}."
    )


def line_on_copies(plan: LaunchPlan, slots: int, task: Task, survey: Survey, held_bytes: int) -> str:
    """Return a line if forked ranks of all slots may come to copy more than the host has available; else "".

    Python counts the references to an object in the object, so a rank that reads lists or dicts of the notebook copies
    their pages one by one (pytorch#13246); tensors and arrays stay shared.

    Args:
        held_bytes: Resident memory of this process, which is no less than the values: if that fits, they are not
            weighed.
    """
    processes, available = slots * plan.devices.num_processes, survey.ram.available_bytes
    if plan.start.method != "fork" or not 0 < available < processes * held_bytes:
        return ""
    of_each = bytes_by_sharing(task.values_to_send())[1]
    if processes * of_each <= available:
        return ""
    return (
        f"the runs read {amount(of_each)} of Python objects of the notebook, and each of {plural(processes, 'rank')} "
        f"may come to copy what it reads: {amount(processes * of_each)}, with {amount(available)} available. Tensors "
        "and arrays stay shared; or use fewer slots (--slots)"
    )


def own_bytes() -> int:
    """Return the resident memory of this process."""
    import psutil  # takes 10 ms

    return int(psutil.Process().memory_info().rss)


class _SweptFunction:
    """A function as the work of a sweep.

    Args:
        seed: The seed of every run; None if it is swept.
    """

    def __init__(self, function: Callable[..., Any], seed: int | None) -> None:
        if not callable(function):
            raise TypeError(
                f"the first argument must be the function that each run calls, got {type(function).__name__}: "
                "nbaccel.sweep(train, lr=[1e-3, 1e-4])"
            )
        self.function = function
        self.setup: str | None = _SETUP
        self.name = str(getattr(function, "__name__", type(function).__name__))
        mark = SourceMark.of(function, is_strict=True)
        self.source = "" if mark.uncounted else mark.digest
        self._seed = seed
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
        except ValueError:  # a builtin without a signature
            self._parameters = {}
        self._takes_any = not self._parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )

    def refuse_names_of_ours(self, own: Mapping[str, Any]) -> None:
        """Refuse a parameter that has the name of an argument of `sweep`, which gets its values.

        Args:
            own: These arguments.

        Raises:
            TypeError: The function would not get what it needs, or what was given for it.
        """
        for name, value in own.items():
            parameter = self._parameters.get(name)
            if parameter is not None and (parameter.default is parameter.empty or _is_several(value)):
                raise TypeError(
                    f"{name} is an argument of nbaccel.sweep itself, so {self.name}() does not get it: rename the "
                    "parameter. Nothing was started."
                )

    def refuse_wrong_names(self, configs: Sequence[Mapping[str, Any]]) -> None:
        """Refuse names that the function does not take, and a call without a value that it needs.

        Raises:
            TypeError: It could not be called so.
        """
        names = configs[0].keys()
        takes = [name for name in self._parameters if name != _ACCELERATOR]
        if _ACCELERATOR in names:
            raise TypeError("accelerator is given to the function by the sweep itself, and has no values to sweep.")
        for name in names - self._parameters.keys() - {_SEED}:
            if not self._takes_any:
                hint = " The ranks of each run are gpus_per_run." if name == "num_processes" else ""
                raise TypeError(
                    f"{self.name}() has no parameter {name!r}; it takes {', '.join(takes) or 'none'}.{hint} "
                    "Nothing was started."
                )
        for name, parameter in self._parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if is_needed and name not in names and name not in (_ACCELERATOR, _SEED):
                raise TypeError(
                    f"{self.name}() needs a value for {name!r}, and the sweep has none: give it one, {name}=[…], or a "
                    "default. Nothing was started."
                )

    def task(self, config: Mapping[str, Any]) -> Task:
        given = {name: value for name, value in config.items() if name != _SEED or name in self._parameters}
        parameter = self._parameters.get(_SEED)
        if parameter is not None and (self._seed or parameter.default is parameter.empty):
            given.setdefault(_SEED, self._seed)
        return FunctionTask(self.function, (), given, caller=_CALLER if _ACCELERATOR in self._parameters else "")

    def seed_of(self, config: Mapping[str, Any]) -> int | None:
        return index(config[_SEED]) if _SEED in config else self._seed

    def results(self, ended: RankResults) -> tuple[list[Any], dict[str, Any]]:
        ranks = range(len(ended.reports))
        return [ended.values(rank).get("value") for rank in ranks], {}

    def end(self, run: Run, ended: RankResults) -> tuple[BaseException | None, str]:
        return how_it_ended(run, ended)
