"""Where the seconds of a step go, by a clock that only the program turns."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from features.check.dry_run.fakes_of_devices import FakeDevice
from nbaccel.features.check.dry_run.step_times import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pass:
    place: str = "train:3"
    name: str = "loader"
    number: int = 0
    given: int = 3


class Measured:
    """Times are measured while entered."""

    def __init__(self, clock: Any = None) -> None:
        self.clock = clock or Clock()
        self.records: list[Mapping[str, Any]] = []
        self.steps = 0
        self.times = StepTimes(self.records.append, self._stepped, self.clock)

    def _stepped(self) -> None:
        self.steps += 1

    def __enter__(self) -> Measured:
        self.times.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.times.end()

    def seconds(self, place: str = "train:3") -> list[dict[str, float]]:
        return [record["seconds"] for record in self.records if record["place"] == place]


class Slow(torch.autograd.Function):
    """Takes five seconds in a backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, x: Tensor) -> Tensor:
        ctx.clock = clock
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.clock.now += 5
        return None, gradient


class Model(nn.Module):
    """Takes two seconds in a forward, of which its layer has one."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layer = Layer(clock)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 1
        return Slow.apply(self.clock, self.layer(x))  # type: ignore[no-any-return, no-untyped-call]


class Layer(nn.Linear):
    def __init__(self, clock: Clock) -> None:
        super().__init__(1, 1)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 1
        return super().forward(x)


class SlowSGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.now += 3
        return super().step(closure)


def optimizer_of(model: Model) -> SlowSGD:
    optimizer = SlowSGD(model.parameters(), 0.1)
    optimizer.clock = model.clock
    return optimizer


def test_each_part_of_a_step_has_its_seconds() -> None:
    with Measured() as run:
        model = Model(run.clock)
        optimizer = optimizer_of(model)
        this = Pass()
        run.times.begin_pass(this)
        with run.times.part("loader"):
            run.clock.now += 7
        run.times.batch(this, None, "first")
        loss = model(torch.ones(1, 1)).sum()
        run.clock.now += 11
        loss.backward()
        optimizer.step()
        run.times.end_pass(this)
    assert run.seconds() == [{"loader": 7, "forward": 2, "program": 11, "backward": 5, "optimizer": 3}]
    assert run.steps == 1


def test_outside_of_passes_seconds_are_kept_apart() -> None:
    with Measured() as run:
        run.clock.now += 4
        Model(run.clock)(torch.ones(1, 1))
    assert run.seconds("") == [{"program": 4, "forward": 2}]


def test_a_pass_within_another_one_has_its_own_seconds() -> None:
    with Measured() as run:
        outer, inner = Pass("train:3"), Pass("evaluate:9")
        run.times.begin_pass(outer)
        run.clock.now += 1
        run.times.begin_pass(inner)
        run.clock.now += 20
        run.times.end_pass(inner)
        run.clock.now += 2
        run.times.end_pass(outer)
    assert run.seconds("train:3") == [{"program": 3}]
    assert run.seconds("evaluate:9") == [{"program": 20}]


def test_a_forward_that_is_computed_again_in_the_backward_belongs_to_it() -> None:
    with Measured() as run:
        model = Model(run.clock)
        run.times.begin_pass(this := Pass())
        x = torch.ones(1, 1, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        run.times.end_pass(this)
    assert run.seconds() == [{"forward": 2, "backward": 7, "program": 0}]


def test_an_error_in_a_forward_ends_its_part() -> None:
    with Measured() as run:
        run.times.begin_pass(this := Pass())
        with pytest.raises(RuntimeError):
            Model(run.clock)(torch.ones(1, 2))
        run.clock.now += 9
        run.times.end_pass(this)
    assert run.seconds()[0]["program"] == 9


def test_a_step_that_calls_that_of_its_base_class_is_one_step() -> None:
    torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)  # torch hooks the step of each class when it is made
    with Measured() as run:
        optimizer_of(Model(run.clock)).step()
    assert run.steps == 1
    assert run.seconds("") == [{"program": 0, "optimizer": 3}]


def test_an_error_in_a_step_ends_its_part_at_the_next_one() -> None:
    with Measured() as run:
        model = Model(run.clock)
        optimizer = optimizer_of(model)
        run.times.begin_pass(this := Pass())

        def broken() -> Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(broken)
        optimizer.step()
        run.clock.now += 9
        run.times.end_pass(this)
    assert run.seconds()[0]["program"] == 9


def test_collectives_and_saves_are_taken_out_of_the_part_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: Tensor) -> None:
        run.clock.now += 6

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    class Synchronised(Model):
        def forward(self, x: Tensor) -> Tensor:
            torch.distributed.all_reduce(x)
            return super().forward(x)

    with Measured() as run:
        run.times.begin_pass(this := Pass())
        Synchronised(run.clock)(torch.ones(1, 1))
        run.times.end_pass(this)
    assert run.seconds() == [{"program": 0, "forward": 2, "communication": 6}]


def test_other_threads_are_not_measured() -> None:
    with Measured() as run:
        run.times.begin_pass(this := Pass())
        thread = threading.Thread(target=lambda: Model(run.clock)(torch.ones(1, 1)))
        thread.start()
        thread.join()
        run.times.end_pass(this)
    assert run.seconds() == [{"program": 2}]


def test_a_compiler_sees_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would trace them, and break its graph at the clock."""
    with Measured() as run:
        run.times.begin_pass(this := Pass())
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        Model(run.clock)(torch.ones(1, 1)).sum().backward()
        run.times.end_pass(this)
    assert run.seconds() == [{"program": 7}]


