"""What a prepared step does beside the raw one, counted and not timed, so that no noise can trip it.

`make bench` has the times. A count that rises here is a design that changed: say so, or find the way around it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.events import outlet
from nbaccel.launch.rank.reporter import Reporter
from nbaccel.launch.wire.ring import RingWriter, make_ring
from nbaccel.testing import run_ranks

STEPS = 16
"""Steps that are counted: whole windows of four."""

Loop = Callable[[], Iterator[None]]
"""Begins an epoch; every ``next`` of it is a step."""


def things() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(TensorDataset(torch.randn(3 * STEPS, 4)))


def raw_loop() -> Loop:
    model, optimizer, loader = things()

    def loop() -> Iterator[None]:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    return loop


def prepared_loop(**options: Any) -> Loop:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*things())

    def loop() -> Iterator[None]:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            yield

    return loop


class Calls(Counter[str]):
    """Calls of some steps in the middle of an epoch: Python functions by qualified name, C functions with a ``C``."""

    @classmethod
    def of(cls, loop: Loop) -> Calls:
        for _ in loop():  # what is made once is made in the first epoch
            pass
        calls, epoch = cls(), loop()
        next(epoch)

        def see(frame: FrameType, event: str, called: Any) -> None:
            if event == "call":
                calls[frame.f_code.co_qualname] += 1
                calls["in python"] += 1
            elif event == "c_call":
                calls[f"C {called.__qualname__}"] += 1

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            for _ in range(STEPS):
                next(epoch)
        finally:
            sys.setprofile(before)
        for _ in epoch:
            pass
        return calls

    def per_step(self, name: str) -> float:
        return self[name] / STEPS

    @property
    def reads_of_environment(self) -> int:
        return self["_Environ.__getitem__"]

    @property
    def searches_for_packages(self) -> int:
        return self["find_spec"] + self["import_module"]


def steps_that_were_counted(**options: Any) -> tuple[Calls, Calls]:
    return Calls.of(raw_loop()), Calls.of(prepared_loop(cpu=True, **options))


@pytest.mark.parametrize(
    ("options", "calls_per_step"),
    [
        ({}, 28),
        ({"gradient_accumulation_steps": 1, "mixed_precision": "no"}, 28),
        ({"mixed_precision": "bf16"}, 38),
    ],
    ids=["plain", "said", "bf16"],
)
def test_a_prepared_step_makes_a_few_calls_more_than_a_raw_one(options: dict[str, Any], calls_per_step: int) -> None:
    raw, prepared = steps_that_were_counted(**options)
    assert prepared.per_step("in python") - raw.per_step("in python") <= calls_per_step


def test_a_withheld_step_makes_fewer_calls_than_a_raw_one() -> None:
    raw, prepared = steps_that_were_counted(gradient_accumulation_steps=4)
    assert prepared["in python"] < raw["in python"]


@pytest.mark.parametrize(("on_nan", "reads"), [("warn", 1), ("skip", 0), ("stop", 1)])
def test_a_loss_is_read_once_where_on_nan_looks_at_it_and_never_otherwise(on_nan: str, reads: int) -> None:
    raw, prepared = steps_that_were_counted(on_nan=on_nan)
    assert raw["C Tensor.item"] == 0
    assert prepared.per_step("C Tensor.item") == reads


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}, {"on_nan": "stop"}], ids=str)
def test_a_step_reads_no_environment_and_searches_for_no_package(options: dict[str, Any]) -> None:
    _, prepared = steps_that_were_counted(**options)
    assert (prepared.reads_of_environment, prepared.searches_for_packages) == (0, 0)


class _Operations(TorchDispatchMode):
    """Counts what reaches the device: operations on tensors, allocations among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(loop: Loop) -> Counter[str]:
    epoch = loop()
    next(epoch)
    with _Operations() as seen:
        for _ in range(STEPS):
            next(epoch)
    for _ in epoch:
        pass
    return seen.counts


def test_a_step_runs_raws_operations_on_tensors_and_one_read_of_the_loss() -> None:
    raw, prepared = operations(raw_loop()), operations(prepared_loop(cpu=True))
    assert sum(raw.values()) > 10 * STEPS
    assert prepared - raw == {"aten._local_scalar_dense.default": STEPS}
    assert raw - prepared == {}


def test_a_step_that_is_reported_makes_a_few_calls_more() -> None:
    ring = make_ring()
    writer = RingWriter(ring)
    reporter = Reporter(writer, lambda event: None, lambda event: None, lambda event: None)
    unheard = Calls.of(prepared_loop(cpu=True))
    with outlet(reporter):
        heard = Calls.of(prepared_loop(cpu=True))
    reporter.close()
    writer.close()
    os.close(ring)
    assert heard.per_step("in python") - unheard.per_step("in python") <= 5


def test_the_counts_would_show_what_must_not_be_there() -> None:
    def wasteful() -> Iterator[None]:
        for _ in range(STEPS + 2):
            os.environ.get("HOME")
            importlib.util.find_spec("no_such_package")
            torch.ones(1).item()
            yield

    calls = Calls.of(wasteful)
    assert calls.reads_of_environment >= STEPS
    assert calls.searches_for_packages >= STEPS
    assert calls.per_step("C Tensor.item") == 1


@pytest.mark.slow
def test_a_step_of_two_ranks_makes_a_few_calls_more_than_ddp() -> None:
    def counted() -> tuple[float, Calls]:
        Accelerator().wait_for_everyone()  # forms the process group
        model, optimizer, loader = things()
        ddp = torch.nn.parallel.DistributedDataParallel(model)

        def loop() -> Iterator[None]:
            for (x,) in loader:
                ddp(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

        return Calls.of(loop).per_step("in python"), Calls.of(prepared_loop())

    for raw, prepared in run_ranks(2, counted):
        assert prepared.per_step("in python") - raw <= 35
        assert (prepared.reads_of_environment, prepared.searches_for_packages) == (0, 0)


def test_a_log_of_numbers_makes_a_few_calls(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")

    def loop() -> Iterator[None]:
        for step in range(3 * STEPS):
            accelerator.log({"loss": 0.5, "accuracy": 0.25, "epoch": 1, "part": "a"}, step=step)
            yield

    calls = Calls.of(loop)
    accelerator.end_training()
    assert calls.per_step("in python") <= 26
    assert calls["map_children"] == 0, "numbers and texts have nothing inside"
