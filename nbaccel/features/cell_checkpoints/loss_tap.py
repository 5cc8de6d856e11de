"""LossTap: gets the next losses that this process reports. Runs in ranks; no step after them costs anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbaccel.base.events import Event, Loss, Sink, reports

__all__ = ["LossTap"]


class LossTap:
    """Stands in front of the outlet until the next loss, and gives that loss to `take`.

    Args:
        take: Returns True to be given the loss after this one, too.
        is_read: Its number is needed, for which the device is waited for; else `take` gets 0.
    """

    def __init__(self, take: Callable[[float], bool | None], is_read: bool = True) -> None:
        self._is_read = is_read
        self._take: Callable[[float], bool | None] | None = take
        self._sink = _behind_spent(reports.sink)
        reports.lead_to(self)

    def __call__(self, event: Event) -> None:
        self._sink(event)
        if isinstance(event, Loss) and self._take is not None:
            take, self._take = self._take, None
            value: Any = event.value if self._is_read else 0.0
            if take(float(value.detach().sum()) if isinstance(value, torch.Tensor) else float(value)):
                self._take = take
        if self._take is None and reports.sink is self:  # another one may stand in front of this one until then
            reports.lead_to(_behind_spent(self))


def _behind_spent(sink: Sink) -> Sink:
    """Return `sink`, or what stands behind it if it is a tap that has its loss."""
    while isinstance(sink, LossTap) and sink._take is None:
        sink = sink._sink
    return sink
