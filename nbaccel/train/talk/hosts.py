"""Hosts: communication from host to host in a process group of two backends. Runs in ranks.

The form ``"cpu:gloo,cuda:nccl"`` sends tensors of the host by gloo. That does not wait for the device, which is busy
with its queued work, and a rank that waits can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.train.talk.transport import Transport

__all__ = ["collective_counter", "host_transport"]


def host_transport(transport: Transport) -> Transport:
    """Return a transport from host to host for the ranks of `transport`; itself where the group has no other."""
    if transport.device.type == "cpu" or _backends().get("cpu") != "gloo":
        return transport
    return Transport(transport.world_size, torch.device("cpu"))


def collective_counter() -> Callable[[], int] | None:
    """Return a function that counts this rank's collectives in the default group; None if its backend cannot count."""
    group: Any = dist.group.WORLD
    if group is None:
        return None
    counted = [group]
    if len(set(_backends().values())) > 1:  # the group itself counts those of one backend
        counted = [group._get_backend(device) for device in group._device_types]
    count = partial(_sum, [one._get_sequence_number_for_group for one in counted])
    try:
        count()
    except RuntimeError:
        return None
    return count


def _backends() -> dict[str, str]:
    """Return the default group's backend for each kind of device that it knows."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _sum(counts: list[Callable[[], int]]) -> int:
    return sum(count() for count in counts)
