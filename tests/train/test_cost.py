"""What a prepared step does beside the raw one, counted and not timed, so that no noise can trip it.

`make bench` has the times. A count that rises here is a design that changed: say so, or find the way around it.
"""

from __future__ import annotations

import dis
import functools
import gc
import importlib.util
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import nbaccel
from nbaccel import Accelerator
from nbaccel.base.events import outlet
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.launching.ipc.control import ControlPage, StepGate
from nbaccel.launching.ipc.ring import RingWriter, make_ring
from nbaccel.launching.rank.reporter import Reporter
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.step.accumulation import StepClock

STEPS = 16
"""Steps that are counted: whole windows of four."""

LONG = 1500
"""Batches of an epoch in which a thousand steps are looked at."""

OURS = str(Path(nbaccel.__file__).parent)

Loop = Callable[[], Iterator[None]]
"""Begins an epoch; every ``next`` of it is a step."""


@dataclass(frozen=True)
class Mode:
    """One way to train, and how many Python calls a step of it may make beside raw's: as many as it makes now."""

    calls: float = 0
    precision: str = "no"
    accumulation: int = 1
    on_nan: str = "warn"

    def __str__(self) -> str:
        return f"{self.precision}-{self.accumulation}"

    def accelerator(self) -> Accelerator:
        return Accelerator(self.precision, self.accumulation, cpu=True, on_nan=self.on_nan)


MODES = [
    Mode(17),
    Mode(13.25, accumulation=4),
    Mode(17, "bf16"),
    Mode(13.25, "bf16", accumulation=4),
    Mode(29, "fp16"),
]

PLAIN = Mode()

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def things(batches: int = 3 * STEPS) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(TensorDataset(torch.randn(batches, 4)))


def raw_loop(mode: Mode = PLAIN, in_ranks: bool = False) -> Loop:
    """What one writes by hand, without a call too many.

    Gradients are dropped by hand as ours does it: torch's `zero_grad` makes 21 calls or 19, by its version.
    """
    model, optimizer, loader = things()
    parameters = list(model.parameters())
    model = DistributedDataParallel(model) if in_ranks else model
    forward = torch.autocast("cpu", DTYPES[mode.precision])(model) if mode.precision in DTYPES else model
    scaler = torch.amp.GradScaler("cpu") if mode.precision == "fp16" else None

    def loop() -> Iterator[None]:
        for index, (x,) in enumerate(loader):
            is_last = (index + 1) % mode.accumulation == 0
            if in_ranks:
                model.require_backward_grad_sync = is_last  # as DDP's no_sync does, which is a generator
            loss = forward(x).float().square().mean()
            loss = loss if mode.accumulation == 1 else loss / mode.accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
            if is_last:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                for parameter in parameters:
                    parameter.grad = None
            yield

    return loop


def prepared_loop(mode: Mode = PLAIN, batches: int = 3 * STEPS) -> Loop:
    accelerator = mode.accelerator()
    model, optimizer, loader = accelerator.prepare(*things(batches))

    def loop() -> Iterator[None]:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
            yield

    return loop


class Calls(Counter[str]):
    """Calls of some steps in the middle of an epoch: Python functions by qualified name, C functions with a ``C``."""

    @classmethod
    def of(cls, loop: Loop) -> Calls:
        calls = cls()
        for number in range(2):  # begun at one line: to an unmodified loop another place is another loop
            epoch = loop()
            next(epoch)
            if number == 0:  # what is made once is made in the first epoch
                for _ in epoch:
                    pass

        def see(frame: FrameType, event: str, called: Any) -> None:
            code = frame.f_code
            if event == "call":
                calls[code.co_qualname] += 1
                calls["in python"] += 1
                calls["with import"] += code.co_filename.startswith(OURS) and _imports(code)
            elif event == "c_call":
                calls[f"C {called.__qualname__}"] += 1

        before = sys.getprofile()
        gc.disable()  # what it would call has nothing to do with a step
        sys.setprofile(see)
        try:
            for _ in range(STEPS):
                next(epoch)
        finally:
            sys.setprofile(before)
            gc.enable()
        for _ in epoch:
            pass
        return calls

    def per_step(self, name: str) -> float:
        return self[name] / STEPS

    @property
    def searches(self) -> int:
        """How often something was looked for that does not change: in the environment, or among the packages."""
        lookups = ("_Environ.__getitem__", "_Environ.__contains__", "find_spec", "import_module", "with import")
        return sum(self[name] for name in lookups)


