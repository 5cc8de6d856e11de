"""Functions that run a function in ranks. Run in the kernel, in a notebook or a script.

`launch` returns a `Run`. Where one process is enough, it starts that, which can be watched, restarted and ended.
`features/accelerate_helpers` has the functions with Accelerate's signatures, which then call it in the notebook's own.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields, replace
from operator import attrgetter, index
from types import FunctionType
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import duration
from nbaccel.base.settings import STOP
from nbaccel.base.short_tracebacks import without_our_frames
from nbaccel.display.run_view import PanelSink, RunView
from nbaccel.display.summary import RunFacts
from nbaccel.errors import LaunchRefused, ResultsMissing, RunStopped
from nbaccel.features import feature
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.gpu_trouble import before_a_run
from nbaccel.launching.inline import ends_its_group, post_mortem_here, run_inline, until_its_end
from nbaccel.launching.ipc.spec import Devices, LaunchSpec
from nbaccel.launching.kernel_holdings import Unmoved, movable
from nbaccel.launching.launcher import Launcher, default_launcher, refuse_nested_launch
from nbaccel.launching.made_in_cells import refuse_what_stays_here
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import NO_ORIGIN, Run, RunOrigin, seen
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.options.run_options import RunOptions
from nbaccel.output.painter import Screen
from nbaccel.output.screens import shell_here

__all__ = [
    "ARGUMENTS",
    "Run",
    "check_call",
    "how_it_ended",
    "keep_run",
    "launch",
    "launch_inline",
    "planned",
    "show_run",
]

_LONGEST_ARGUMENT = 30
ARGUMENTS = {
    "accumulate": "gradient_accumulation_steps",
    "hang_timeout": "hang_timeout_s",
    "start": "start_method",
    "timeout": "timeout_s",
}
"""Arguments of `launch` whose names differ from those of the choices."""


@without_our_frames
def launch(
    function: Callable[..., Any],
    num_processes: int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int | None = None,
    strategy: str | None = None,
    seed: int | None = None,
    devices: str | None = None,
    cpu: bool = False,
    debug: bool | None = None,
    independent: bool = False,
    start_method: str = "auto",
    setup: str | None = None,
    timeout_s: float | None = None,
    hang_timeout_s: float | None = None,
    oom: str = STOP,
    free_kernel: bool = False,
    nodes: str | None = None,
    node_timeout_s: float | None = None,
    check: bool = True,
) -> Run:
    """Run a function in every rank of a new group of processes.

    Args:
        function: Called as ``function(*args, **kwargs)`` in every rank.
        num_processes: The number of ranks. None is one per GPU, or one.
        args, kwargs: The arguments of `function`.
        mixed_precision, gradient_accumulation_steps: Defaults of `Accelerator()` in the function.
        strategy: "ddp", "fsdp" or the name of an installed strategy: the default of `Accelerator()` in the function.
        seed: The generators of rank r start at seed + r. None does not seed.
        devices: The GPUs to use, such as "2,3". If they are more than ranks, each rank has an equal share.
        cpu: Use no GPU.
        debug: Check every collective, not only the first ones.
        independent: Each rank trains its own model on purpose: the parameters that optimizers step are not compared.
        start_method: "fork", "zygote", "inline" or "auto" (see docs/cells.md). The `Run` holds the choice and its
            reason.
        setup: "module:function", called in every rank first. "nbaccel.train.setup:setup_rank" makes the process group.
        timeout_s: Stop the run after this number of seconds.
        hang_timeout_s: End the run when no rank has entered a step or a collective for this number of seconds. The
            error says where each rank is.
        oom: "stop"; or "shrink": when a rank runs out of memory, start again with every batch of a prepared training
            loader cut into parts, see docs/memory.md. Everything before the loop is then done again.
        free_kernel: Move models that are variables of the notebook, and their optimizers, to the host while the ranks
            run.
        nodes: Where ranks on other machines go: "host1,host2" by ssh, "slurm" or "ray", see docs/cluster.md;
            `num_processes` counts all ranks. None for this machine.
        node_timeout_s: Seconds after which a node that does not answer is given up; None for 60.
        check: Raise the error of the run. With False it is in `Run.error`.

    Returns:
        The run: the values that the ranks returned, its curves, and how it ended.

    Raises:
        Exception: The error of the first rank that failed, in its own class, with the traceback of the rank.
        KeyboardInterrupt: The run was interrupted, or models were coming back after it.
        TimeoutError: `timeout_s` was over. (The `time_limit` of an Accelerator in the function raises nothing:
            `Run.stopped` reports it.)
        LaunchRefused: No rank was started. The message says why.

    Example:
        >>> launch(pow, 2, args=(2, 5)).values  # doctest: +SKIP
        [32, 32]
    """
    kwargs = dict(kwargs or {})
    check_call(function, args, kwargs)
    refuse_nested_launch()
    options = RunOptions(
        num_processes=None if num_processes is None else index(num_processes),
        mixed_precision=mixed_precision,
        accumulate=gradient_accumulation_steps,
        strategy=strategy,
        devices=devices,
        cpu=cpu or None,
        timeout=timeout_s,
        hang_timeout=hang_timeout_s,
        start=start_method,
        seed=seed,
        debug=debug,
        independent=independent or None,
        oom=oom,
        nodes=nodes,
        node_timeout=node_timeout_s,
    )
    # What becomes of the memory is asked when the ranks begin (`OomKillWatch`).
    survey = Survey.take(looks_for_gpus=not cpu, measures_memory=False)
    task = FunctionTask(function, args, kwargs)
    if nodes is None:
        plan = replace(planned(options, task, survey), own=options, words=ARGUMENTS)
        spec = plan.spec(task, setup, wants_results=True)
    elif free_kernel:
        raise LaunchRefused(
            "free_kernel=True is about this machine's GPUs, and nodes has ranks elsewhere: leave one out."
        )
    else:
        spec = feature("launch(nodes=...)")(options, task, default_launcher().resources, setup, ARGUMENTS)
    if spec.start.method == "inline":
        return launch_inline(spec, survey, check=check, origin=_origin(options))
    aside = _set_aside(spec.devices) if free_kernel else None
    launcher = default_launcher()
    shown, title = _show(launcher, spec, survey, aside)
    ended = None
    try:
        with contextlib.ExitStack() as block:
            if aside is not None:
                block.enter_context(aside.freed(lambda line: shown.write("stdout", f"{line}\n")))
            run, ended = launcher.run(spec, RunObservers(shown, listeners=[shown]))
    finally:
        if ended is not None:  # also after an interrupt while models came back, which is raised behind it
            run.origin = _origin(options)
            _conclude(run, ended, launcher, shown, title)
            if run.error is not None and check:
                raise run.error
    return run


_CHOICES = tuple(field.name for field in fields(RunOptions))
_values_of = attrgetter(*_CHOICES)  # in C, which does not touch the names: they lie on as many pages
_USUAL = _values_of(RunOptions(start="auto", oom=STOP))
"""The values of a call of `launch` that chooses nothing."""


def _origin(options: RunOptions) -> RunOrigin:
    """Return the arguments of `launch` that are not its defaults, in the words of the call."""
    given = {
        _CHOICES[at]: value
        for at, (value, usual) in enumerate(zip(_values_of(options), _USUAL, strict=True))
        if value is not None and value != usual
    }
    words = ", ".join(f"{ARGUMENTS.get(name, name)}={value!r}" for name, value in given.items())
    return RunOrigin(words, {ARGUMENTS.get(name, name): str(value) for name, value in given.items()}, options.seed)


def planned(options: RunOptions, task: FunctionTask, survey: Survey) -> LaunchPlan:
    """Return the plan of a run; refuse one whose ranks would lack a model that they need."""
    plan = LaunchPlan.of(options, task, survey, ProcessState.now())
    history: Any = getattr(shell_here(), "history_manager", None)
    cells = list(getattr(history, "input_hist_raw", ()))  # none in a script
    refuse_what_stays_here(plan.left_out, plan.devices.num_processes, cells, "the function", "num_processes=1")
    return plan


def _set_aside(devices: Devices) -> Unmoved:
    """Return the notebook's models on the GPUs of the run, which move to the host while it lasts."""
    return movable(vars(sys.modules["__main__"]), {gpu.index for gpu in devices.gpus}, is_asked_for=True)


