"""Where the seconds of a step go, by a clock that only the program turns."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbaccel.dry_run.step_times import StepTimes


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

    def __init__(self) -> None:
        self.clock = Clock()
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


@pytest.mark.parametrize(("number", "seconds", "batches"), [(0, 2, 2), (1, 92, 3)])
def test_the_first_batch_at_a_place_is_left_out(number: int, seconds: int, batches: int) -> None:
    with Measured() as run:
        this = Pass(number=number, given=0)
        run.times.begin_pass(this)
        for seconds_of_batch in (90, 1, 1):
            this.given += 1
            run.times.batch(this, None, "first")
            run.clock.now += seconds_of_batch
        run.times.end_pass(this)
    (record,) = [each for each in run.records if each["place"]]
    assert (record["seconds"], record["batches"]) == ({"program": seconds}, batches)


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
        "is_synchronised": False,
        "seconds": {"program": 0},
    }
