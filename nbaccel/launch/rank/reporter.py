"""Reporter: the outlet of a rank's events. Runs in ranks; it decides where an event goes, and waits for nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

from nbaccel.events import Event, Metric, Sink
from nbaccel.launch.wire.channel import Channel

__all__ = ["Reporter"]

_METRICS_EVERY_S = 0.2
_METRICS_KEPT = 10_000


class Reporter:
    """The rank's outlet: steps go to the gate and waits to the watch at once, metrics to the kernel now and then.

    A thread reads the numbers, so that a tensor on a device is waited for away from the training step.
    """

    def __init__(self, channel: Channel, gate: Sink, watch: Sink) -> None:
        self._channel = channel
        self._gate = gate
        self._watch = watch
        self._metrics: deque[Metric] = deque(maxlen=_METRICS_KEPT)
        self._logged = 0
        self._sent = 0
        self._flushing = threading.Lock()  # rows leave in order, also when the run ends while the thread sends
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Metric):
            self._metrics.append(event)
            self._logged += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbaccel-metrics", daemon=True)
                self._thread.start()
        else:
            self._gate(event)
            self._watch(event)

    def _run(self) -> None:
        while True:
            time.sleep(_METRICS_EVERY_S)
            self.flush()

    def flush(self) -> None:
        """Send what was logged so far."""
        with self._flushing:
            rows = []
            with contextlib.suppress(IndexError):
                while True:
                    metric = self._metrics.popleft()
                    rows.append([metric.step, {name: _number(value) for name, value in metric.values.items()}])
            if rows:
                self._sent += len(rows)
                with contextlib.suppress(OSError):
                    self._channel.send({"op": "metrics", "rows": rows, "lost": self._logged - self._sent})


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:200]
