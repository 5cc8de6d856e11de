"""The end of a process group on a device: regular, late, with an error on its way, or never coming."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs
from nbaccel.base.aborting import is_aborted
from nbaccel.base.events import Event, Waiting, outlet
from nbaccel.base.world import World
from nbaccel.errors import PeerFailed
from nbaccel.testing import run_ranks
from nbaccel.train.distributed import process_group as module
from nbaccel.train.distributed.process_group import GroupOptions, ProcessGroup

CUDA = torch.device("cuda", 0)


def _accelerator() -> Accelerator:
    devicelike.install()
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=devicelike.NAME)])


def _fails_with_a_sum_enqueued() -> tuple[float, str, bool, bool]:
    accelerator = _accelerator()
    began, told = time.monotonic(), ""
    if not accelerator.is_main_process:
        try:
            try:
                dist.all_reduce(torch.ones(1), async_op=True)  # which the peer never joins
                raise ValueError("expected 10 classes, got 11")
            finally:
                accelerator.end_training()
        except ValueError as error:
            told = str(error)
    return time.monotonic() - began, told, is_aborted(), dist.is_initialized()


def test_end_training_with_an_error_on_its_way_does_not_wait_for_what_is_enqueued() -> None:
    _, (seconds, text, is_cut, is_left) = run_ranks(2, _fails_with_a_sum_enqueued)
    assert seconds < 15
    assert text == "expected 10 classes, got 11"
    assert (is_cut, is_left) == (True, False)


def _fails_with_nothing_enqueued() -> tuple[bool, bool, float]:
    accelerator = _accelerator()
    total = float(accelerator.reduce(torch.ones(())))
    try:
        raise KeyError("image")
    except KeyError:
        accelerator.end_training()
    return is_aborted(), dist.is_initialized(), total


def test_an_end_with_nothing_under_way_is_regular_also_while_an_error_is_handled() -> None:
    assert run_ranks(2, _fails_with_nothing_enqueued) == [(False, False, 2.0)] * 2


def _ends_before_its_peer_has_come() -> tuple[float, list[str], bool]:
    accelerator = _accelerator()
    store = dist.PrefixStore("late", module.process_group._store)
    total = torch.ones(1)
    waits: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Waiting):
            waits.append(event.call)
            store.set("waits", "1")

    if accelerator.is_main_process:
        dist.all_reduce(total, async_op=True)
        with outlet(hear):
            accelerator.end_training()
    else:
        store.get("waits")
        dist.all_reduce(total)
        accelerator.end_training()
    return float(total), waits, is_aborted()


def test_a_regular_end_waits_for_a_peer_that_is_late() -> None:
    """And looks up meanwhile."""
    early, late = run_ranks(2, _ends_before_its_peer_has_come)
    assert early[0] == late[0] == 2.0
    assert set(early[1]) == {"the end of the process group"}
    assert (early[2], late[2]) == (False, False)


def _is_told_that_its_peer_will_not_come() -> tuple[str, bool]:
    accelerator = _accelerator()

    def know(event: Event) -> None:
        if isinstance(event, Waiting):
            raise KeyboardInterrupt

    if accelerator.is_main_process:
        dist.all_reduce(torch.ones(1), async_op=True)
        try:
            with outlet(know):
                accelerator.end_training()
        except KeyboardInterrupt:
            return "stopped", is_aborted()
    return "", is_aborted()


def test_a_regular_end_is_ended_by_whoever_knows_that_the_peer_will_not_come() -> None:
    assert run_ranks(2, _is_told_that_its_peer_will_not_come) == [("stopped", True), ("", False)]


def _ends_alone(folder: str) -> tuple[float, list[str], bool]:
    accelerator = _accelerator()
    module._END_S = 0.2
    began = time.monotonic()
    if accelerator.is_main_process:
        devicelike.world().ends_with_peers = True
        accelerator.end_training()
        accelerator.save({"w": torch.ones(1)}, f"{folder}/w.pt")
    return time.monotonic() - began, os.listdir(folder), dist.is_initialized()


def test_an_end_for_which_the_peers_do_not_come_spoils_nothing(tmp_path: Any) -> None:
    (seconds, files, is_left), _ = run_ranks(2, _ends_alone, str(tmp_path))
    assert seconds < 15
    assert files == ["w.pt"]
    assert not is_left


def _ends_after_its_peer_has_given_it_up(dies: bool) -> tuple[float, bool, bool]:
    """Rank 1 is late, or never comes."""
    accelerator = _accelerator()
    store = module.process_group.meeting_place("late").store
    devicelike.world().ends_with_peers = True
    if accelerator.is_main_process:
        module._END_S = 0.2
    else:
        store.get("has ended")
        if dies:
            return 0.0, False, False
    began = time.monotonic()
    accelerator.end_training()
    took_s = time.monotonic() - began
    store.set("has ended", "1")
    return took_s, is_aborted(), dist.is_initialized()


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_is_late_at_the_end_does_not_wait_for_peers_that_have_given_it_up(dies: bool) -> None:
    """A regular end would wait for them, and could not be aborted."""
    for seconds, is_spoilt, is_left in run_ranks(2, _ends_after_its_peer_has_given_it_up, dies):
        assert seconds < 15
        assert (is_spoilt, is_left) == (False, False)


@pytest.mark.parametrize(
    "worlds",
    [
        [World(0, 4, 0, 2), World(1, 4, 1, 2)],  # the other two are on another machine
        [World(0, 2, 0, 2), World(1, 2, 0, 2)],  # two machines, of which nobody has said how many ranks are on each
    ],
)
def test_the_end_waits_for_the_ranks_of_the_machine(worlds: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(module, "_END_S", 30.0)
    answers: list[bool] = []
    threads = []
    for world in worlds:
        group = ProcessGroup()
        group._store, group._world = store, world
        threads.append(
            threading.Thread(target=lambda group=group: answers.append(group._do_peers_leave()), daemon=True)
        )
        threads[-1].start()
    for thread in threads:
        thread.join(10)
    assert answers == [True, True]


def _ends_together() -> tuple[bool, bool, str]:
    accelerator = _accelerator()
    group = devicelike.world()
    second: Any = dist.new_group([0, 1])
    ended: list[str] = []
    for each, name in ((group, "default"), (second, "the program's")):
        each.shutdown = lambda name=name: ended.append(name)
        each.abort = lambda: ended.append("an abort")
    accelerator.end_training()
    return is_aborted(), dist.is_initialized(), ", ".join(sorted(set(ended)))


def test_ranks_that_come_to_the_end_together_end_all_groups_regularly() -> None:
    assert run_ranks(2, _ends_together) == [(False, False, "default, the program's")] * 2


def _begins_again_after_an_end_that_did_not_come(is_under_way: bool) -> str:
    accelerator = _accelerator()
    module._END_S = module._SETTLE_S = 0.2
    group = devicelike.world()
    group.is_stuck = group.ends_with_peers = True
    try:
        if is_under_way:
            group.later(group.wait_for_abort)
            raise KeyError("image")
    except KeyError:
        accelerator.end_training()
    else:
        accelerator.end_training()
    with pytest.raises(PeerFailed) as raised:
        _accelerator()
    return str(raised.value)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_an_accelerator_does_not_join_a_group_that_did_not_end(is_under_way: bool) -> None:
    for text in run_ranks(2, _begins_again_after_an_end_that_did_not_come, is_under_way):
        assert "the process group of the training before did not end, since cpu did not let go" in text


class _Init:
    """Stands for torch's `init_process_group`.  variable: of the environment, which it reads."""

    def __init__(self, variable: str = "") -> None:
        self.timeout: Any = "none was passed"
        self.found: str | None = None
        self.others: dict[str, Any] = {}
        self._variable = variable

    def __call__(self, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> None:
        self.timeout = timeout
        self.others = kwargs
        self.found = os.environ.get(self._variable)


@pytest.mark.parametrize("chosen", [None, timedelta(minutes=3)])
def test_torch_s_own_time_limit_holds_where_nobody_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch, chosen: timedelta | None
) -> None:
    """It is shorter for NCCL than for gloo."""
    init = _Init()
    monkeypatch.setattr(module.dist, "init_process_group", init)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # so that it is put back
    _form(World(0, 2, 0, 2), GroupOptions("nccl", chosen), monkeypatch)
    assert init.timeout == chosen


