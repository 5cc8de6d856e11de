"""Values that a service cannot keep: they are left out, and a warning names each the first time. Runs on rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["LeftOut"]


class LeftOut:
    """Names of the values that one tracker has left out.

    Args:
        name: The tracker's.
        what: Half a sentence on what its service keeps.
        instead: What stores the other values there.
    """

    def __init__(self, name: str, what: str, instead: str) -> None:
        self._name = name
        self._what = what
        self._instead = instead
        self._names: set[str] = set()

    def rest(self, values: Mapping[str, Any], is_kept: Callable[[Any], bool]) -> dict[str, Any]:
        """Return those of `values` that can be kept; warn of new names among the others."""
        kept = {name: value for name, value in values.items() if is_kept(value)}
        new = sorted(values.keys() - kept.keys() - self._names)
        if new:
            self._names.update(new)
            warnings.warn(
                f"{self._what}; not logged: {', '.join(new)}. For texts and figures use "
                f'accelerator.get_tracker("{self._name}") and {self._instead}.',
                stacklevel=3,
            )
        return kept
