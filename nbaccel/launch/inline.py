"""Inline start: one rank, in the kernel's own process. For machines that cannot fork, and data too large to copy.

What the rank reports is heard at its step boundaries and at its end: here the kernel has no thread to spare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nbaccel.events import Event, Listener, outlet
from nbaccel.launch.rank.reporter import Reporter
from nbaccel.launch.screen.router import ConsoleScreen
from nbaccel.launch.spec import LaunchSpec, load_named
from nbaccel.launch.telemetry import Rings, Telemetry
from nbaccel.launch.wire.ring import RingWriter

__all__ = ["run_inline"]


def run_inline(spec: LaunchSpec, check: bool, listeners: Sequence[Listener] = ()) -> tuple[float, BaseException | None]:
    """Run the task here and now; returns the seconds it took, and its error unless `check` lets that through.

    listeners: hear what it reports, as rank 0.

    The environment is put back afterwards. Device memory that the task took stays the kernel's.
    """
    began = time.monotonic()
    before = {name: os.environ.get(name) for name in spec.environ}
    os.environ.update(spec.environ)
    error: BaseException | None = None
    try:
        with _heard(listeners):
            if spec.setup is not None:
                load_named(spec.setup)(spec.task.namespace)
            spec.task.run()
    except Exception as failure:
        if check:
            raise
        error = failure
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return time.monotonic() - began, error


@contextmanager
def _heard(listeners: Sequence[Listener]) -> Iterator[None]:
    """Feed `listeners` with what this process reports meanwhile, in the thread that is here."""
    rings = Rings()
    telemetry = Telemetry(rings, listeners, lambda line: ConsoleScreen().write("stderr", f"{line}\n"))
    fd = rings.add()
    ring = RingWriter(fd)
    os.close(fd)

    def at_a_boundary(event: Event) -> None:
        telemetry.tick(time.monotonic())

    def unheard(event: Event) -> None:
        """There is no peer, and no kernel to outlive."""

    reporter = Reporter(ring, gate=at_a_boundary, watch=unheard, grace=unheard)
    try:
        with outlet(reporter):
            yield
    finally:
        reporter.close()
        telemetry.read(time.monotonic(), is_last=True)
        rings.close()
        ring.close()
