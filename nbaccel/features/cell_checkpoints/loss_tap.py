"""LossTap: gets the next loss that this process reports. Runs in ranks; no step but that one costs anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbaccel.base.events import Event, Loss, reports

__all__ = ["LossTap"]


class LossTap:
    """Stands in front of the outlet until the next loss, and gives that loss to `take`.

    Args:
        is_read: Its number is needed, for which the device is waited for; else `take` gets 0.
    """

    def __init__(self, take: Callable[[float], None], is_read: bool = True) -> None:
        self._is_read = is_read
        self._take: Callable[[float], None] | None = take
        self._sink = reports.sink
        reports.lead_to(self)

    def __call__(self, event: Event) -> None:
        self._sink(event)
        if isinstance(event, Loss) and self._take is not None:
            take, self._take = self._take, None
            if reports.sink is self:
                reports.lead_to(self._sink)
            value: Any = event.value if self._is_read else 0.0
            take(float(value.detach().sum()) if isinstance(value, torch.Tensor) else float(value))
