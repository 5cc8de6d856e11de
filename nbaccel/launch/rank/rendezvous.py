"""Rendezvous of ranks on one machine: a file in a private folder, behind torch's own `env://`. Runs in ranks.

Raw DDP, Accelerate and Fabric all initialise their group by `env://`, so they use this rendezvous without a change. No
port is opened for it: torch's TCP store listens on every interface and has no password.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from nbaccel.world import World

__all__ = ["meet_in_file"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own default for a process group


def meet_in_file(path: str, world: World) -> None:
    """Let `env://` in this process yield a store in the file `path` for this `world`.

    A group that is destroyed and made again gets a new prefix, because the file still holds the old group's keys. The
    store does not get the world size: with it, the last rank to release a store removes the file, and sometimes that
    happened while a faster rank was already writing the next group's keys into it, which then waited for ever. The file
    is removed with its folder. Connections between the ranks stay on loopback.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    generations = itertools.count()

    def handler(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import FileStore, PrefixStore

        store = FileStore(path)
        store.set_timeout(timeout)
        yield PrefixStore(str(next(generations)), store), world.rank, world.world_size

    # torch.distributed has a function of the same name as this module, so the module is imported by its full name;
    # the public register_rendezvous_handler refuses a scheme that has a handler already.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    rendezvous._rendezvous_handlers["env"] = handler
