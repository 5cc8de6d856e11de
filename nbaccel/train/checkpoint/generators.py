"""The states of this process's random generators: Python's, NumPy's and torch's. Runs in every rank.

`rng_files` has what a checkpoint keeps of them.
"""

from __future__ import annotations

import base64
import random
import sys
import zlib
from typing import Any

import torch

from nbaccel.errors import CheckpointCorrupt

__all__ = ["State", "derive", "read", "restore"]

_NUMPY_WORDS = 624

State = dict[str, Any]
"""The generators of one process, in JSON."""


def read(device: torch.device) -> State:
    """Return the present states of this process's generators."""
    version, words, gauss = random.getstate()
    state: State = {"python": [version, list(words), gauss], "torch": _text(torch.get_rng_state())}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    if device.type == "mps":
        state["mps"] = _text(torch.mps.get_rng_state())
    return state


def restore(state: State, device: torch.device) -> None:
    """Set this process's generators to `state`; those that are not in `state` do not change.

    Raises:
        CheckpointCorrupt: NumPy would read beyond its memory: it does not check the position in its words.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_bytes(state["torch"]))
    if "numpy" in sys.modules and "numpy" in state:
        _, words, at, *_ = state["numpy"]
        if len(words) != _NUMPY_WORDS or not 0 <= at <= _NUMPY_WORDS:
            text = f"{at} of {len(words)} words"
            raise CheckpointCorrupt(f"a random state of NumPy is damaged: {text}", expected=str(_NUMPY_WORDS), got=text)
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    if device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(_bytes(state["mps"]))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed generators for which no file was found; the seeds differ between ranks, steps and seeds."""
    mixed = zlib.crc32(f"{seed} {step} {rank}".encode())
    random.seed(mixed)
    torch.manual_seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