def test_afterwards_torch_is_as_before() -> None:
    before = torch.autograd.backward, torch.distributed.all_reduce
    with Measured() as run:
        assert torch.autograd.backward is not before[0]
    run.clock.now = 100
    Model(run.clock)(torch.ones(1, 1)).sum().backward()
    assert (torch.autograd.backward, torch.distributed.all_reduce) == before
    assert run.seconds("") == [{"program": 0}]


def test_a_record_says_which_pass_it_is_of() -> None:
    with Measured() as run:
        run.times.begin_pass(this := Pass(number=1, given=40))
        run.times.end_pass(this)
    assert run.records[0] == {
        "kind": "step_times",
        "place": "train:3",
        "name": "loader",
        "number": 1,
        "batches": 40,
        "seconds": {"program": 0},
    }


# --- on a device ------------------------------------------------------------------------------------------------------


class Batches:
    """A loop over `given` batches, as `LoaderCuts` tells of it."""

    def __init__(self, run: Measured, number: int = 0) -> None:
        self.run = run
        self.this = Pass(number=number, given=0)
        run.times.begin_pass(self.this)

    def draw(self, seconds: float) -> None:
        with self.run.times.part("loader"):
            self.run.clock.now += seconds
        self.this.given += 1
        self.run.times.batch(self.this, None, "first")

    def end(self) -> None:
        self.run.times.end_pass(self.this)


def test_a_part_has_the_time_of_the_device_and_what_waits_for_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    with Measured(device) as run:
        batches = Batches(run, number=1)
        model = nn.Linear(1, 1)
        model.register_forward_pre_hook(lambda *_: device.give(20))
        for _ in range(2):
            batches.draw(3)
            loss = model(torch.ones(1, 1)).sum()
            loss.register_hook(lambda _: device.give(40))
            loss.backward()
            device.wait()  # loss.item()
        batches.end()
    assert run.seconds() == [{"program": 0, "loader": 6, "forward": 40, "backward": 80}]


def test_a_loader_that_is_done_before_the_device_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    with Measured(device) as run:
        batches = Batches(run, number=1)
        model = nn.Linear(1, 1)
        model.register_forward_pre_hook(lambda *_: device.give(20))
        for _ in range(3):
            batches.draw(3)
            model(torch.ones(1, 1))
        batches.end()
    assert run.seconds() == [{"program": 0, "loader": 3, "forward": 60}]


def test_the_first_batch_is_left_out_where_there_are_more() -> None:
    """It loads kernels; what the loader takes for it counts, since some read ahead."""
    with Measured() as run:
        batches = Batches(run)
        for seconds in (100, 2, 2):
            batches.draw(3)
            run.clock.now += seconds
        batches.end()
    assert run.seconds() == [{"loader": 6, "program": 4}]
    assert run.records[0]["batches"] == 2


def test_an_only_batch_and_those_of_later_passes_all_count() -> None:
    with Measured() as run:
        for number, draws in ((0, 1), (1, 2)):
            batches = Batches(run, number)
            for _ in range(draws):
                batches.draw(3)
            batches.end()
    assert [record["batches"] for record in run.records if record["place"]] == [1, 2]
    assert run.seconds() == [{"program": 0, "loader": 3}, {"program": 0, "loader": 6}]


def test_copies_to_a_device_are_counted_where_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.Tensor.to
    with Measured() as run:
        run.times.begin_pass(this := Pass())

        seen: list[list[str]] = []
        monkeypatch.setattr(run.times, "_clock", lambda: (seen.append([*run.times._parts]), 0.0)[1])
        x = torch.ones(2)
        for target in ("meta", torch.device("meta"), torch.ones(1, device="meta")):
            seen.clear()
            assert x.to(target).device.type == "meta"
            assert ["host to device"] in seen, target
        for target in ("cpu", torch.float64, torch.ones(1), torch.device("cpu")):
            seen.clear()
            x.to(target)
            assert not seen, target
        x.to(dtype=torch.float64)
        x.to(device="cpu")
        assert not seen
        run.times.end_pass(this)
    assert torch.Tensor.to is before


def test_steps_in_hooks_of_gradients_count_though_another_thread_calls_them() -> None:
    """On a device autograd calls hooks in a thread of its own, while the program waits in `backward`."""
    with Measured() as run:
        model = Model(run.clock)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(_: Tensor) -> None:
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            assert run.steps == 0

        loss = model(torch.ones(1, 1)).sum()
        loss.register_hook(step)
        loss.backward()
        assert run.steps == 1
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
    assert run.steps == 1, "another training's"
