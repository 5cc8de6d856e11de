"""How batches reach the device, with a copier or streams that only take notes and, where there is one, with CUDA."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.train.data import placement
from nbaccel.train.data.placement import CudaCopier, place, prefetched, to_device


class Notes:
    """A copier that says what happened in which order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, batch: Any) -> Any:
        self.said.append(f"start {batch}")
        return batch

    def finish(self, started: Any) -> Any:
        self.said.append(f"finish {started}")
        return f"{started} there"

    def settle(self) -> None:
        self.said.append("settle")


def test_the_next_copy_is_under_way_when_a_batch_is_handed_out_and_the_one_before_is_over_when_one_is_read() -> None:
    notes = Notes()
    flags = []

    def read() -> Iterator[tuple[str, bool]]:
        for name in "abc":
            notes.said.append(f"read {name}")
            yield name, name == "c"

    for batch, is_last in prefetched(read(), notes):
        notes.said.append(f"use {batch}")
        flags.append(is_last)
    assert notes.said == [
        *("read a", "start a", "settle"),
        *("read b", "start b", "finish a", "use a there", "settle"),
        *("read c", "start c", "finish b", "use b there", "settle", "finish c", "use c there"),
    ]
    assert flags == [False, False, True]


def test_no_batches_are_no_copies() -> None:
    notes = Notes()
    assert list(prefetched(iter([]), notes)) == []
    assert notes.said == []


def test_a_loop_that_is_left_copies_no_further_and_drops_no_batch_before_it_is_there() -> None:
    notes = Notes()
    batches = prefetched(iter([(name, False) for name in "abcd"]), notes)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert notes.said == ["start a", "settle", "start b", "finish a", "finish b"]


def test_other_devices_get_a_batch_when_it_is_handed_out() -> None:
    ((batch, is_last),) = place(iter([({"x": torch.ones(2), "y": "text"}, True)]), torch.device("meta"))
    assert (batch["x"].device.type, batch["y"], is_last) == ("meta", "text", True)


class Streams(TorchDispatchMode):
    """Stands in for torch.cuda's streams and events: what each of them is told, and where tensors are had and copied.

    current: where the program is.  made: how many streams there are beside the one of the device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.said: list[str] = []
        self.made = 0
        self.current = Stream(self, "main")

    def make(self, index: int) -> Stream:
        self.made += 1
        return Stream(self, f"side {self.made}")

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in ("empty_like", "copy_"):
            is_blocking = name == "copy_" and not (len(args) > 2 and args[2])
            self.said.append(f"{self.current}: {name}{' and waits' if is_blocking else ''}")
        return func(*args, **(kwargs or {}))


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name = streams, name

    def __str__(self) -> str:
        return self._name

    def wait_stream(self, other: Stream) -> None:
        self._streams.said.append(f"{self}: wait for {other}")

    def record_event(self) -> Event:
        return Event(self._streams, str(self))

    def wait_event(self, event: Event) -> None:
        self._streams.said.append(f"{self}: wait for {event.stream}")


class Event:
    def __init__(self, streams: Streams, stream: str) -> None:
        self._streams, self.stream = streams, stream
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        if self._queries == 2:  # it takes a moment
            self._streams.said.append(f"host: wait for {self.stream}")
        return self._queries == 2


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.make)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    placement._stream_beside.cache_clear()
    with streams:
        yield streams
    placement._stream_beside.cache_clear()


def _loop(streams: Streams, *values: Any, device: str = "cpu") -> list[Any]:
    """A loop over batches of one value each; "cpu" has the part of the device, so that there is something to see."""

    def read() -> Iterator[tuple[Any, bool]]:
        for value in values:
            streams.said.append("read")
            yield value, False

    seen = []
    for value, _ in prefetched(read(), CudaCopier(torch.device(device))):
        streams.said.append("use")
        seen.append(value)
    return seen


def test_a_copy_begins_behind_the_step_before_and_is_waited_for_where_it_is_used(streams: Streams) -> None:
    batches = [{"x": torch.full((2,), float(number)), "y": (number, "text")} for number in range(2)]
    seen = _loop(streams, *batches)
    copied = ["main: empty_like", "side 1: wait for main", "side 1: copy_"]
    assert streams.said == [
        *("read", *copied, "host: wait for side 1"),
        *("read", *copied, "main: wait for side 1", "use", "host: wait for side 1"),
        *("main: wait for side 1", "use"),
    ]
    assert [(batch["x"].tolist(), batch["y"]) for batch in seen] == [
        ([0.0, 0.0], (0, "text")),
        ([1.0, 1.0], (1, "text")),
    ]
    assert seen[0]["x"] is not batches[0]["x"]


def test_all_memory_of_a_batch_is_had_before_the_copies_wait(streams: Streams) -> None:
    _loop(streams, (torch.ones(1), torch.ones(2)))
    assert streams.said[1:6] == [
        *("main: empty_like", "main: empty_like", "side 1: wait for main", "side 1: copy_", "side 1: copy_")
    ]


def test_a_batch_that_is_not_pinned_is_pinned_first_and_nobody_waits_until_it_is_read(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        streams.said.append("pin")
        return tensor + 0

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (seen,) = _loop(streams, torch.arange(3))
    assert seen.tolist() == [0, 1, 2]
    assert streams.said == [
        *("read", "pin", "main: empty_like", "side 1: wait for main", "side 1: copy_", "main: wait for side 1", "use")
    ]


def test_a_batch_that_lies_on_the_device_already_is_waited_for_by_nobody(streams: Streams) -> None:
    batch = torch.empty(1, device="meta")
    (seen,) = _loop(streams, batch, device="meta")
    assert seen is batch
    assert streams.said == ["read", "side 1: wait for main", "main: wait for side 1", "use"]


def test_where_no_memory_can_be_pinned_batches_are_copied_from_where_they_are(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        tried.append(tensor)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert [seen.tolist() for seen in _loop(streams, torch.tensor([1]), torch.tensor([2]))] == [[1], [2]]
    assert len(tried) == 1


def test_forty_epochs_of_two_loaders_share_one_stream(streams: Streams) -> None:
    for _ in range(40):
        _loop(streams, torch.ones(1), torch.ones(1))
        _loop(streams, torch.ones(1))
    assert streams.made == 1


def test_a_forked_child_makes_a_stream_of_its_own(streams: Streams) -> None:
    CudaCopier(torch.device("cuda"))
    child = os.fork()
    if child == 0:
        CudaCopier(torch.device("cuda", 0))
        os._exit(streams.made)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    CudaCopier(torch.device("cuda", 0))
    assert streams.made == 1


class Graph:
    """A batch of a class of its own, as PyG's ``Data``."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[Graph, torch.device]:
        self._streams.said.append(f"{self._streams.current}: to{'' if non_blocking else ' and waits'}")
        return self, device


