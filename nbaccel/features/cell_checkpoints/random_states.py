"""Random states of this process, with the streams of an unmodified loop. Runs in ranks.

A loop whose batches are split has two streams of torch's numbers in each rank, see
`nbaccel.train.raw_loop.rank_streams`: the generators alone would not say which one is active.
"""

from __future__ import annotations

import sys
from typing import Any

from nbaccel.train.checkpoint import generators
from nbaccel.train.step.raw_loop_hooks import loop_state, restore_loop_state

__all__ = ["device", "learn", "read", "restore"]

_LOOP = "loop"


def read() -> dict[str, Any]:
    """Return the present states, as JSON can hold them."""
    return generators.read(device()) | {_LOOP: loop_state()}


def restore(state: dict[str, Any]) -> None:
    """Continue with states that `read` has returned."""
    generators.restore(state, device())
    restore_loop_state(state.get(_LOOP, {}))


def learn(state: dict[str, Any]) -> None:
    """Add what `state` knows of the loop, and leave the present random states as they are."""
    now = read()
    restore_loop_state(state.get(_LOOP, {}))
    restore(now)


def device() -> Any:
    """Return the device whose generator this process draws from; no device is touched for that."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