def _show(launcher: Launcher, spec: LaunchSpec, survey: Survey, aside: Unmoved | None = None) -> tuple[RunView, str]:
    """Begin to show a run, with the warnings to read before; return the shown run, and the run in words.

    Args:
        aside: The objects that the notebook moves off the GPUs during the run.
    """
    assert isinstance(spec.task, FunctionTask)
    title = _describe_call(spec.task.function, spec.task.args, spec.task.kwargs)
    shown = show_run(launcher, spec.devices, survey, title, aside, is_elsewhere=spec.fork_server is not None)
    return shown, title


def show_run(
    launcher: Launcher,
    devices: Devices,
    survey: Survey,
    title: str,
    aside: Unmoved | None = None,
    *,
    is_elsewhere: bool = False,
    frames: PanelSink | None = None,
    screen: Screen | None = None,
) -> RunView:
    """Begin to show a run under its name, with the warnings to read before; return the shown run.

    Args:
        aside: The objects that the notebook moves off the GPUs during the run.
        is_elsewhere: The GPUs are those of other machines: nothing is known here of who holds their memory.
        frames, screen: See `Views.show`.
    """
    facts = RunFacts(title, str(devices), devices.names())
    shown = launcher.views.show(
        shell_here(), devices.num_processes, facts, survey.platform, says_end=False, frames=frames, screen=screen
    )
    freed_on = (lambda device: 0) if aside is None else aside.bytes_on
    # GPUs that a new process of this machine will use
    entered = () if is_elsewhere or (devices.is_here and _uses_cuda()) else devices.gpus
    for line in [*_without_gpus(devices), *before_a_run(entered, freed_on)]:
        shown.write("stderr", f"{line}\n")
    return shown


