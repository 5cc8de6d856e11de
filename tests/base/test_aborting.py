"""A rank's groups on a device are aborted: what that ends, what is refused afterwards, and when it is over."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs
from nbaccel.base import aborting
from nbaccel.base.aborting import (
    abort_device_groups,
    device_parts,
    end_device_groups,
    is_aborted,
    settle,
    tore_step,
    uses_device,
)
from nbaccel.base.events import outlet
from nbaccel.base.failures import Failure, classify
from nbaccel.errors import PeerFailed, StepCorrupted
from nbaccel.testing import run_ranks
from nbaccel.train.distributed import transport
from nbaccel.train.distributed.process_group import process_group


def accelerator_on_a_device() -> Accelerator:
    devicelike.install()
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=devicelike.NAME)])


def _in_time(call: Any) -> str:
    """What `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _waits_while_another_thread_aborts() -> tuple[str, bool]:
    accelerator = accelerator_on_a_device()
    told = ""
    if accelerator.is_main_process:
        threading.Timer(0.1, abort_device_groups).start()
        told = _in_time(lambda: accelerator.gather(torch.ones(2)))
    return told, is_aborted()


def test_what_a_wait_returns_after_an_abort_is_no_result() -> None:
    (text, first), (_, second) = run_ranks(2, _waits_while_another_thread_aborts)
    assert text.startswith(
        "PeerFailed: this rank's exchange with its peers was cut short, since one failed, ran out of memory or was "
        "interrupted: gather float32[2] (call 1 of this process group) would use sums that are not complete."
    )
    assert (first, second) == (True, False)
    assert classify("PeerFailed", text) is Failure.PEER_LOST
    assert classify("DistBackendError", "NCCL communicator was aborted on rank 0.") is Failure.PEER_LOST


def _waits_while_an_abort_takes_long(by: str) -> tuple[float, float]:
    """How long it took until the thread that aborts went on, and until the rank did."""
    accelerator = accelerator_on_a_device()
    if not accelerator.is_main_process:
        return 0.0, 0.0
    devicelike.world().abort_takes_s = 2.0
    took: list[float] = []
    began = time.monotonic()

    def abort() -> None:
        nonlocal began
        began = time.monotonic()
        abort_device_groups(0.2)
        took.append(time.monotonic() - began)

    threading.Timer(0.1, abort).start()
    waits: dict[str, Any] = {
        "gather": lambda: accelerator.gather(torch.ones(2)),
        "barrier": accelerator.wait_for_everyone,
    }
    assert _in_time(waits[by]).startswith("PeerFailed: ")
    waited_s = time.monotonic() - began
    while not took:
        time.sleep(0.01)
    return took[0], waited_s


@pytest.mark.parametrize("by", ["gather", "barrier"])
def test_a_rank_is_not_frozen_while_its_groups_are_aborted(by: str) -> None:
    """torch answers whether work is over with Python's lock in its hand, and waits for the abort to say so."""
    abort_s, waited_s = run_ranks(2, _waits_while_an_abort_takes_long, by)[0]
    assert abort_s < 5
    assert waited_s < 5


def _leaves_a_wait() -> tuple[str, bool]:
    accelerator = accelerator_on_a_device()
    if not accelerator.is_main_process:
        return "", is_aborted()

    def look_up(event: Any) -> None:
        if type(event).__name__ == "Waiting":
            raise KeyError("somebody who knows better")

    with outlet(look_up):
        told = _in_time(lambda: accelerator.gather(torch.ones(2)))
    return told, devicelike.world().later(lambda: None).wait() and is_aborted()


def test_a_rank_that_leaves_its_wait_leaves_no_kernel_behind_that_waits_on() -> None:
    (text, is_over), _ = run_ranks(2, _leaves_a_wait)
    assert text == "KeyError: 'somebody who knows better'"
    assert is_over


def _saves() -> list[str]:
    accelerator = accelerator_on_a_device()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    told = []
    if accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            abort_device_groups()
            told += [
                _in_time(lambda: accelerator.save_state(folder / "state")),
                _in_time(lambda: accelerator.save_state(folder / "staged", blocking=False)),
                _in_time(lambda: accelerator.save_model(model, folder / "model")),
                _in_time(lambda: accelerator.save({"w": torch.ones(1)}, folder / "w.pt")),
            ]
            told += sorted(path.name for path in folder.rglob("*") if path.is_file())
    return told


def test_nothing_is_saved_after_an_abort() -> None:
    told, _ = run_ranks(2, _saves)
    assert len(told) == 4, told
    for text, name in zip(told, ["state", "staged", "model", "w.pt"], strict=True):
        assert text.startswith("PeerFailed: ")
        assert f"/{name} would use sums that are not complete" in text


def _saves_meanwhile(blocking: bool) -> tuple[str, bool]:
    """The copy from the device waits for what is queued there, which only the abort ends."""
    accelerator = accelerator_on_a_device()
    model: Any = accelerator.prepare(torch.nn.Linear(2, 1))
    if not accelerator.is_main_process:
        return "", False

    inner = accelerator.unwrap_model(model)
    state_dict = inner.state_dict

    def waits(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.05, abort_device_groups).start()
        while not is_aborted():
            time.sleep(0.005)
        return state_dict(*args, **kwargs)

    inner.state_dict = waits
    with tempfile.TemporaryDirectory() as name:
        told = _in_time(lambda: accelerator.save_state(f"{name}/state", blocking=blocking))
        return told, Path(name, "state").exists()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_that_waited_for_its_device_until_the_abort_is_none(blocking: bool) -> None:
    (text, exists), _ = run_ranks(2, _saves_meanwhile, blocking)
    assert text.startswith("PeerFailed: ")
    assert "/state would use sums" in text
    assert not exists


def _forms_its_group_anew() -> tuple[bool, bool, float]:
    devicelike.install()
    dist.init_process_group(devicelike.NAME)
    abort_device_groups()
    was = is_aborted()
    dist.destroy_process_group()
    dist.init_process_group(devicelike.NAME)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    dist.all_reduce(weight.grad)
    torch.optim.SGD([weight], lr=0.5).step()
    return was, is_aborted(), float(weight.detach())


def test_a_program_that_forms_its_groups_anew_by_itself_goes_on() -> None:
    assert run_ranks(2, _forms_its_group_anew) == [(True, False, 0.0)] * 2


def _settles() -> list[bool]:
    devicelike.install()
    dist.init_process_group(devicelike.NAME)
    group = devicelike.world()
    told = [settle(5)]
    group.later(group.wait_for_abort)
    told.append(settle(0.05))
    threading.Timer(0.05, abort_device_groups).start()
    return [*told, settle(30)]


def test_a_device_is_settled_when_it_has_done_what_it_was_given() -> None:
    """Not while it works, nor after an abort, which ends the wait."""
    began = time.monotonic()
    assert run_ranks(1, _settles) == [[True, False, False]]
    assert time.monotonic() - began < 20


def test_a_rank_waits_for_all_devices_that_hold_something_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may lie on several; in the others of the machine it makes no context."""
    synchronized: list[int] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 4, synchronize=lambda index: synchronized.append(index)
    )
    xpu = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda index: [0, 64][index],
        synchronize=lambda index: synchronized.append(10 + index),
    )
    has_context = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index in (0, 2))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, xpu=xpu, _C=has_context))
    assert aborting._synchronizer()()
    assert synchronized == [0, 2, 11]


def _two_groups() -> list[bool]:
    devicelike.install()
    dist.init_process_group(devicelike.NAME)
    second: Any = dist.new_group([0, 1])
    first = devicelike.world()
    works = [dist.all_reduce(torch.ones(1), async_op=True, group=group) for group in (first, second)]
    if dist.get_rank():
        return []
    # The kernels of one are queued behind those of the other: aborted one by one, in that order, neither would end.
    first.abort_waits_for = second
    extra = [dist.all_reduce(torch.ones(1), async_op=True, group=group) for group in (first, second)]
    ended = abort_device_groups(5)
    return [ended, *(bool(work.is_completed()) for work in [*works, *extra])]


def test_all_groups_of_a_process_are_aborted_at_the_same_time() -> None:
    assert run_ranks(2, _two_groups)[0] == [True] * 5


class _Part:
    def __init__(self) -> None:
        self.aborts = self.ends = 0

    def abort(self) -> None:
        self.aborts += 1

    def shutdown(self) -> None:
        self.ends += 1


def test_of_a_mixed_group_the_part_on_the_device_is_aborted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the part's own `abort`; the group's, which torch before 2.7 has not, would end that on the CPU too."""
    nccl, gloo = _Part(), _Part()
    mixed = SimpleNamespace(_get_backend=lambda device: {"cuda": nccl, "cpu": gloo}[device.type])
    monkeypatch.setattr(aborting, "_places", lambda: iter([(mixed, "cuda")]))
    try:
        assert uses_device()
        assert device_parts() == [nccl]
        assert [abort_device_groups(5), abort_device_groups(5)] == [True, True]
    finally:
        aborting.forget_abort()
    assert (nccl.aborts, gloo.aborts) == (1, 0)


def _fails() -> bool:
    raise dist.DistNetworkError("Connection reset by peer")


def _has_no_answer() -> bool:
    threading.Event().wait()
    return True


@pytest.mark.parametrize(
    ("do_peers_come", "ends", "aborts"),
    [(lambda: True, 1, 0), (lambda: False, 0, 1), (_fails, 0, 1), (_has_no_answer, 0, 1)],
)
def test_a_group_ends_regularly_only_if_the_peers_are_known_to_come(
    monkeypatch: pytest.MonkeyPatch, do_peers_come: Callable[[], bool], ends: int, aborts: int
) -> None:
    part = _Part()
    monkeypatch.setattr(aborting, "_ANSWER_S", 0.1)
    monkeypatch.setattr(aborting, "uses_device", lambda: True)
    monkeypatch.setattr(aborting, "device_parts", lambda: [part])
    try:
        assert end_device_groups(0.5, do_peers_come)
        assert not is_aborted()
    finally:
        aborting.forget_abort()
    assert (part.ends, part.aborts) == (ends, aborts)


def test_without_a_group_on_a_device_there_is_nothing_to_abort() -> None:
    assert abort_device_groups()
    assert settle(0)
    assert not is_aborted()


def test_an_abort_that_fails_is_no_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def abort(self) -> None:
            raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(aborting, "uses_device", lambda: True)
    monkeypatch.setattr(aborting, "device_parts", lambda: [Fails()])
    try:
        assert abort_device_groups(5)
        with pytest.raises(PeerFailed, match="a step of SGD would use sums that are not complete"):
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1).step()
    finally:
        aborting.forget_abort()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1).step()


def _raised(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


class _OfTheProgram(torch.optim.Optimizer):
    """An optimizer that torch knows nothing of, which fails in the middle of its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise MemoryError


def _wraps(step: Any) -> None:
    try:
        step()
    except MemoryError:
        raise ValueError("the program's own words") from None


def test_an_error_that_left_an_optimizers_step_is_told_from_others() -> None:
    torn = _OfTheProgram([torch.nn.Parameter(torch.ones(1))])
    assert tore_step(_raised(torn.step))
    assert tore_step(_raised(lambda: _wraps(torn.step)))
    assert tore_step(StepCorrupted("half of it"))
    assert not tore_step(_raised(lambda: torch.optim.SGD([], lr=1.0)))
    assert not tore_step(ValueError())
    hook = aborting._hold_steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aborting._abort_of_this_process, "is_set", True)
        refused = _raised(torn.step)
    hook.remove()
    assert type(refused) is PeerFailed
    assert not tore_step(refused)


def _interrupted(comes: bool, is_known: bool) -> tuple[str, bool, float]:
    """An interrupt takes rank 0 out of a wait for rank 1, which comes once rank 0 looks up again, or never."""
    accelerator = accelerator_on_a_device()
    store = process_group.meeting_place("interrupted").store
    began, looked = time.monotonic(), 0
    if not accelerator.is_main_process:
        if comes:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["looks up again"], timedelta(seconds=3))
            accelerator.wait_for_everyone()
        else:
            store.wait(["has left"], timedelta(seconds=30))
        return "", is_aborted(), 0.0

    def look_up(event: Any) -> None:
        nonlocal began, looked
        if type(event).__name__ == "Waiting":
            looked += 1
            if looked == 1:
                began = time.monotonic()
                raise KeyboardInterrupt
            store.set("looks up again", "1")
            if is_known:
                raise KeyError("the peer will never come")

    told = ""
    with outlet(look_up):
        try:
            accelerator.wait_for_everyone()
        except BaseException as error:
            told = type(error).__name__
    store.set("has left", "1")
    return told, is_aborted(), time.monotonic() - began


def test_an_interrupted_rank_stays_for_peers_that_come() -> None:
    (text, first, _), (_, second, _) = run_ranks(2, _interrupted, True, False)
    assert (text, first, second) == ("KeyboardInterrupt", False, False)


def test_an_interrupted_rank_does_not_stay_for_peers_that_are_known_not_to_come() -> None:
    (text, is_cut, seconds), _ = run_ranks(2, _interrupted, False, True)
    assert (text, is_cut) == ("KeyboardInterrupt", True)
    assert seconds < transport._INTERRUPTED_S


def test_an_interrupted_rank_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_INTERRUPTED_S", 0.3)
    (text, is_cut, _), _ = run_ranks(2, _interrupted, False, False)
    assert (text, is_cut) == ("KeyboardInterrupt", True)
