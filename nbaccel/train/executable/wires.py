"""Wires: finds and cuts the connections between this process and its peers. Runs in ranks.

A peer that waits in one of gloo's collectives wakes only when one of its connections breaks: abort, shutdown and
destroy do nothing while a DDP module, or a variable of the program, still holds the group. So the connections are cut.
Both ends decide which ones: a connection of this process is cut if a peer lists its other end as its own.
No peer lists listeners, the store, a tracker's uploads or the notebook's channel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable
from typing import Self

__all__ = ["Wires"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS


class Wires:
    """The present connections of this process; held until `close`, so that no descriptor number is used again.

    not_port: the store's port: connections to this port are not cut.
    """

    def __init__(self, not_port: int | None = None) -> None:
        self._sockets: dict[tuple[str, str], socket.socket] = {}
        for number in map(int, os.listdir(_DESCRIPTORS)):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                self._add(os.dup(number), not_port)

    @property
    def ends(self) -> list[tuple[str, str]]:
        """Both ends of each connection, its own first, ``("127.0.0.1 41785", "127.0.0.1 43298")``."""
        return list(self._sockets)

    def cut(self, by_peers: Iterable[tuple[str, str]]) -> int:
        """Shut the connections that peers list too; return how many those were."""
        count = 0
        for own_end, other_end in by_peers:
            wire = self._sockets.get((other_end, own_end))
            if wire is not None:
                count += 1
                with contextlib.suppress(OSError):  # the peer was faster
                    wire.shutdown(socket.SHUT_RDWR)
        return count

    def close(self) -> None:
        for wire in self._sockets.values():
            wire.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, copy: int, not_port: int | None) -> None:
        try:
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                return
            wire = socket.socket(fileno=copy)
            copy = -1
        finally:
            if copy >= 0:
                os.close(copy)
        try:
            if wire.family in _INTERNET and wire.type == socket.SOCK_STREAM:
                near, far = wire.getsockname(), wire.getpeername()
                ends = (_named(near), _named(far))
                if not_port not in (near[1], far[1]) and ends not in self._sockets:
                    self._sockets[ends] = wire
                    return
        except OSError:  # a listener has no other end
            pass
        wire.close()


def _named(address: tuple[str, int]) -> str:
    return f"{address[0]} {address[1]}"