def _conclude(run: Run, ended: RankResults, launcher: Launcher, shown: RunView, title: str) -> None:
    """Complete the record of a run, show its end, and store it."""
    seen(run, shown)
    with closing(ended):
        run.values = [ended.values(rank).get("value") for rank in range(len(ended.reports))]
        run.error, word = how_it_ended(run, ended)
        post_mortem = PostMortem.of(title, word, run.error, ended)
    if run.stopped:
        shown.write("stdout", f"{run.stopped}\n")
    shown.end(word, run.seconds, run.error, None if ended.failed_alike else ended.first_failed)
    keep_run(run, post_mortem, shown, launcher)


def keep_run(run: Run, post_mortem: PostMortem | None, shown: RunView, launcher: Launcher) -> None:
    """Complete the record by the facts and the state that were shown; it becomes `nbaccel.last_run`."""
    run.facts, run.state = shown.facts, shown.state
    launcher.remember(run.light(), post_mortem)


def _uses_cuda() -> bool:
    """Return whether this process uses CUDA: then it is on its GPU, and most likely holds the memory that is full."""
    is_initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _without_gpus(devices: Devices) -> list[str]:
    return [str(devices)] if devices.why_no_gpu else []


def how_it_ended(run: Run, ended: RankResults) -> tuple[BaseException | None, str]:
    """Return the exception that a run of a function raises, and its end in one word; note the limit that ended it."""
    if ended.is_own_limit:
        run.stopped = ended.at_the_limit(run.history, run.checkpoint)
    if ended.raised is not None:
        return ended.raised, "stopped"
    if ended.is_interrupted:
        return KeyboardInterrupt("the run was interrupted"), "stopped"
    if ended.is_timed_out and ended.is_own_limit:
        return None, "stopped"
    if ended.is_timed_out:
        return TimeoutError(f"the run was stopped after its time limit, {duration(run.seconds)}"), "stopped"
    stopped = [rank for rank, report in enumerate(ended.reports) if report is not None and report.status == "stopped"]
    if stopped and run.error is None:  # the code raises it, or somebody has sent the signal to the process
        return KeyboardInterrupt(f"rank {stopped[0]} of {len(ended.reports)} ended by a KeyboardInterrupt"), "stopped"
    error = run.error or _missing_value(ended)
    return error, "done" if error is None else "failed"


