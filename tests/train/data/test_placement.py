"""How batches reach the device, with a copier that only takes notes and, where there is one, with CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.train.data.placement import place, prefetched


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


def test_the_next_copy_is_under_way_when_a_batch_is_handed_out() -> None:
    notes = Notes()
    flags = []
    for batch, is_last in prefetched(iter([("a", False), ("b", False), ("c", True)]), notes):
        notes.said.append(f"use {batch}")
        flags.append(is_last)
    assert notes.said == [
        *("start a", "start b", "finish a", "use a there"),
        *("start c", "finish b", "use b there", "finish c", "use c there"),
    ]
    assert flags == [False, False, True]


def test_no_batches_are_no_copies() -> None:
    notes = Notes()
    assert list(prefetched(iter([]), notes)) == []
    assert notes.said == []


def test_a_loop_that_is_left_copies_no_further() -> None:
    notes = Notes()
    batches = prefetched(iter([(name, False) for name in "abcd"]), notes)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert notes.said == ["start a", "start b", "finish a"]


def test_other_devices_get_a_batch_when_it_is_handed_out() -> None:
    ((batch, is_last),) = place(iter([({"x": torch.ones(2), "y": "text"}, True)]), torch.device("meta"))
    assert (batch["x"].device.type, batch["y"], is_last) == ("meta", "text", True)


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
