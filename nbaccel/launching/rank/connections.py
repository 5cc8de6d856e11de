"""Connections of the notebook to servers: which of them go on in a forked rank. Used in the kernel, and in its forks.

A fork inherits every connection, and all ranks would talk on the same one: each takes a part of the answers that
another has asked for, https://github.com/psf/requests/issues/4323. So one that is not encrypted goes on in the first
rank alone, as in a process of its own. What is encrypted stays the notebook's, since each message changes the state of
both ends, and the notebook's own would be stale afterwards. In the other ranks a socket that is not connected is put
into its place: `requests`, `urllib3`, boto3 and most clients open another one then; what reads from the socket itself
gets an error, and its note says why.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from nbaccel.launching.rank.jupyter import is_of_the_kernel

__all__ = ["Connections", "explain"]

_OF_TORCH = "/torch-shm-dir-"
"""In the path of torch's server of shared memory ("file_system"), whose connection torch keeps across a fork."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections to servers that this process has, without those to the notebook's front end.

    Not covered: encryption by a library in C (libpq, gRPC), whose connection goes on in the first rank as one that is
    not encrypted; the notebook opens another one afterwards.

    Args:
        families: The family of the socket of each descriptor.
        encrypted: Descriptors that an `SSLSocket` reads.
    """

    families: dict[int, int] = field(default_factory=dict)
    encrypted: frozenset[int] = frozenset()

    @classmethod
    def find(cls, ports: Collection[int]) -> Connections:
        """Find the connections of this process, the kernel.

        Args:
            ports: Ports at which the kernel serves its front end.

        Returns:
            The connections that are open now.
        """
        families: dict[int, int] = {}
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    families |= _as_connection(int(entry), ports)
        kind = getattr(sys.modules.get("ssl"), "SSLSocket", None)
        if not families or kind is None:
            return cls(families)
        # An object refers to its class: that is looked for in C, among hundreds of thousands of objects.
        found = (each.fileno() for each in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(each), kind))
        return cls(families, frozenset(found) & families.keys())

    def leave(self, is_first: bool) -> None:
        """Leave the connections that do not go on in this rank.

        Args:
            is_first: Whether this is the first rank of its kernel.
        """
        for number, family in self.families.items():
            if is_first and number not in self.encrypted:
                continue
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as unconnected:
                os.dup2(unconnected.fileno(), number, inheritable=False)
                _of_this_rank.has_left = True


class _OfThisRank:
    """Connections of this process.

    Attributes:
        has_left: Whether it has left some of the notebook's.
    """

    def __init__(self) -> None:
        self.has_left = False


_of_this_rank = _OfThisRank()


def explain(error: BaseException) -> None:
    """Add a note to an error of a rank's program that used a connection which this rank has left.

    Args:
        error: The error, which gets the note in place.
    """
    if _of_this_rank.has_left and isinstance(error, OSError) and error.errno in (errno.ENOTCONN, errno.EPIPE):
        error.add_note(
            "The notebook has opened this connection, and what all ranks would send and receive on it would be mixed "
            "up: it goes on in the first rank alone, and in none if it is encrypted. Open it in this cell."
        )


def _with_subclasses(kind: type[object]) -> Iterator[type[object]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _as_connection(number: int, ports: Collection[int]) -> dict[int, int]:
    """Return the family of a connection, by its descriptor; nothing for any other socket.

    Of Unix sockets it is one that was connected to a path, as clients of Docker, PostgreSQL or Redis do; the others are
    pairs of a process and its children.
    """
    found = socket.SocketType(fileno=number)  # the fast class in C
    try:
        if found.type != socket.SOCK_STREAM:
            return {}
        peer = found.getpeername()
        if found.family == socket.AF_UNIX:
            is_of_torch = _OF_TORCH in os.fsdecode(peer)
            return {number: found.family} if peer and not is_of_torch else {}
        is_network = found.family in (socket.AF_INET, socket.AF_INET6)
        return {number: found.family} if is_network and not is_of_the_kernel(found, ports) else {}
    except OSError:  # it listens, or is closed
        return {}
    finally:
        found.detach()