def _describe_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Format the call of a function.

    Example:
        >>> _describe_call(pow, (2, 5), {"mod": 7})
        'pow(2, 5, mod=7)'
    """
    values = [*map(_briefly, args), *(f"{name}={_briefly(value)}" for name, value in kwargs.items())]
    return f"{getattr(function, '__name__', type(function).__name__)}({', '.join(values)})"


def _briefly(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) and len(repr(value)) < _LONGEST_ARGUMENT else "…"


def _missing_value(ended: RankResults) -> ResultsMissing | None:
    report = ended.reports[0]
    if report is None or not report.missing:
        return None
    reason = next(iter(report.missing.values()))
    return ResultsMissing(
        f"the function finished, but rank 0 could not send its value back: {reason}. "
        "Return tensors, arrays, modules or plain data.",
        report.missing,
    )


def launch_inline(
    spec: LaunchSpec, survey: Survey, check: bool = True, news: str = "", origin: RunOrigin = NO_ORIGIN
) -> Run:
    """Run a function in this process.

    Args:
        news: A line to print about that; empty for none.
    """
    launcher, start = default_launcher(), spec.start
    error: BaseException | None = None
    post_mortem: PostMortem | None = None
    stopped = ""
    with launcher.turn():
        shown, title = _show(launcher, spec, survey)
        if news:
            shown.write("stdout", f"{news}\n")
        try:
            with until_its_end(shown), ends_its_group(launcher):
                try:
                    run_inline(spec, [shown])
                except (Exception, KeyboardInterrupt) as failure:
                    post_mortem = post_mortem_here(title, failure, spec.task)
                    raise
        except RunStopped as stop:
            stopped = str(stop)
            shown.write("stdout", f"{stopped}\n")
        except BaseException as failure:
            error = failure
    assert isinstance(spec.task, FunctionTask)
    value = spec.task.value
    run = Run([value], shown.history, error, start.method, start.reason, "", shown.seconds, stopped=stopped)
    run.origin = origin
    keep_run(run, post_mortem, shown, launcher)
    if error is not None and (check or not isinstance(error, Exception)):
        try:
            raise error
        finally:
            del error, run  # else this frame, the error and what its frames hold would keep each other
    return run


def check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not callable(function):
        raise TypeError(
            f"the first argument must be the function that the ranks run, got {type(function).__name__}. "
            "Pass the function itself and its arguments apart: notebook_launcher(train, args=(1, 2))"
        )
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple, got {type(args).__name__}; for one argument write args=({args!r},)")
    if _surely_fits(function, args, kwargs):
        return
    with contextlib.suppress(ValueError):  # some builtins have no signature to check against
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(function, "__name__", "the function")
            raise TypeError(
                f"{name}{inspect.signature(function)} cannot be called with args={tuple(args)!r}: {error}. "
                "Nothing was started."
            ) from None


def _surely_fits(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a plain function takes these arguments, all by position: `inspect` describes each parameter.

    Example:
        >>> _surely_fits(lambda a, b=2: a, (1,), {}), _surely_fits(lambda a, b=2: a, (), {})
        (True, False)
    """
    # `inspect` would look for the function that one with attributes stands for.
    if type(function) is not FunctionType or kwargs or function.__dict__:
        return False
    code = function.__code__
    least, takes_more = code.co_argcount - len(function.__defaults__ or ()), code.co_flags & inspect.CO_VARARGS
    return not code.co_kwonlyargcount and least <= len(args) and bool(takes_more or len(args) <= code.co_argcount)