@functools.cache
def _imports(code: CodeType) -> bool:
    """Whether there is an ``import`` in it, which takes a lock and a look each time."""
    return any(instruction.opname == "IMPORT_NAME" for instruction in dis.get_instructions(code))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_prepared_step_makes_few_calls_more_than_a_raw_one_and_searches_for_nothing(mode: Mode) -> None:
    raw, prepared = Calls.of(raw_loop(mode)), Calls.of(prepared_loop(mode))
    assert prepared.per_step("in python") - raw.per_step("in python") <= mode.calls, prepared - raw
    assert prepared.searches == 0


@pytest.mark.parametrize(("on_nan", "reads"), [("warn", 1), ("skip", 0), ("stop", 1)])
def test_a_loss_is_read_once_where_on_nan_looks_at_it_and_never_otherwise(on_nan: str, reads: int) -> None:
    raw, prepared = Calls.of(raw_loop()), Calls.of(prepared_loop(Mode(on_nan=on_nan)))
    assert raw["C Tensor.item"] == 0
    assert prepared.per_step("C Tensor.item") == reads


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
    for _ in range(STEPS):
        next(epoch)
    with _Operations() as seen:
        for _ in range(STEPS):
            next(epoch)
    for _ in epoch:
        pass
    return seen.counts


@pytest.mark.parametrize("mode", MODES[:4], ids=str)
def test_a_step_runs_raws_operations_on_tensors_and_one_read_of_the_loss(mode: Mode) -> None:
    raw, prepared = operations(raw_loop(mode)), operations(prepared_loop(mode))
    assert sum(raw.values()) > 5 * STEPS
    assert prepared - raw == {"aten._local_scalar_dense.default": STEPS}
    assert all(name.startswith("profiler.") for name in raw - prepared), "gradients are dropped without a record"


@contextmanager
def reported() -> Iterator[None]:
    """As in a rank of a notebook: steps are entered on the control page, losses go into the ring."""
    ring, page = make_ring(), ControlPage.create(1)
    writer = RingWriter(ring)
    reporter = Reporter(writer, StepGate(page, 0), lambda event: None, lambda event: None)
    reporter.start()
    reporter.rest()  # its thread, which looks at memory now and then, is not what is counted
    reporter.flush()
    with outlet(reporter):
        yield
    reporter.wake()
    reporter.close()
    writer.close()
    page.close()
    os.close(ring)


def test_a_step_that_is_reported_makes_a_few_calls_more() -> None:
    unheard = Calls.of(prepared_loop())
    with reported():
        heard = Calls.of(prepared_loop())
    assert heard.per_step("in python") - unheard.per_step("in python") <= 1, heard - unheard
    assert heard.per_step("C Struct.pack_into") == 1, "the loss"
    assert heard.per_step("C Struct.pack") == 0, "where the rank is: numbers of a page"
    assert heard.searches == 0


def kept(loop: Loop, steps: int = 1000) -> int:
    """Bytes that so many steps have left behind in code of ours."""
    epoch = loop()
    tracemalloc.start()
    try:
        for _ in range(300):  # the numbers up to 256 are made once for all
            next(epoch)
        before = _bytes_of_ours()
        for _ in range(steps):
            next(epoch)
        return _bytes_of_ours() - before
    finally:
        tracemalloc.stop()
        for _ in epoch:
            pass


