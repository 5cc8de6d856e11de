"""Runs for the tests of views and pictures, as ranks would have reported them, and a screen. Runs in the tests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.events import Loss, Memory, Metric, Progress
from nbaccel.display.history import History
from nbaccel.display.run_view import RunView

GIGA = 1_000_000_000


def a_run(world_size: int = 2, steps: int = 500, *, on_device: bool = True) -> History:
    """`steps` of three epochs of 500 batches, 10 per second, with a noisy loss that falls."""
    noise = random.Random(0)
    history = History(world_size)
    for step in range(steps):
        for rank in range(world_size):
            at = step / 10
            loss = 0.3 + 2.0 * math.exp(-step / 150) * (1 + 0.1 * noise.gauss(0, 1))
            history.feed(rank, at, Loss(loss, step))
            history.feed(rank, at, Progress(step + 1, step % 500 + 1, 500, step // 500, 3))
            if step % 5 == 0:
                history.feed(rank, at, a_memory(on_device))
        history.feed(0, step / 10, Metric({"acc": 1 - math.exp(-step / 300)}, step))
    return history


def a_memory(on_device: bool = True) -> Memory:
    """9.1 of 14.7 GB on a device, peak 11.2; or 0.4 of 24 GB of the host, peak 0.5."""
    host = (4 * GIGA // 10, 5 * GIGA // 10, 24 * GIGA)
    device = (8 * GIGA, 91 * GIGA // 10, 112 * GIGA // 10, 147 * GIGA // 10)
    return Memory(*host, *device) if on_device else Memory(*host)


@dataclass
class Paper:
    """A screen: what was written, and every rich message."""

    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    has_room_for_bars: bool = False

    def show_bars(self, rows: Sequence[str]) -> None:
        raise AssertionError("whoever shows the run shows its bars")

    def write(self, stream: str, text: str) -> None:
        self.text += text

    def publish(self, message: dict[str, Any]) -> None:
        self.messages.append(message)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def report(shown: RunView, clock: Clock, seconds: float, every_s: float = 0.5) -> None:
    """So many seconds of training, with a tick each half of one."""
    until, step = clock.now + seconds, shown.history.steps
    while clock.now < until - 1e-9:
        clock.now += every_s
        step += 5
        shown.feed(0, clock.now, Loss(1.0 / step, step - 1))
        shown.feed(0, clock.now, Progress(step, step, 1000))
        shown.tick(clock.now)
