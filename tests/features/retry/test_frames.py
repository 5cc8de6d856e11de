"""What a failed call had made goes, wherever its exception is held; the exception itself stays."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nbaccel.train.oom.memory.failed_frames import forget_frames
from nbaccel.train.oom.memory.release import forget_all_frames


class Large:
    """Stands for a tensor."""


class Failing:
    """A call that makes something large and fails; `made` looks for it afterwards."""

    made: weakref.ref[Large]

    def __call__(self, error: BaseException | None = None) -> None:
        large = Large()
        self.made = weakref.ref(large)
        raise error or MemoryError("full")

    def caught(self, error: BaseException | None = None) -> BaseException:
        try:
            self(error)
        except BaseException as caught:
            return caught
        raise AssertionError


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


def in_a_variable(error: BaseException) -> Any:
    return {"deep": [error]}


def in_a_future(error: BaseException) -> Any:
    def work() -> None:
        raise error

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work)


def in_a_log_record(error: BaseException) -> Any:
    return logging.LogRecord("name", logging.ERROR, "file", 1, "failed", (), (type(error), error, error.__traceback__))


def in_a_cycle(error: BaseException) -> Any:
    holder = {"error": error}
    holder["self"] = holder  # type: ignore[assignment]
    return holder


@pytest.mark.parametrize("hold", [in_a_variable, in_a_future, in_a_log_record, in_a_cycle])
def test_whoever_holds_the_exception_holds_no_locals_any_more(fail: Failing, hold: Callable[..., Any]) -> None:
    holder = hold(fail.caught())
    assert fail.made() is not None
    forget_all_frames()
    assert fail.made() is None
    assert holder is not None


def test_pythons_own_anchors_hold_nothing_any_more(fail: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    error = fail.caught()
    for name, value in (("last_value", error), ("last_exc", error), ("last_traceback", error.__traceback__)):
        monkeypatch.setattr(sys, name, value, raising=False)
    forget_all_frames()
    assert fail.made() is None


def test_a_generator_that_waits_to_go_on_is_not_closed() -> None:
    """Its frame is in a traceback that it keeps itself; clearing it would end it."""

    def numbers() -> Iterator[Any]:
        kept = None
        try:
            raise ValueError("on the way")
        except ValueError as error:
            kept = error
        yield kept
        yield "went on"

    async def paused(release: asyncio.Event) -> str:
        try:
            raise ValueError("on the way")
        except ValueError as error:
            kept = error
        await release.wait()
        return f"after {kept}"

    async def main() -> str:
        release = asyncio.Event()
        task = asyncio.create_task(paused(release))
        await asyncio.sleep(0)
        forget_all_frames()
        release.set()
        return await task

    iterator = numbers()
    next(iterator)
    forget_all_frames()
    assert next(iterator) == "went on"
    assert asyncio.run(main()) == "after on the way"


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