def _bytes_of_ours() -> int:
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{OURS}/*")])
    return sum(trace.size for trace in ours.traces)


@pytest.mark.parametrize("listener", [nullcontext, reported], ids=["unheard", "reported"])
def test_a_thousand_steps_leave_less_than_a_byte_each(listener: Callable[[], AbstractContextManager[None]]) -> None:
    with listener():
        assert kept(prepared_loop(PLAIN, LONG)) < 1000, "a number that replaced a smaller one may be there"


PLANTS: dict[str, Callable[[], float]] = {
    "(lambda: None)()": lambda: Calls.of(prepared_loop())["in python"],
    "torch.zeros(()).item()": lambda: Calls.of(prepared_loop())["C Tensor.item"],
    "os.environ.get('HOME')": lambda: Calls.of(prepared_loop()).searches,
    "importlib.util.find_spec('no_such_package')": lambda: Calls.of(prepared_loop()).searches,
    "import json": lambda: Calls.of(prepared_loop()).searches,
    "torch.zeros(1)": lambda: sum(operations(prepared_loop()).values()),
    "hoard.append(1.5 * len(hoard))": lambda: kept(prepared_loop(PLAIN, LONG)),
}
"""What must not be in a step, and the guard that would find it."""


@pytest.mark.parametrize("plant", PLANTS)
def test_each_guard_finds_what_is_planted_in_a_step(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = PLANTS[plant]
    before = measure()
    source = f"def train(clock):\n    {plant}\n    rest(clock)\n"
    planted: dict[str, Any] = {"rest": StepClock.train, "hoard": [], "torch": torch, "os": os, "importlib": importlib}
    exec(compile(source, f"{OURS}/train/step/accumulation.py", "exec"), planted)
    monkeypatch.setattr(StepClock, "train", planted["train"])
    assert measure() > before


def _counted(mode: Mode) -> tuple[Calls, Calls]:
    mode.accelerator().wait_for_everyone()  # forms the process group
    return Calls.of(raw_loop(mode, in_ranks=True)), Calls.of(prepared_loop(mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode(20), Mode(23.75, accumulation=4)], ids=str)
def test_a_step_of_two_ranks_makes_a_few_calls_more_than_ddp(mode: Mode) -> None:
    for raw, prepared in run_ranks(2, _counted, mode):
        assert prepared.per_step("in python") - raw.per_step("in python") <= mode.calls, prepared - raw
        assert prepared.searches == 0


def by_hand(batch_size: int, layers: int, is_parallel: bool) -> Loop:
    """A loop that prepares nothing. Its first epoch is longer than what is looked at in the first batches of one."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(6 * STEPS * batch_size, 4)), batch_size)
    model = DistributedDataParallel(model) if is_parallel else model

    def descend(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def step(x: torch.Tensor) -> None:
        descend(x)  # a loss is known by the two innermost lines, which are the same for all who ask for a step
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def loop() -> Iterator[None]:
        for (x,) in loader:
            step(x)
            yield

    return loop


def _counted_unprepared(layers: int) -> tuple[Calls, Calls]:
    training = RawLoopTraining(World.from_env(), RunSettings())
    training.begin(None)
    unprepared = Calls.of(by_hand(4, layers, is_parallel=False))
    training.end()
    return Calls.of(by_hand(2, layers, is_parallel=True)), unprepared


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "calls"), [(2, 335), (20, 450)])
def test_a_step_of_an_unmodified_loop_makes_some_calls_more_than_ddp(layers: int, calls: int) -> None:
    for raw, unprepared in run_ranks(2, _counted_unprepared, layers):
        assert unprepared.per_step("in python") - raw.per_step("in python") <= calls, unprepared - raw
        assert unprepared.searches == 0
        assert unprepared["Averaging._meet"] == STEPS
        assert not unprepared["factors"], "the ranks' numbers are as before, and so is what follows from them"


def test_a_log_of_numbers_makes_a_few_calls(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")

    def loop() -> Iterator[None]:
        for step in range(3 * STEPS):
            accelerator.log({"loss": 0.5, "accuracy": 0.25, "epoch": 1, "part": "a"}, step=step)
            yield

    calls = Calls.of(loop)
    accelerator.end_training()
    assert calls.per_step("in python") <= 12
    assert calls["map_children"] == 0, "numbers and texts have nothing inside"
