"""Inline start: one rank, in the kernel's own process. For machines that cannot fork, and data too large to copy.

The thread that makes the reports of the rank also reads them and draws the panel, between two reports: another thread
could show nothing without disturbing the user's own output. A loop that reports nothing is not followed. Everything
that was set for the run is restored after it, also after an error or an interrupt.
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
    """Run the task in this process; its error is raised.

    listeners: receive its reports, as those of rank 0.

    The environment is restored afterwards. Device memory that the task took stays with the kernel.

    Raises:
        KeyboardInterrupt: the user has stopped it, see `InlineStop`.
        RunStopped: it reached a time limit of its own.
    """
    stop = InlineStop(_say)
    with stop.heard(), _environment(spec.environ), _workers_are_forked(), _heard(listeners, stop):
        if spec.setup is not None:
            load_named(spec.setup)(spec.task.namespace)
        with foreign_trainers_report(lambda: stop.has_acted), stop.acts():
            spec.task.run()


@contextmanager
def ends_its_group(launcher: Launcher) -> Iterator[None]:
    """End the default process group that the block has formed and left, so that the next block may form its own.

    A group that existed before is kept, and so is the group of a process that torchrun, or another launcher, has
    started: it is one of several.
    launcher: keeps a reference to the group. Gloo's threads may still hold it, and its destructor, which is called with
    the last reference, would wait for them.
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
    """Return torch's default process group; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD


@contextmanager
def left_for_why(launcher: Launcher, title: str, task: Task) -> Iterator[None]:
    """Keep a post-mortem if the run fails or is interrupted, as other runs do, while the user's names still exist.

    title: the run in words.
    """
    try:
        yield
    except RunStopped:  # it reached its own limit, as planned
        raise
    except (Exception, KeyboardInterrupt) as error:
        with suppress(Exception):  # a post-mortem must not change how the run ends
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

    From Python 3.14 on that is Linux's default, and its workers cannot import a class that the notebook defines. A
    method that the user chose is kept, and so is macOS's default, where a forked process can do little.
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
    """Feed `listeners` with the reports of this process while the block runs, in the calling thread.

    steps: receives each report first, and may raise.
    """
    rings = Rings()
    telemetry = Telemetry(rings, listeners, _say)
    fd = rings.add()
    ring = RingWriter(fd)
    os.close(fd)

    def unheard(event: Event) -> None:
        """Ignore the event: there is no peer to watch, and no kernel to outlive."""

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
