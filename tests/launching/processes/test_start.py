"""Forking ranks: the garbage collector of the notebook goes on as if nothing had been forked."""

from __future__ import annotations

import contextvars
import ctypes
import decimal
import errno
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.base.world import World
from nbaccel.launching.api import launch
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes import start
from nbaccel.launching.processes.start import MainThread
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen
from nbaccel.testing import run_ranks


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the notebook's collector is on. The notebook has frozen objects, as before forks of its own."""
    gc.freeze()
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


class Link:
    """Refers to itself: only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def collector() -> tuple[bool, tuple[int, int, int], int]:
    """What a program can ask of it."""
    return gc.isenabled(), gc.get_threshold(), len(gc.callbacks)


def test_the_collector_is_on_or_off_as_before_in_the_notebook_and_in_its_ranks(collects: bool) -> None:
    frozen, here = gc.get_freeze_count(), collector()
    assert launch(collector, 2, start_method="fork", cpu=True).values == [here, here]
    assert collector() == here
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)  # some are freed meanwhile


def test_young_garbage_of_the_notebook_stays_young() -> None:
    gc.collect()
    gc.disable()
    try:
        garbage = weakref.ref(Link())
        launch(int, 1, start_method="fork", cpu=True)
        gc.collect(0)
        assert garbage() is None, "a launch moved it into the oldest generation"
    finally:
        gc.enable()


def test_a_rank_never_looks_at_what_the_notebook_holds() -> None:
    """A collection writes to all that it looks at: each page of it would be copied in each rank."""

    def looked_at() -> int:
        return sum(type(item) is Link for item in gc.get_objects())

    gc.collect()
    held = [Link() for _ in range(100)]
    assert looked_at() == len(held)
    assert launch(looked_at, 1, start_method="fork", cpu=True).value == 0


def test_a_fork_that_fails_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    def refuse() -> int:
        raise OSError("no more processes")

    frozen, here = gc.get_freeze_count(), collector()
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(OSError, match="no more processes"):
        launch(int, 2, start_method="fork", cpu=True)
    assert collector() == here
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)


def _computes(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def _hears() -> bool:
    """Whether an interrupt comes in a loop that waits for nothing."""
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        _computes(30)  # in a function of its own: Python 3.13 does not count each jump of a loop as within a `try`
    except KeyboardInterrupt:
        return True
    return False


def test_a_rank_hears_an_interrupt_while_it_computes(start_method: str) -> None:
    assert launch(_hears, 2, start_method=start_method, cpu=True).values == [True, True]
    assert run_ranks(2, _hears) == [True, True]


def test_the_main_thread_of_a_runtime_that_is_laid_out_otherwise_is_left_alone() -> None:
    words = (ctypes.c_size_t * 2)(threading.get_ident(), 7)
    MainThread(ctypes.addressof(words), state=8).become()
    assert words[1] == 7
    words[0] += 1
    MainThread(ctypes.addressof(words), state=7).become()
    assert words[1] == 7


def test_a_fork_that_fails_leaves_no_memory_of_ranks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank was forked; the kernel's maps of both must not wait for the collector."""
    forks, made, of = [], [], start._ForkedRank.of.__func__

    def fork() -> int:
        forks.append(1)
        if len(forks) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return os.fork()

    def kept(cls: Any, *args: Any) -> Any:
        made.append(of(cls, *args))
        return made[-1]

    monkeypatch.setattr(start, "fork", fork)
    monkeypatch.setattr(start._ForkedRank, "of", classmethod(kept))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        launch(int, 2, start_method="fork", cpu=True)
    assert [each.rank.page._map.closed for each in made] == [True, True]
    assert [each.rank._ring._map.closed for each in made] == [True, True]


@pytest.mark.parametrize(("own_devices", "seen"), [(True, ["GPU-a", "GPU-b"]), (False, ["GPU-a,GPU-b"] * 2)])
def test_a_rank_sees_its_own_device_or_all(
    launcher: Launcher, start_method: str, own_devices: bool, seen: list[str]
) -> None:
    spec = LaunchSpec(
        FunctionTask(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"])),
        Devices(2, tuple(Gpu(number, f"GPU-{name}", "Tesla T4", 16 * 10**9) for number, name in enumerate("ab"))),
        Start(start_method, "a test"),
        own_devices=own_devices,
    )
    _, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
    try:
        values = [ended.values(rank)["value"] for rank in range(2)]
        assert values == [(device, str(rank)) for rank, device in enumerate(seen)]
    finally:
        ended.close()


def test_each_rank_has_two_devices_of_its_own(monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    four = Survey(tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9) for number in range(4)))
    monkeypatch.setattr(Survey, "take", lambda **options: four)

    def found() -> tuple[str, int, int]:
        world = World.from_env()
        return os.environ["CUDA_VISIBLE_DEVICES"], world.own_devices, world.device_number(2)

    run = launch(found, 2, devices="0,1,2,3", start_method=start_method)
    assert run.values == [("GPU-0,GPU-1", 2, 0), ("GPU-2,GPU-3", 2, 0)]
    assert launch(found, 1, devices="0,1", start_method=start_method).values == [("GPU-0,GPU-1", 1, 0)]


@pytest.mark.parametrize(("says", "seen"), [("cuda:0", ["GPU-0", "GPU-1"]), ("cuda", ["GPU-0,GPU-1"] * 2)])
def test_a_function_of_the_notebook_that_says_cuda_0_has_each_rank_see_its_own_card_alone(
    monkeypatch: pytest.MonkeyPatch, says: str, seen: list[str]
) -> None:
    two = Survey(tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9) for number in range(2)))
    monkeypatch.setattr(Survey, "take", lambda **options: two)
    notebook = {"__name__": "__main__"}
    exec(f"def train():\n    import os\n    card = '{says}'\n    return os.environ['CUDA_VISIBLE_DEVICES']", notebook)
    assert launch(notebook["train"], start_method="fork").values == seen  # type: ignore[arg-type]


_OF_ONE_THREAD, _VARIABLE = threading.local(), contextvars.ContextVar("_VARIABLE", default=0)


def _found_there() -> tuple[Any, ...]:
    with pytest.raises(decimal.Inexact):
        decimal.Decimal(1) / 7
    return decimal.getcontext().prec, np.geterr()["divide"], _VARIABLE.get(), getattr(_OF_ONE_THREAD, "run", None)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a thread of this Python does not show its threading.local")
def test_a_forked_rank_has_what_belongs_to_the_thread_that_starts_it() -> None:
    def as_in_a_cell() -> None:
        decimal.getcontext().prec = 40
        decimal.getcontext().traps[decimal.Inexact] = True
        _VARIABLE.set(7)
        _OF_ONE_THREAD.run = "here"
        with np.errstate(divide="raise"):
            there.extend(launch(_found_there, 2, start_method="fork", cpu=True).values)

    there: list[Any] = []
    thread = threading.Thread(target=contextvars.copy_context().run, args=(as_in_a_cell,))
    thread.start()
    thread.join()
    assert there == [(40, "raise", 7, "here")] * 2


def test_a_rank_of_the_zygote_computes_with_the_precision_of_the_notebook() -> None:
    with decimal.localcontext() as here, np.errstate(divide="raise"):
        here.prec, here.traps[decimal.Inexact] = 40, True
        assert launch(_found_there, 1, start_method="zygote", cpu=True).value == (40, "raise", 0, None)
