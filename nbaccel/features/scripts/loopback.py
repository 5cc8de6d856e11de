"""Loopback: a rendezvous of torch elastic for a launch on one machine, on the loopback address alone.

Runs in the agent, the process of `nbaccel launch`. torchrun's own stores listen on every interface of the machine and
have no password. Ranks connect to this one as they do under torchrun, by MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["LOOPBACK", "LoopbackRendezvous", "offer_loopback"]

LOOPBACK = "nbaccel-loopback"
"""Name of this rendezvous backend in torch elastic."""

_ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one node, for each time that torch elastic starts its ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        """Return True: the ranks use this store; with one of their own, rank 0 would open it on every interface."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rendezvous with a new store: in an old one, ranks would find addresses of failed ranks."""
        listener = socket.create_server((_ADDRESS, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(_ADDRESS, port, 1, is_master=True, master_listen_fd=listener.detach())
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def offer_loopback() -> None:
    """Register this backend with torch elastic, in this process."""
    rendezvous_handler_registry.register(LOOPBACK, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
