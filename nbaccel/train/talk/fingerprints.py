"""Fingerprints: check before a collective that all ranks make the same call. Runs in ranks, on every rank.

torch itself would hang, or mix the bytes of two calls. Comparing costs one more small exchange, so only the first
calls of a process group are compared, and all in debug mode: a program that mixes its collectives does so early.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nbaccel.errors import CollectiveMismatch
from nbaccel.events import CollectiveEntered, emit
from nbaccel.train.talk.nested import children, is_container
from nbaccel.train.talk.transport import Transport

__all__ = ["CHECKED_CALLS", "Fingerprints", "Shape"]

CHECKED_CALLS = 16
"""Number of calls of a group that are compared without debug mode."""

_TEXT_BYTES = 512
_DIGEST_BYTES = 8


class Shape(Enum):
    """The part of a tensor's shape that must be equal on all ranks."""

    ALL = "all dimensions"
    ROWS_VARY = "all dimensions but the first"
    ANY = "none"


class Fingerprints:
    """Counts the calls of one process group, and compares them.

    transport: used for the comparison.  debug: compare every call, not only the first ones.
    told: the transports of the group, to which each call is reported.
    """

    def __init__(self, transport: Transport, debug: bool, told: Collection[Transport]) -> None:
        self._transport = transport
        self._told = tuple(told)
        self._compared = sys.maxsize if debug else CHECKED_CALLS

    def check(self, operation: str, value: Any = None, shape: Shape = Shape.ALL, always: bool = False) -> bool:
        """Enter a collective; return False when it was not compared with the other ranks'.

        always: compare it, whatever the number of calls.
        Raises:
            CollectiveMismatch: on every rank, with the call of each rank.
        """
        self.enter(operation)
        transport = self._transport
        if transport.calls > self._compared and not always:
            return False
        mine = operation if value is None else f"{operation} {_describe(value, shape)}"
        for each in self._told:
            each.call = mine
        everyone = self._exchange(mine)
        if any(theirs != everyone[0] for theirs in everyone):
            raise CollectiveMismatch(self._mismatch([text for text, _ in everyone]))
        return True

    def enter(self, operation: str) -> None:
        """Count a collective that is not compared."""
        emit(CollectiveEntered(operation))
        for each in self._told:
            each.call = operation
            each.calls += 1

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, cut to half a kilobyte."""
        return [said for said, _ in self._exchange(text)]

    def _exchange(self, text: str) -> list[tuple[str, bytes]]:
        """Return every rank's text: its beginning, and a digest of the whole text."""
        data = text.encode()
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        shown = data[: _TEXT_BYTES - _DIGEST_BYTES].ljust(_TEXT_BYTES - _DIGEST_BYTES)
        said = torch.frombuffer(bytearray(digest + shown), dtype=torch.uint8)
        rows = [row.tobytes() for row in self._transport.read_all(said).numpy()]
        return [(row[_DIGEST_BYTES:].decode(errors="replace").rstrip(), row[:_DIGEST_BYTES]) for row in rows]

    def _mismatch(self, texts: list[str]) -> str:
        sides = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        return (
            f"the ranks met in different collectives (call {self._transport.calls} of this process group); nothing was "
            f"exchanged.\n{sides}\n  Every rank must make the same call with the same shapes. For first dimensions "
            "that differ call accelerator.pad_across_processes first; a call under `if is_main_process` belongs "
            "outside of it."
        )


def _describe(value: Any, shape: Shape) -> str:
    """Return dtype and shape of each tensor: ``{x: float32[4, 3], y: int64[4]}``; the class of anything else."""
    if isinstance(value, Tensor):
        sizes = list(map(str, value.shape))
        if shape is Shape.ROWS_VARY:
            sizes[:1] = ["any"]
        return f"{str(value.dtype).removeprefix('torch.')}[{'...' if shape is Shape.ANY else ', '.join(sizes)}]"
    if not is_container(value):
        return type(value).__name__
    return "{" + ", ".join(f"{name}: {_describe(child, shape)}" for name, child in children(value)) + "}"
