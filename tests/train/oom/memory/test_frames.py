"""What failed calls had made goes, whoever holds their exceptions; the exceptions themselves stay."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

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
