"""Faults 21 to 26 of 26, as launched ranks meet them: numbers, data and memory that are not what was expected."""

from __future__ import annotations

import itertools
import os
import resource
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mounts import on_small_disk
from nbaccel import Accelerator, NestedLaunch, find_executable_batch_size, launch
from nbaccel.utils import DataLoaderConfiguration, gather_object

pytestmark = pytest.mark.slow


def step_with(factor: float, times: int, **options: Any) -> tuple[int, list[str]]:
    """Steps that were done of `times`, each with a loss times `factor` on the last rank, and what was warned of."""
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    bad, done = factor if accelerator.is_last_process else 1.0, 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            accelerator.backward(model(torch.ones(1, 1)).sum() * bad)
            optimizer.step()
            optimizer.zero_grad()
            done += not accelerator.optimizer_step_was_skipped
    return done, [str(warning.message) for warning in said]


def test_fault_21_nan_and_inf() -> None:
    (_, first), (done, last) = launch(step_with, 2, (float("nan"), 1), start_method="fork", cpu=True).values
    assert (done, first) == (1, [])
    assert len(last) == 1
    assert last[0].startswith("the loss is nan in step 0 on rank 1 of 2")
    values = launch(step_with, 2, (float("inf"), 3), {"on_nan": "skip"}, start_method="fork", cpu=True).values
    assert [done for done, _ in values] == [0, 0]
    with pytest.raises(FloatingPointError, match="step 0"):
        launch(step_with, 2, (float("nan"), 3), {"on_nan": "stop"}, start_method="fork", cpu=True)


def test_fault_21_overflow_for_ever() -> None:
    """A scaler that finds no scale does not halve itself to nothing in silence."""
    values = launch(step_with, 2, (1e38, 60), {"mixed_precision": "fp16"}, start_method="fork", cpu=True).values
    assert [done for done, _ in values] == [0, 0]
    said = [text for _, texts in values for text in texts]
    assert any("50 optimizer steps in a row were skipped on all 2 rank(s)" in text for text in said)
    assert any("the loss scale is down to 1." in text for text in said)


MODES: dict[str, dict[str, Any]] = {"pad": {}, "drop": {}, "join": {"even_batches": False}}


def ids_seen(mode: str) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """By number of samples and batch size: the ids in this rank's batches, and those that the metrics see."""
    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**MODES[mode]))
    seen = {}
    for count, size in itertools.product((1, 7), (2, 4)):
        loader: Any = DataLoader(range(count), size, drop_last=mode == "drop")  # type: ignore[arg-type]
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
        batches: list[int] = []
        metrics: list[int] = []
        with accelerator.join_uneven_inputs([model]) if mode == "join" else torch.enable_grad():
            for batch in loader:
                accelerator.backward(model(batch.float()[:, None]).sum())
                batches += batch.tolist()
                if mode != "join":
                    metrics += accelerator.gather_for_metrics(batch).tolist()
        seen[count, size] = batches, sorted(metrics)
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_fault_22_uneven_data(mode: str) -> None:
    first, second = launch(ids_seen, 2, (mode,), start_method="fork", cpu=True).values
    for (count, size), (batches, metrics) in first.items():
        trained = Counter(batches) + Counter(second[count, size][0])
        kept = count // (2 * size) * 2 * size if mode == "drop" else count
        if mode == "pad":
            assert set(trained) == set(range(count))
        else:
            assert trained == Counter(range(kept))
        if mode != "join":
            assert metrics == second[count, size][1] == list(range(kept))


def prepare_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader([], 2)):  # type: ignore[arg-type]
        pass


def test_fault_22_an_empty_data_set() -> None:
    with pytest.raises(ValueError, match="the dataset of a prepared loader is empty"):
        launch(prepare_nothing, 2, start_method="fork", cpu=True)


