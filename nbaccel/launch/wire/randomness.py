"""Randomness: reads and sets the states of the process's global random generators.

These are Python's, NumPy's, and torch's on the CPU. Runs in ranks and in the kernel.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

__all__ = ["are_here", "random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """Return the state of each, by its module; modules that are not loaded have no state."""
    states: dict[str, Any] = {"random": random.getstate()}
    if (np := sys.modules.get("numpy")) is not None:
        states["numpy"] = np.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Make the generators of this process continue as those of the process of `random_states` would."""
    random.setstate(states["random"])
    if "numpy" in states and (np := sys.modules.get("numpy")) is not None:
        np.random.set_state(states["numpy"])
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(states["torch"])


def are_here(states: dict[str, Any]) -> bool:
    """Return whether nothing has been drawn or seeded in this process since `states` were read in it."""
    now = random_states()
    return all(_in_bytes(now[name]) == _in_bytes(state) for name, state in states.items())


def _in_bytes(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if hasattr(state, "numpy") else state)
