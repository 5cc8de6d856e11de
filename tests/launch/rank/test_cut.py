"""What a rank tells the kernel about its waits in a device."""

from __future__ import annotations

import threading
import time

from nbaccel.launch.rank import cut
from nbaccel.launch.rank.cut import CutWatch
from nbaccel.launch.wire.control import ControlPage
from nbaccel.testing import run_ranks


def _forms_a_group_in_its_first_task() -> list[bool]:
    """Whether the page says that rank 1 hears cuts: at the task's begin, once it has a group, in the next task."""
    has_group = threading.Event()
    cut.uses_device, cut.has_gpu_driver = has_group.is_set, lambda: True
    page = ControlPage.create(2)
    watch = CutWatch(page, 1)
    watch.begin(stays=True)
    watch.enter()
    told = [page.hears_cuts(1)]
    has_group.set()
    end = time.monotonic() + 20
    while not page.hears_cuts(1) and time.monotonic() < end:
        time.sleep(0.005)
    told.append(page.hears_cuts(1))
    page.begin()
    watch.enter()
    return [*told, page.hears_cuts(1), page.hears_cuts(0)]


def test_a_group_that_is_formed_within_a_task_is_heard_of_at_once() -> None:
    assert run_ranks(1, _forms_a_group_in_its_first_task) == [[False, True, True, False]]