def odd_leaves() -> list[str]:
    accelerator = Accelerator(cpu=True)
    here: Any = {"text": "a", "none": None, "lock": threading.Lock()}
    assert accelerator.gather(torch.ones(())).tolist() == [1.0, 1.0]
    assert accelerator.gather("text") == ["text", "text"]
    errors = []
    for call in (
        lambda: accelerator.gather({"x": torch.ones(1), "y": "text"}),
        lambda: gather_object([here] if accelerator.process_index else ["plain"]),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        errors.append(str(caught.value))
    accelerator.wait_for_everyone()  # the group is still good
    return errors


def test_fault_23_odd_leaves() -> None:
    first, second = launch(odd_leaves, 2, start_method="fork", cpu=True).values
    assert first == second, "every rank raises the same"
    assert "got str. gather_for_metrics takes any picklable object" in first[0]
    assert "rank 1: TypeError: cannot pickle '_thread.lock' object" in first[1]


class Zeros(Dataset[torch.Tensor]):
    def __init__(self, count: int, numbers: int) -> None:
        self.count, self.numbers = count, numbers

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[torch.Tensor]:  # type: ignore[override]
        return [torch.zeros(self.numbers) for _ in range(4)]


def load_large_batches() -> None:
    for _ in DataLoader(Zeros(8, 1 << 18), 2, num_workers=1):
        pass


def test_fault_24_little_shared_memory() -> None:
    def run() -> str:
        error = launch(load_large_batches, 1, start_method="fork", cpu=True, check=False).error
        return "\n".join(getattr(error, "__notes__", ()))

    advice = on_small_disk(Path("/dev/shm"), 1 << 20, run)
    assert "/dev/shm is full, and DataLoader workers pass batches through it: use num_workers=0" in advice


def keep_batches_with_few_files() -> None:
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    batches = list(DataLoader(Zeros(200, 1), 2, num_workers=1))
    assert len(batches) == 100


def test_fault_24_few_open_files() -> None:
    with pytest.raises((RuntimeError, OSError)) as caught:
        launch(keep_batches_with_few_files, 1, start_method="fork", cpu=True)
    notes = "\n".join(caught.value.__notes__)
    assert "may open no more files" in notes
    assert "set_sharing_strategy('file_system') in the cell, or use num_workers=0" in notes


def launches_again() -> None:
    launch(int, 2, start_method="fork", cpu=True)


def test_fault_25_nested_launch() -> None:
    with pytest.raises(NestedLaunch, match=r"this is rank [01] of a run already, and ranks do not launch ranks"):
        launch(launches_again, 2, start_method="fork", cpu=True)
    Accelerator(cpu=True)  # of the kernel's own: it does not forbid a launch
    assert launch(int, 2, start_method="fork", cpu=True).values == [0, 0]


def out_of_memory_on_one_rank(bad: int) -> tuple[list[int], list[int], list[float]]:
    """Sizes that were tried, samples of the attempt that counted, and the weights after it."""
    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> tuple[list[int], list[float]]:
        accelerator.free_memory()
        tried.append(batch_size)
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        loader: Any = DataLoader(range(16), batch_size)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
        seen: list[int] = []
        for step, x in enumerate(loader):
            if (accelerator.process_index, step) == (bad, 0) and batch_size > 4:
                raise torch.OutOfMemoryError("CPU out of memory. On purpose.")
            accelerator.backward(model(x.float()[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += x.tolist()
        return seen, [float(parameter.detach().sum()) for parameter in model.parameters()]

    seen, weights = train()
    return tried, seen, weights


@pytest.mark.parametrize("bad", [0, 1])
def test_fault_26_out_of_memory_on_one_rank(bad: int) -> None:
    first, second = launch(out_of_memory_on_one_rank, 2, (bad,), start_method="fork", cpu=True).values
    assert first[0] == second[0], "every rank tries the same sizes"
    assert first[0][-1] <= 4
    assert sorted(first[1] + second[1]) == list(range(16))
    assert first[2] == second[2]