class Nested(Graph):
    """The same whose `to` knows nothing of waiting, as DETR's ``NestedTensor``."""

    def to(self, device: torch.device) -> tuple[Graph, torch.device]:  # type: ignore[override]
        return super().to(device)


@pytest.mark.parametrize(("kind", "moved"), [(Graph, "main: to"), (Nested, "main: to and waits")])
def test_a_batch_of_a_class_of_its_own_is_moved_where_it_is_used(
    streams: Streams, kind: type[Graph], moved: str
) -> None:
    graph = kind(streams)
    ((seen, device),) = _loop(streams, graph, device="cuda:0")
    assert (seen, device) == (graph, torch.device("cuda", 0))
    assert streams.said == [
        *("read", moved, "side 1: wait for main", "host: wait for side 1", "main: wait for side 1", "use")
    ]


class _Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding."""

    def to(self, device: Any, *, non_blocking: bool = False) -> _Encoding:
        pytest.fail("would hold the host for a step where the memory is not pinned")


def test_a_dictionary_with_a_to_of_its_own_is_copied_beside_the_step(streams: Streams) -> None:
    (seen,) = _loop(streams, _Encoding(x=torch.arange(3), y="text"))
    assert type(seen) is _Encoding
    assert (seen["x"].tolist(), seen["y"]) == ([0, 1, 2], "text")
    assert "side 1: copy_" in streams.said


def test_an_error_in_a_batchs_own_to_is_the_programs(streams: Streams) -> None:
    class Broken:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise TypeError("no such field")

    with pytest.raises(TypeError, match="no such field"):
        to_device([Broken()], torch.device("cuda"))


def test_memory_is_recorded_only_where_the_program_changes_streams_between_two_batches(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, str(stream))))
    copier = CudaCopier(torch.device("cpu"))
    copier.finish(copier.start({"x": torch.ones(1)}))
    assert recorded == []
    started = copier.start({"x": torch.ones(1)})
    with streams.entered(Stream(streams, "other")):
        batch = copier.finish(started)
    ((tensor, stream),) = recorded
    assert (tensor is batch["x"], stream) == (True, "other")


class _Opaque:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def to(self, device: torch.device, non_blocking: bool = False) -> _Opaque:
        return _Opaque(self.rows.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> _Opaque:
        return _Opaque(self.rows.pin_memory())


def _opaque(rows: list[tuple[torch.Tensor]]) -> _Opaque:
    return _Opaque(torch.stack([row for (row,) in rows]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pin", [False, True])
def test_batches_of_a_class_of_their_own_hold_on_cuda_what_they_held_on_the_host(pin: bool) -> None:
    dataset = TensorDataset(torch.arange(64 * 64 * 256).reshape(64 * 64, 256))
    loader = Accelerator().prepare(DataLoader(dataset, 64, pin_memory=pin, collate_fn=_opaque))
    sums = []
    for batch in loader:
        torch.cuda._sleep(2_000_000)
        sums.append(batch.rows.sum())
        del batch
    assert torch.stack(sums).tolist() == dataset.tensors[0].reshape(64, -1).sum(1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forty_epochs_on_cuda_keep_no_more_memory_than_two() -> None:
    dataset = TensorDataset(torch.zeros(64, 1 << 16))
    loader = Accelerator().prepare(DataLoader(dataset, 16))
    reserved = []
    for _ in range(40):
        for (batch,) in loader:
            batch.sum()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[1] <= 2 * 16 * (4 << 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pin", [False, True])
def test_batches_on_cuda_hold_what_they_held_on_the_host(pin: bool) -> None:
    dataset = TensorDataset(torch.arange(4096 * 256).reshape(4096, 256))
    loader = Accelerator().prepare(DataLoader(dataset, 64, pin_memory=pin))
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    seen = []
    for (batch,) in loader:
        assert batch.device.type == "cuda"
        torch.cuda._sleep(2_000_000)  # the copy of the next batch must not overwrite this one
        total += batch.sum()
        seen.append(batch[:, 0])
    assert total.item() == dataset.tensors[0].sum().item()
    assert torch.equal(torch.cat(seen).cpu(), dataset.tensors[0][:, 0])
    assert loader.end_of_dataloader
