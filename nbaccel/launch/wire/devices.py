"""Devices: where a tensor comes to lie that another process has sent. Runs in the kernel and in ranks.

What the notebook has on a device comes to lie on the rank's own, since the cell moves its batches there, and what a
rank sends from that device goes back to where the notebook's tensors are. All else arrives on the host, above all in a
notebook that has not used CUDA: no rank could be forked from it any more if it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbaccel.world import World

__all__ = ["away_from", "device_here", "device_there", "storage_on"]

_HOST = "cpu"

_notebooks: dict[str, str] = {}
"""In a rank: of its own device, the notebook's device from which the first tensor on it came."""


_away: dict[int, str] = {}
"""In the notebook: of memory that lies on the host for a while, by its address, the device that it is from."""


@contextmanager
def away_from(homes: Mapping[int, str]) -> Iterator[None]:
    """Send memory of the host, by its address, as if it was on a device.  homes: address to device."""
    _away.update(homes)
    try:
        yield
    finally:
        for address in homes:
            del _away[address]


def device_there(device: Any, address: int = 0) -> str:
    """Return the device that a tensor on `device` has in the process that it is sent to, by this one's knowledge.

    address: of its memory.

    >>> import torch
    >>> device_there(torch.device("cuda", 1)), device_there(torch.device("cpu"))
    ('cuda:1', 'cpu')
    """
    if address and address in _away:  # 0 is where all memory of no bytes lies, and what has none
        return _away[address]
    if device.type == _HOST or not World.from_env().launch_id:
        return str(device)
    return _notebooks.get(str(device), _HOST)


def device_here(there: str) -> Any:
    """Return the device of this process for a tensor that was sent from, or meant for, the device `there`.

    In a rank its own, as `PartialState` chooses it; in the notebook the one that is named, if the notebook uses it.

    >>> device_here("mps:0")
    device(type='cpu')
    """
    import torch

    device = torch.device(there)
    if device.type != "cuda":
        return torch.device(_HOST)
    world = World.from_env()
    if not world.launch_id:
        return device if torch.cuda.is_initialized() else torch.device(_HOST)
    if not torch.cuda.is_available():
        return torch.device(_HOST)
    own = torch.device("cuda", world.local_rank if world.local_rank < torch.cuda.device_count() else 0)
    _notebooks.setdefault(str(own), there)
    return own


def storage_on(device: Any, memory: memoryview) -> Any:
    """Return a copy of `memory` on `device`; None in a notebook whose device is full.

    Raises:
        torch.OutOfMemoryError: in a rank, which would fail later, and in other words, with its tensors apart.
    """
    import torch

    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    try:
        return torch.frombuffer(memory, dtype=torch.uint8).to(device).untyped_storage()
    except torch.OutOfMemoryError:
        if World.from_env().launch_id:
            raise
        return None
