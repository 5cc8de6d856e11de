"""Parts of a rank hold nothing longer than they need it: in the kernel that makes them, and between two tasks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.base.world import World
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.rank_part import RankTask
from nbaccel.launching.ipc.spec import Results
from nbaccel.launching.rank.parts import _SetupWatch
from nbaccel.launching.rank.separate_trainings import OneTraining


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Held:
    """A thing that may be referred to weakly."""


@pytest.mark.usefixtures("_without_collector")
def test_a_kernel_that_drops_a_part_drops_its_page() -> None:
    page = ControlPage.create(2)
    part, known = OneTraining(page, World(0, 2, 0, 2), is_watching=True), weakref.ref(page)
    page.close()
    del part, page
    assert known() is None


@pytest.mark.usefixtures("_without_collector")
def test_a_rank_that_waits_for_its_next_task_holds_nothing_of_the_last_one() -> None:
    task: Any = SimpleNamespace(namespace={}, value=Held())
    known, part = weakref.ref(task.value), _SetupWatch()
    part.begin(RankTask(task))
    part.end()
    assert known() is not None
    part.facts("ok", Results())
    del task
    assert known() is None
