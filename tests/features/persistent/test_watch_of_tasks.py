"""What a setup makes to keep a training together is told of every task of ranks that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fakes import first_task
from nbaccel.features.persistent.persistent_start import start_persistent
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, RunEnd, Start, TaskWatch
from nbaccel.launching.launcher import default_launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import ConsoleScreen

pytestmark = pytest.mark.timeout(120)

SETUP = f"{__name__}:make_watch"


class Watch:
    """Notes what it is told; keeps nothing."""

    is_at_work, fails_on_parts = False, ""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, namespace: dict[str, Any] | None) -> None:
        self.told.append("begin")
        if namespace is not None:
            namespace["told"] = self.told

    def end(self) -> None:
        self.told.append("end")

    def stop(self) -> None:
        self.told.append("stop")

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        return False

    def keeps(self, tensors: Sequence[Any]) -> bool:
        return False

    def explain(self) -> str:
        return ""

    def note_wrapper(self) -> None:
        pass


def make_watch(namespace: dict[str, Any] | None) -> TaskWatch:
    return Watch()


@pytest.fixture
def cells() -> Iterator[Callable[..., Any]]:
    """Runs cells in two ranks that stay; returns what their watch was told."""
    home = SharedNamespace({"__name__": "__main__"})
    spec = LaunchSpec(first_task(home), Devices(2), Start("fork", "a test"), setup=SETUP, end=RunEnd(stays=True))
    persistent = start_persistent(default_launcher(), spec, ConsoleScreen())

    def run(code: str, without: Sequence[int] = ()) -> Any:
        task = CellTask(CellSource(code, "Cell In[1]"), home.namespace, ("told",), home=home)
        _, ended = persistent.run(task, RunObservers(ConsoleScreen()), title="Cell In[1]", excluded_ranks=without)
        try:
            return ended.values().get("told")
        finally:
            ended.close()

    yield run
    persistent.close(RunObservers(ConsoleScreen()))


def test_ranks_that_stay_are_watched_in_every_task_of_all(cells: Callable[..., Any]) -> None:
    first = ["begin", "end"]  # of the start itself
    assert cells("1") == [*first, "begin", "end"]
    cells("1 / 0")
    assert cells("told = list(told)") == [*first, "begin", "end", "begin", "stop", "begin"]
    told = cells("1", without=[1])
    assert told == [*first, "begin", "end", "begin", "stop", "begin"], "nothing is told of a part of the ranks"
