"""Lines of the notebook's cells, and random states, as the kernel and its ranks tell them each other. Used by both.

What else of the kernel's state a rank gets that is no copy of it, is a feature: `features/clean_start`.
"""

from __future__ import annotations

import linecache
import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["are_here", "cell_sources", "random_states", "set_random_states", "take_cell_sources"]

_CELL_FILES = ("ipykernel_", "<ipython-input-", "Cell In[")


def take_cell_sources(sources: Mapping[str, list[str]]) -> None:
    """Make this process find the lines of the notebook's cells, for tracebacks and for the sources of functions."""
    linecache.cache.update({name: (0, None, lines, name) for name, lines in sources.items()})


def cell_sources() -> dict[str, list[str]]:
    """Return the lines of every cell that has run, by the file name it was compiled under."""
    kept = getattr(linecache, "_ipython_cache", {})  # IPython 7 restores them from here whenever linecache drops them
    entries = {**kept, **linecache.cache}
    return {
        name: entry[2]
        for name, entry in entries.items()
        if len(entry) > 2 and any(part in name for part in _CELL_FILES)
    }


def random_states() -> dict[str, Any]:
    """Return the states of this process's global random generators by module: Python's, NumPy's, torch's on the CPU.

    Modules that are not loaded have no state.
    """
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
