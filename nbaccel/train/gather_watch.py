"""Record gathers in an evaluation that count samples twice; in a dry run alone. Runs in ranks.

The last round of a prepared loader is filled up with samples from its beginning, so that every rank has equally many.
`gather_for_metrics` leaves these out, `gather` does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbaccel.train.accelerator import Accelerator
from nbaccel.train.distributed.callers import users_frames
from nbaccel.train.distributed.nested import count_rows

__all__ = ["watch_gathers"]


def watch_gathers(write: Callable[[Mapping[str, Any]], None]) -> None:
    """Have `write` record each `Accelerator.gather` of an evaluation whose result has samples twice.

    Called once per process. A training may average its loss over repeated samples, so gathers of it are not recorded.

    A record has "file" and "line" of the call, "rows" of the result, and "repeated": how many of them are repeated.
    """
    gather = Accelerator.gather

    @functools.wraps(gather)
    def watched(self: Accelerator, tensor: Any) -> Any:
        joined = gather(self, tensor)
        if not torch.is_grad_enabled():
            _, samples = self._last_round()
            rows = count_rows(joined)
            if samples is not None and rows is not None and rows > samples and rows > self.num_processes:
                frame = next(iter(users_frames(1)), None)
                place = {} if frame is None else {"file": frame.f_code.co_filename, "line": frame.f_lineno}
                write({"kind": "gather", "rows": rows, "repeated": rows - samples, **place})
        return joined

    Accelerator.gather = watched  # type: ignore[method-assign]
