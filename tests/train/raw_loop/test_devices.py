"""Which device a rank computes on where its program does not say: its own, among those that it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nbaccel.base.world import World
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.raw_loop.loop import Notices
from nbaccel.train.raw_loop.rank_streams import idle_gpu, use_own_device
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.raw_loop.trained_tensors import Model

SECOND = World(1, 2, 1, 2)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes the current device, on a machine that is made up."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("visible", "own", "current"), [(2, 1, [1]), (1, 1, []), (2, 2, [0])])
def test_cuda_without_a_number_is_the_ranks_own_as_soon_as_it_is_used(
    chosen: list[Any], monkeypatch: pytest.MonkeyPatch, visible: int, own: int, current: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    use_own_device(replace(SECOND, own_devices=own))
    assert not torch.cuda.is_initialized()
    assert chosen == []
    ((choose, _),) = torch.cuda._queued_calls
    choose()
    assert chosen == current


def test_a_torch_without_cuda_is_asked_for_no_device(chosen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    use_own_device(SECOND)
    assert torch.cuda._queued_calls == []


@pytest.mark.parametrize(("visible", "own", "index"), [(2, 1, 1), (1, 1, 0), (2, 2, 0)])
def test_a_prepared_loop_finds_its_device_among_those_it_sees(
    chosen: list[Any], monkeypatch: pytest.MonkeyPatch, visible: int, own: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    state = PartialState()
    monkeypatch.setattr(
        "nbaccel.train.distributed.partial_state.current_world", lambda: replace(SECOND, own_devices=own)
    )
    assert state.device == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("has_gpu", "trained_on", "is_said"),
    [(True, [CPU], True), (True, [CPU, CUDA], False), (True, [CUDA], False), (False, [CPU], False)],
)
def test_a_loop_on_the_cpu_is_told_of_the_gpu_that_it_leaves_idle(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, trained_on: list[torch.device], is_said: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert idle_gpu(trained_on).startswith("the model is on the CPU, and the GPU idle: model.to('cuda')") == is_said


def test_several_ranks_are_told_once(chosen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices(replace(SECOND, rank=0))
    for device in (CUDA, CPU, CPU):
        notices.note_models([Model("Linear", 4, None, device)])
    assert capsys.readouterr().out.count("the GPU idle") == 1


def test_a_single_rank_is_told_once(chosen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    watch = SingleRankWatch()
    watch.begin({})
    model = torch.nn.Linear(2, 1, device="cpu")
    for _ in range(2):
        model(torch.ones(1, 2, device="cpu")).sum().backward()
    watch.end()
    assert capsys.readouterr().out.count("the GPU idle") == 1
