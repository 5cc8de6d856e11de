"""What a failed call had made goes, wherever its exception is held; the exception itself stays."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nbaccel.features.retry.attempt import forget_frames
from nbaccel.testing import Faults, MemLimit
from train.oom.memory.test_frames import Failing, Large


@pytest.fixture
def fail() -> Failing:
    return Failing()


def test_the_locals_of_the_failed_call_go_and_the_traceback_stays(fail: Failing) -> None:
    error = fail.caught()
    assert fail.made() is not None
    forget_frames(error)
    assert fail.made() is None
    assert 'raise error or MemoryError("full")' in "".join(traceback.format_exception(error))


def test_frames_that_were_looked_at_go_too(fail: Failing) -> None:
    """Up to Python 3.12 a look at `f_locals` leaves a copy, which `traceback.clear_frames` forgets."""
    error = fail.caught()
    trace = error.__traceback__
    while trace is not None:
        _ = trace.tb_frame.f_locals
        trace = trace.tb_next
    forget_frames(error)
    assert fail.made() is None


def causes(error: BaseException) -> BaseException:
    outer = ValueError("outer")
    outer.__cause__ = error
    return outer


def handles(error: BaseException) -> BaseException:
    outer = ValueError("outer")
    outer.__context__ = error
    return outer


def groups(error: BaseException) -> BaseException:
    return BaseExceptionGroup("several", [KeyError("other"), causes(error)])


@pytest.mark.parametrize("wrapped", [causes, handles, groups])
def test_the_whole_chain_is_followed(fail: Failing, wrapped: Callable[[BaseException], BaseException]) -> None:
    forget_frames(wrapped(fail.caught()))
    assert fail.made() is None


def test_a_chain_in_a_circle_ends() -> None:
    one, other = ValueError(), ValueError()
    one.__context__, other.__context__ = other, one
    forget_frames(one)


def test_within_except_everything_but_the_running_frame_goes(fail: Failing) -> None:
    own = Large()
    try:
        fail()
    except MemoryError as error:
        forget_frames(error)
        is_gone = fail.made() is None
    assert is_gone
    assert isinstance(own, Large)


def test_what_the_body_of_a_comprehension_mentions_goes(fail: Failing) -> None:
    def step() -> None:
        large = Large()
        fail.made = weakref.ref(large)
        _ = [number / (number - 2) if large else None for number in range(5)]

    with pytest.raises(ZeroDivisionError) as caught:
        step()
    forget_frames(caught.value)
    assert fail.made() is None


def test_what_functions_within_the_failed_call_closed_over_goes(fail: Failing) -> None:
    def step() -> None:
        large = Large()
        fail.made = weakref.ref(large)

        def inner(depth: int, again: Callable[..., Any] | None, *, default: Large = large) -> Any:
            return again(0, None) if again else (1 // depth, large)

        inner(1, inner)

    with pytest.raises(ZeroDivisionError) as caught:
        step()
    forget_frames(caught.value)
    assert fail.made() is None


def test_a_function_that_somebody_can_still_call_keeps_what_it_closed_over() -> None:
    hooks: list[Callable[[], str]] = []

    def step() -> None:
        text = "still there"

        def hook() -> str:
            return text

        def failing() -> None:
            raise MemoryError(text)

        hooks.append(hook)
        failing()

    with pytest.raises(MemoryError) as caught:
        step()
    forget_frames(caught.value)
    assert hooks[0]() == "still there"


def test_a_function_that_its_running_caller_holds_keeps_what_it_closed_over() -> None:
    def attempts(work: Callable[[], str]) -> list[str]:
        outcomes = []
        for _ in range(2):
            try:
                outcomes.append(work())
            except MemoryError as error:
                forget_frames(error)
                outcomes.append("again")
        return outcomes

    tries, text = iter([1, 0]), "done"

    def work(default: str = "!") -> str:
        if next(tries):
            raise MemoryError
        return text + default

    assert attempts(work) == ["again", "done!"]
    tries = iter([1, 0])
    assert attempts(lambda: work()) == ["again", "done!"]


def test_a_generator_that_failed_holds_nothing(fail: Failing) -> None:
    def batches() -> Iterator[int]:
        large = Large()
        fail.made = weakref.ref(large)
        yield 1
        raise MemoryError

    iterator = batches()
    next(iterator)
    with pytest.raises(MemoryError) as caught:
        next(iterator)
    forget_frames(caught.value)
    assert fail.made() is None


def step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    hidden = model(batch)
    copies = [hidden * number for number in range(10)]
    torch.stack(copies).exp().sum().backward()


@pytest.mark.parametrize("point", ["forward", "output", "backward", "a limit"])
def test_criterion_30_bytes_are_back_at_the_baseline_after_20_failures(point: str) -> None:
    model, batch = torch.nn.Linear(10, 10), torch.ones(1000, 10)
    faults = Faults().oom_at(point, times=20)
    with MemLimit() as limit:
        limit.count(model, batch)
        baseline = limit.live_bytes
        step(model, batch)
        assert limit.peak_bytes > 10 * baseline
        model.zero_grad(set_to_none=True)
        limit.limit_bytes = 5 * baseline if point == "a limit" else None
        for _ in range(20):
            with faults, faults.in_model(model):
                try:
                    step(model, batch)
                except torch.OutOfMemoryError as error:
                    failed = error
            forget_frames(failed)
            assert limit.live_bytes == baseline, "without a garbage collection"
            assert failed.__traceback__ is not None
