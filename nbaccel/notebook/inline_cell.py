"""A cell that runs in the notebook's own process, where no rank can be started. Runs in the kernel.

What comes back is the same as from ranks: `--out` leaves other names as they were, and what training has put around
the user's objects is taken off again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbaccel.display.run_view import RunView
from nbaccel.errors import RunStopped
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.inline import post_mortem_here, run_inline, until_its_end
from nbaccel.launching.ipc.spec import Results
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_task import RESULT, CellTask
from nbaccel.namespace.wrappers import is_wrapper, plain
from nbaccel.notebook.cell_plan import CellPlan
from nbaccel.notebook.cell_run import DisplayData, raise_if_missing, with_reasons

__all__ = ["run_in_the_kernel"]

_ACCELERATOR = "accelerator"


def run_in_the_kernel(
    cell: CellPlan,
    shown: RunView,
    remember: Callable[[Run, PostMortem | None], None],
    say: Callable[[str], None],
) -> Any:
    """Run a cell in the notebook's own process, and return the value of its last expression.

    Args:
        remember: Gets the run that is over, and what `%debug` needs if it has failed.
        say: Prints a line.
    """
    task = cell.task
    leaving = _as_written if task.leaves_all else _only_out_changes
    error: BaseException | None = None
    post_mortem: PostMortem | None = None
    stopped, value = "", None
    try:
        with until_its_end(shown), leaving(task):
            try:
                run_inline(cell.spec, [shown])
            except (Exception, KeyboardInterrupt) as failure:
                post_mortem = post_mortem_here(cell.source.name, failure, task)
                raise
        results = task.results_here()
        value = results.values.get(RESULT)
        raise_if_missing(results.missing, task.out)
    except RunStopped as stop:
        stopped = str(stop)
        say(stopped)
        results = task.results_here()
        if results.missing:
            say(f"not brought back: {with_reasons(results.missing)}")
    except BaseException as failure:
        error = failure
        raise
    finally:
        start = cell.plan.start
        run = Run([value], shown.history, error, start.method, start.reason, "", shown.seconds, stopped=stopped)
        run.facts, run.state, run.origin = shown.facts, shown.state, cell.origin
        remember(run.light(), post_mortem)
        del run, error
    return _value_of(results)


@contextmanager
def _as_written(task: CellTask) -> Iterator[None]:
    """Keep the cell's names, without the wrappers that training has put around their objects."""
    namespace = task.namespace
    before = dict(namespace)
    try:
        yield
    finally:
        for name, value in list(namespace.items()):
            if before.get(name) is not value:
                namespace[name] = plain(value)
            _take_off_forward(plain(value))
        if _ACCELERATOR not in before and _ACCELERATOR not in task.names_mentioned():
            namespace.pop(_ACCELERATOR, None)


@contextmanager
def _only_out_changes(task: CellTask) -> Iterator[None]:
    """Restore names that `--out` does not list."""
    namespace = task.namespace
    before = dict(namespace)
    try:
        yield
    finally:
        after = task.results_here().values
        before |= {name: after[name] for name in task.out if name in after}
        for name in namespace.keys() - before.keys():
            del namespace[name]
        namespace.update(before)


def _value_of(results: Results) -> Any:
    """Return the last expression's value if it is small data, else an object with its display."""
    shown = results.facts.get("result")
    if shown is None or RESULT in results.values:
        return results.values.get(RESULT)
    return DisplayData(shown["data"], shown["metadata"])


def _take_off_forward(value: Any) -> None:
    """Restore the `forward` of the classes of a model and its models, if training has put another before it."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(type(value), torch.nn.Module):
        return
    for module in torch.nn.Module.modules(value):
        if is_wrapper(vars(module).get("forward")):
            del vars(module)["forward"]
