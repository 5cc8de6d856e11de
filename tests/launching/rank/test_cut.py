"""What a rank tells the kernel about its waits in a device."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

import devicelike
from fakes import first_task
from nbaccel.base.aborting import is_aborted
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.rank_part import RankTask
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.rank import lifetime
from nbaccel.launching.rank.lifetime import CutWatch
from nbaccel.testing import run_ranks

STAYS = RankTask(first_task(SharedNamespace({})))
"""A task of ranks that stay."""


def _forms_a_group_in_its_first_task() -> list[bool]:
    """Whether the page says that rank 1 hears cuts: at the task's begin, once it has a group, in the next task."""
    has_group = threading.Event()
    lifetime.uses_device, lifetime.has_gpu_driver = has_group.is_set, lambda: True
    page = ControlPage.create(2)
    watch = CutWatch(page, 1)
    watch.begin(STAYS)
    told = [page.hears_cuts(1)]
    has_group.set()
    end = time.monotonic() + 20
    while not page.hears_cuts(1) and time.monotonic() < end:
        time.sleep(0.005)
    told.append(page.hears_cuts(1))
    page.begin()
    watch.begin(STAYS)
    return [*told, page.hears_cuts(1), page.hears_cuts(0)]


def _is_told_that_peers_may_have_left() -> tuple[bool, bool]:
    """Whether a rank that stays has aborted: with its device idle, and while that waits."""
    devicelike.install()
    dist.init_process_group(devicelike.NAME)
    lifetime._HUNG_AT_STOP_S = 0.2
    page = ControlPage.create(1)
    CutWatch(page, 0).begin(STAYS)
    page.frees_hung = True
    time.sleep(1)
    first, group = is_aborted(), devicelike.world()
    group.later(group.wait_for_abort)
    end = time.monotonic() + 20
    while not is_aborted() and time.monotonic() < end:
        time.sleep(0.005)
    return first, is_aborted()


def test_at_a_stop_no_rank_aborts_whose_device_waits_for_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetime, "has_gpu_driver", lambda: True)
        assert run_ranks(1, _is_told_that_peers_may_have_left) == [(False, True)]


def test_a_group_that_is_formed_within_a_task_is_heard_of_at_once() -> None:
    assert run_ranks(1, _forms_a_group_in_its_first_task) == [[False, True, True, False]]