@pytest.mark.parametrize(
    ("local_world_size", "backend", "set_already", "found"),
    [(1, "nccl", None, "0"), (2, "nccl", None, None), (1, "nccl", "1", "1"), (1, "gloo", None, None)],
)
def test_between_machines_torch_s_watchdog_leaves_errors_of_nccl_to_the_program(
    monkeypatch: pytest.MonkeyPatch, local_world_size: int, backend: str, set_already: str | None, found: str | None
) -> None:
    assert (
        _read_by_torch("TORCH_NCCL_ASYNC_ERROR_HANDLING", set_already, local_world_size, backend, monkeypatch) == found
    )


@pytest.mark.parametrize(
    ("local_world_size", "backend", "set_already", "found"),
    [
        *((1, "nccl", None, "0"), (2, "nccl", None, "0"), (2, "cpu:gloo,cuda:nccl", None, "0")),
        *((2, "nccl", "1", "1"), (1, "gloo", None, None)),
    ],
)
def test_torch_s_watchdog_leaves_errors_of_the_device_to_the_program(
    monkeypatch: pytest.MonkeyPatch, local_world_size: int, backend: str, set_already: str | None, found: str | None
) -> None:
    assert (
        _read_by_torch("TORCH_NCCL_RETHROW_CUDA_ERRORS", set_already, local_world_size, backend, monkeypatch) == found
    )


def _read_by_torch(
    name: str, set_already: str | None, local_world_size: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """The variable as it is where the first of two ranks forms its group."""
    for variable in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
        monkeypatch.setenv(variable, "x")  # so that it is put back
    if set_already is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, set_already)
    init = _Init(name)
    monkeypatch.setattr(module.dist, "init_process_group", init)
    for collective in ("barrier", "all_reduce"):
        monkeypatch.setattr(module.dist, collective, lambda *args: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    _form(World(0, 2, 0, local_world_size), GroupOptions(backend), monkeypatch)
    return init.found


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_connects_in_the_warm_up_and_its_group_knows_the_device_afterwards(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Told of its device when it is formed, it would connect in there, where nothing has a limit."""
    init, group = _Init(), SimpleNamespace(bound_device_id=None)
    found_by_the_warm_up: list[Any] = []
    monkeypatch.setattr(module.dist, "init_process_group", init)
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(module.dist, "all_reduce", lambda *args: None)
    monkeypatch.setattr(module, "uses_device", lambda: True)
    monkeypatch.setattr(module, "warm_up", lambda *args: found_by_the_warm_up.append(group.bound_device_id))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    _form(World(0, 2, 0, 2), GroupOptions(backend), monkeypatch)
    assert "device_id" not in init.others
    assert found_by_the_warm_up == [None]
    assert group.bound_device_id == CUDA


def _form(world: World, options: GroupOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_meet", lambda *args: None)
    group = ProcessGroup()
    group._store, group._world = dist.HashStore(), world
    group._form(world, CUDA, options)
