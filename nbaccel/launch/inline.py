"""Inline start: one rank, in the kernel's own process. For machines that cannot fork, and data too large to copy.

What the rank reports is heard, and its panel drawn, between two of its reports, by the thread that makes them: no other
thread could show anything without getting in the way of the user's own output. A loop that reports nothing is followed
by nobody. Whatever was set for the run is put back behind it, also after an error or an interrupt.
"""

from __future__ import annotations

import multiprocessing.context
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nbaccel.errors import RunStopped
from nbaccel.events import Event, Listener, Sink, outlet
from nbaccel.launch.inline_stop import InlineStop
from nbaccel.launch.launcher import Launcher
from nbaccel.launch.postmortem import PostMortem
from nbaccel.launch.rank.foreign import foreign_trainers_report
from nbaccel.launch.rank.reporter import Reporter
from nbaccel.launch.screen.router import ConsoleScreen
from nbaccel.launch.spec import LaunchSpec, Task, load_named
from nbaccel.launch.telemetry import Rings, Telemetry
from nbaccel.launch.wire.ring import RingWriter

__all__ = ["ends_its_group", "left_for_why", "run_inline"]


def run_inline(spec: LaunchSpec, listeners: Sequence[Listener] = ()) -> None:
    """Run the task here and now; its error is raised.

    listeners: hear what it reports, as rank 0.

    The environment is put back afterwards. Device memory that the task took stays the kernel's.

    Raises:
        KeyboardInterrupt: the user has stopped it, see `InlineStop`.
        RunStopped: it met a time limit of its own.
    """
    stop = InlineStop(_say)
    with stop.heard(), _environment(spec.environ), _workers_are_forked(), _heard(listeners, stop):
        if spec.setup is not None:
            load_named(spec.setup)(spec.task.namespace)
        with foreign_trainers_report(lambda: stop.has_acted), stop.acts():
            spec.task.run()


@contextmanager
def ends_its_group(launcher: Launcher) -> Iterator[None]:
    """End the default process group that the block has formed and left, so that another one may form its own.

    A group that was there before stays, and so does that of a process which torchrun, or another launcher, has started:
    it is one of several.
    launcher: keeps the group. Gloo's threads may still hold it, and its destructor, which is called with the last
        reference, would wait for them.
    """
    before = _default_group()
    try:
        yield
    finally:
        left = _default_group()
        if left is not None and left is not before and left.size() == 1:
            launcher.ended_group = left
            sys.modules["torch.distributed"].destroy_process_group()


def _default_group() -> Any:
    """torch's default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


@contextmanager
def left_for_why(launcher: Launcher, title: str, task: Task) -> Iterator[None]:
    """What ends the run badly is kept as that of other runs is, while the user's names are there.

    title: the run in words.
    """
    try:
        yield
    except RunStopped:  # at the limit of its own, as it was planned
        raise
    except (Exception, KeyboardInterrupt) as error:
        with suppress(Exception):  # it explains how a run ended, and must not change that
            launcher.post_mortem = PostMortem.of_this_process(title, error, task)
        raise


def _say(line: str) -> None:
    ConsoleScreen().write("stderr", f"{line}\n")


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _workers_are_forked() -> Iterator[None]:
    """Let loaders fork their workers, as they do in ranks, where Python would start them by a fork server.

    From Python 3.14 on that is Linux's default, and its workers cannot import a class that the notebook defines. What
    the user chose stays, and so does macOS's default, where a forked process may not do much.
    """
    default: Any = multiprocessing.context._default_context
    pythons, actual = default._default_context, default._actual_context
    if pythons.get_start_method() != "forkserver" or actual not in (None, pythons):
        yield
        return
    forked = default.get_context("fork")
    default._default_context, default._actual_context = forked, None
    try:
        yield
    finally:
        default._default_context = pythons
        if default._actual_context in (None, forked):  # else the cell chose one
            default._actual_context = actual


@contextmanager
def _heard(listeners: Sequence[Listener], steps: Sink) -> Iterator[None]:
    """Feed `listeners` with what this process reports meanwhile, in the thread that is here.

    steps: hears of them first, and may raise.
    """
    rings = Rings()
    telemetry = Telemetry(rings, listeners, _say)
    fd = rings.add()
    ring = RingWriter(fd)
    os.close(fd)

    def unheard(event: Event) -> None:
        """There is no peer, and no kernel to outlive."""

    reporter = Reporter(ring, gate=steps, watch=unheard, grace=unheard)
    own_thread = threading.get_ident()

    def hear(event: Event) -> None:
        reporter(event)
        if threading.get_ident() == own_thread:
            telemetry.tick(time.monotonic())

    try:
        with outlet(hear):
            yield
    finally:
        reporter.close()
        telemetry.read(time.monotonic(), is_last=True)
        rings.close()
        ring.close()
