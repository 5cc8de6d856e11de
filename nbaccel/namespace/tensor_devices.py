"""Devices: chooses the device for a tensor that another process has sent. Runs in the kernel and in ranks.

Tensors of the notebook's device go to the rank's own device, since the cell moves its batches there, and tensors that a
rank sends from that device go back to the notebook's device. All others arrive on the host, above all in a notebook
that has not used CUDA: otherwise no rank could be forked from it any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nbaccel.base.world import World

__all__ = [
    "InFile",
    "away_from",
    "device_here",
    "device_there",
    "in_file",
    "storage_on",
]

_HOST = "cpu"

_notebooks: dict[str, str] = {}
"""In a rank: the notebook's device of the first tensor that arrived on the rank's own device, by the rank's device."""


_away: dict[int, tuple[str, InFile | None]] = {}
"""In the notebook: memory that is on the host for a while, by its address; the device that it came from."""


class InFile(NamedTuple):
    """The place of memory in a file that other processes can map.

    Args:
        size: The size of the file, as long as nothing is added.
        pid: The process id of the process whose memory it is.
    """

    fd: int
    offset: int
    size: int
    pid: int


@contextmanager
def away_from(homes: Mapping[int, str], places: Mapping[int, InFile] | None = None) -> Iterator[None]:
    """Send memory of the host, by its address, as if it were on a device.

    Args:
        homes: Device by address.
        places: The file in which the memory is, by address, if it is in one.
    """
    _away.update({address: (home, (places or {}).get(address)) for address, home in homes.items()})
    try:
        yield
    finally:
        for address in homes:
            del _away[address]


def in_file(address: int) -> InFile | None:
    """Return the file in which memory is that is away from its device; None for any other memory.

    None in a fork of this process, too: it has inherited the addresses, and what it writes is in its own pages alone.
    """
    place = _away[address][1] if address in _away else None
    return place if place is not None and place.pid == os.getpid() else None


def device_there(device: Any, address: int = 0) -> str:
    """Return the device of a tensor on `device` in the receiving process, as far as this process knows.

    Args:
        address: Address of its memory.

    Example:
        >>> import torch
        >>> device_there(torch.device("cuda", 1)), device_there(torch.device("cpu"))
        ('cuda:1', 'cpu')
    """
    if address and address in _away:  # 0 is the address of all memory of no bytes, and of objects without memory
        return _away[address][0]
    if device.type == _HOST or not World.from_env().launch_id:
        return str(device)
    return _notebooks.get(str(device), _HOST)


def device_here(there: str) -> Any:
    """Return the device of this process for a tensor that was sent from, or meant for, the device `there`.

    In a rank this is its own device, as `PartialState` chooses it; in the notebook the named one, if the notebook uses
    it.

    Example:
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
    own = torch.device("cuda", world.device_number(torch.cuda.device_count()))
    _notebooks.setdefault(str(own), there)
    return own


def storage_on(device: Any, memory: memoryview) -> Any:
    """Return a copy of `memory` on `device`; None in a notebook whose device is full.

    Raises:
        torch.OutOfMemoryError: In a rank, which would otherwise fail later with another error, its tensors on two
            devices.
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
