"""The first exchange of a process group over its devices: right, wrong, failing, or never over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs
from nbaccel.base.aborting import is_aborted
from nbaccel.base.events import Event, Waiting, outlet
from nbaccel.testing import run_ranks
from nbaccel.train.distributed import process_group as module
from nbaccel.train.distributed.process_group import process_group

CURE = (
    "The devices are not connected in the way in which DEVICELIKE takes them to be. Set one of these before the ranks "
    "start (%env in a notebook) and try again: NCCL_P2P_DISABLE=1, if direct access between the GPUs does not work "
    "(behind an IOMMU, in some virtual machines); NCCL_SHM_DISABLE=1, or a container with --shm-size=1g, if shared "
    "memory is short. NCCL_DEBUG=INFO says what NCCL does."
)


def _form(backend: str = devicelike.NAME) -> Accelerator:
    devicelike.install()
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])


def _count_exchanges() -> tuple[list[int], float]:
    accelerator = _form()
    formed = devicelike.world().issued
    process_group.drop()
    process_group.renew(dist.PrefixStore("again", process_group._store))
    return [formed, devicelike.world().issued], float(accelerator.reduce(torch.ones(())))


def test_each_new_group_on_devices_is_tried_before_it_is_used() -> None:
    """Also one that is formed anew: two sums, a gathering, a broadcast."""
    assert run_ranks(2, _count_exchanges) == [([4, 4], 2.0)] * 2


def _form_on_the_cpu() -> tuple[bool, bool]:
    _form("gloo")
    return dist.is_initialized(), dist.group.WORLD._get_sequence_number_for_group() == 1  # type: ignore[union-attr]


def test_a_group_of_the_cpu_is_not_tried() -> None:
    """It has its barrier, and no more."""
    assert run_ranks(2, _form_on_the_cpu) == [(True, True)] * 2


def _in_words(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


class _Wrong(devicelike.DeviceLike):
    """As where direct access between devices fails: long messages arrive with holes."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = super().allreduce(tensors, options)
        if self.rank() == 1 and tensors[0].numel() > 1:
            self.later(lambda: tensors[0][1000:1005].zero_()).wait()
        return work


class _Failing(devicelike.DeviceLike):
    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        raise RuntimeError("Error while creating shared memory segment /dev/shm/nccl-1x2y3z")


class _Silent(devicelike.DeviceLike):
    """Hangs before there is any work to ask."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        self.wait_for_abort()
        return super().allreduce(tensors, options)


class _SilentOnOne(_Silent):
    """The same on one rank, for which the others wait."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return super().allreduce(tensors, options) if self.rank() else devicelike.DeviceLike.allreduce(self, tensors)


def _first_exchange_of(kind: type[devicelike.DeviceLike], limit_s: float, stops: bool) -> tuple[str, bool]:
    devicelike.install(kind)
    module.LIMIT_S, module._LOOK_UP_S = limit_s, 0.05

    def hear(event: Event) -> None:
        if stops and isinstance(event, Waiting) and event.call.startswith("the first exchange"):
            raise KeyboardInterrupt(event.call)

    with outlet(hear):
        return _in_words(_form), is_aborted()


def test_a_sum_that_comes_out_wrong_is_told_before_anything_is_trained() -> None:
    (right, _), (wrong, _) = run_ranks(2, _first_exchange_of, _Wrong, 60.0, False)
    assert right == ""
    assert wrong == (
        "RuntimeError: rank 1 of 2: a sum of 1048576 numbers over cpu came out wrong in 5 of 1048576 numbers, 0 "
        f"instead of 1 in number 1000. Nothing was trained.\n{CURE}"
    )


def test_what_the_backend_says_itself_comes_with_the_cure() -> None:
    for text, _ in run_ranks(2, _first_exchange_of, _Failing, 60.0, False):
        assert text == f"RuntimeError: Error while creating shared memory segment /dev/shm/nccl-1x2y3z\n{CURE}"


@pytest.mark.parametrize("kind", [_Silent, _SilentOnOne])
def test_an_exchange_that_is_never_over_ends_in_time_with_the_cure(kind: type[devicelike.DeviceLike]) -> None:
    for rank, (text, is_cut) in enumerate(run_ranks(2, _first_exchange_of, kind, 0.3, False)):
        assert text == (
            f"TimeoutError: rank {rank} of 2: the first exchange of the process group over cpu (a sum of 1 number) was "
            f"not over after 0.3 s. {CURE}"
        )
        assert is_cut


@pytest.mark.parametrize("kind", [_Silent, _SilentOnOne])
def test_an_exchange_that_is_never_over_can_be_interrupted(kind: type[devicelike.DeviceLike]) -> None:
    for text, is_cut in run_ranks(2, _first_exchange_of, kind, 60.0, True):
        assert text == "KeyboardInterrupt: the first exchange of the process group (a sum of 1 number)"
        assert is_cut
