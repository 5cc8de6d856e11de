"""Buffers for saves in the background: their layout, how much of them is pinned, and when copies are waited for.

Tensors of a GPU are stand-ins; copies from one are seen by a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from nbaccel.base import hardware
from nbaccel.base.hardware import MemoryInfo
from nbaccel.train.checkpoint.content import Content, Staging


class OnGpu(torch.Tensor):
    """A tensor of the CPU that is taken for one of a GPU."""

    is_cuda = True


def on_gpu(*shape: int, fill: float = 1.0) -> torch.Tensor:
    return torch.full(shape, fill).as_subclass(OnGpu)


class Host(TorchDispatchMode):
    """A host with some available bytes: which sizes are pinned, and which copies and waits there are.

    refuses: pinning fails.
    """

    def __init__(self, available_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = MemoryInfo(10 * available_bytes, available_bytes)
        self.refuses = False
        self.asked: list[int] = []
        self.said: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty_like.default and kwargs.pop("pin_memory", False):
            self.asked.append(args[0].nbytes)
            if self.refuses:
                raise RuntimeError("CUDA error: out of memory")
        if func is torch.ops.aten.copy_.default:
            self.said.append("begin" if len(args) > 2 and args[2] else "copy")
        return func(*args, **kwargs)

    def synchronize(self) -> None:
        self.said.append("wait")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host(4800)
    monkeypatch.setattr(hardware, "usable_memory", lambda: host.memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: host)
    with host:
        yield host


def test_all_copies_from_a_gpu_are_begun_and_then_waited_for_once(host: Host) -> None:
    content = Content(models=[{"a": on_gpu(3), "b": on_gpu(2)}], optimizers=[{"c": on_gpu(2, fill=7.0)}])
    staging = Staging()
    parts = list(content.ready(staging))
    assert host.said == ["begin", "begin", "begin", "wait"]
    assert parts[1].packed is not None
    assert parts[1].packed.tensors["c"].tolist() == [7.0, 7.0]
    staging.settle()
    assert host.said.count("wait") == 1


def test_copies_of_the_host_are_there_at_once(host: Host) -> None:
    list(Content(models=[{"a": torch.ones(3)}]).ready(Staging()))
    assert (host.said, host.asked) == (["copy"], [])


def test_a_quarter_of_the_available_memory_is_pinned_counted_in_powers_of_two(host: Host) -> None:
    staging = Staging()
    for name in "abcd":
        staging.copy("model", name, on_gpu(100))  # 400 bytes, for which torch pins 512: 1024 of 1200
    staging.copy("model", "a", on_gpu(100))  # a buffer that is there
    assert host.asked == [400, 400]
    assert staging.nbytes == 1600
    staging.clear()
    staging.copy("model", "a", on_gpu(100))
    assert host.asked == [400, 400, 400]


def test_where_pinning_fails_the_buffers_are_plain_memory(host: Host) -> None:
    host.refuses = True
    staging = Staging()
    copies = [staging.copy("model", name, on_gpu(2, fill=2.0)) for name in "ab"]
    staging.settle()
    assert [copy.tolist() for copy in copies] == [[2.0, 2.0], [2.0, 2.0]]
    assert len(host.asked) == 1


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_a_buffer_has_the_layout_of_its_tensor_and_is_used_again(host: Host, kind: type[torch.Tensor]) -> None:
    staging = Staging()
    weight = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last).as_subclass(kind)
    first = staging.copy("model", "weight", weight)
    assert first.stride() == weight.stride()
    assert torch.equal(first, weight)
    assert staging.copy("model", "weight", weight) is first
    other = staging.copy("model", "weight", weight.contiguous())
    assert other.is_contiguous()
    assert staging.nbytes == weight.nbytes


def test_what_is_not_one_piece_of_memory_on_the_gpu_is_copied_at_once(host: Host) -> None:
    rows = torch.arange(12.0).reshape(3, 4).as_subclass(OnGpu)[:, :2]
    staging = Staging()
    copy = staging.copy("model", "rows", rows)
    assert staging.copy("model", "rows", rows) is copy
    assert copy.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert host.said == ["copy", "copy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_file_holds_rows_in_order_whatever_the_layout_was(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.arange(24.0).reshape(1, 3, 2, 4).to(memory_format=torch.channels_last).to(dtype)
    assert not weight.is_contiguous()
    for part in Content(models=[{"weight": weight}]).ready(Staging()):
        part.write(tmp_path)
    read = load_file(tmp_path / "model.safetensors")["weight"]
    assert torch.equal(read.float(), weight.float())
