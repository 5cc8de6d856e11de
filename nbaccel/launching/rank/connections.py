"""Sockets of the notebook: which of them go on in a forked rank. Used in the kernel, and in its forks.

A fork inherits every connection, and all ranks would talk on the same one: each takes a part of the answers that
another has asked for, https://github.com/psf/requests/issues/4323. So one that is not encrypted goes on in the first
rank alone, as in a process of its own. What is encrypted stays the notebook's, since each message changes the state of
both ends, and the notebook's own would be stale afterwards. In the other ranks a socket that is not connected is put
into its place: `requests`, `urllib3`, boto3 and most clients open another one then; what reads from the socket itself
gets an error, and its note says why. Sockets between the kernel and its front end, and all that listen, go on in none.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

__all__ = ["Connections", "explain"]

_OF_TORCH = "/torch-shm-dir-"
"""In the path of torch's server of shared memory ("file_system"), whose connection torch keeps across a fork."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Sockets of this process that a rank must not share: connections to servers, and those of the kernel itself.

    Not covered: encryption by a library in C (libpq, gRPC), whose connection goes on in the first rank as one that is
    not encrypted; the notebook opens another one afterwards.

    Args:
        families: The family of the socket of each connection to a server, by its descriptor.
        encrypted: Descriptors that an `SSLSocket` reads.
        of_kernel: Descriptors of sockets that listen, or connect the kernel with its front end.
    """

    families: dict[int, int] = field(default_factory=dict)
    encrypted: frozenset[int] = frozenset()
    of_kernel: tuple[int, ...] = ()

    @classmethod
    def find(cls, ports: Collection[int], own: Collection[int] = ()) -> Connections:
        """Find the connections of this process, the kernel.

        Args:
            ports: Ports at which the kernel serves its front end.
            own: Descriptors of the run, which are none of these.

        Returns:
            The connections that are open now.
        """
        families: dict[int, int] = {}
        of_kernel: list[int] = []
        for number in {*map(int, os.listdir("/proc/self/fd"))}.difference(own):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    found = socket.SocketType(fileno=number)  # the fast class in C: a kernel has dozens of sockets
                    try:
                        if is_of_the_kernel(found, ports):
                            of_kernel.append(number)
                        elif _is_connection(found):
                            families[number] = found.family
                    finally:
                        found.detach()
        kind = getattr(sys.modules.get("ssl"), "SSLSocket", None)
        if not families or kind is None:
            return cls(families, of_kernel=tuple(of_kernel))
        # An object refers to its class: that is looked for in C, among hundreds of thousands of objects.
        encrypted = {
            each.fileno() for each in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(each), kind)
        }
        return cls(families, frozenset(encrypted & families.keys()), tuple(of_kernel))

    def leave(self, is_first: bool) -> None:
        """Close the sockets of the kernel, and leave the connections that do not go on in this rank.

        A rank that outlives its kernel would otherwise keep the kernel's ports listening, and the restarted kernel,
        which gets the same ports, would fail with "address already in use".

        Args:
            is_first: Whether this is the first rank of its kernel.
        """
        for number in self.of_kernel:
            with suppress(OSError):  # the kernel has closed it meanwhile
                os.close(number)
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


def is_of_the_kernel(found: socket.SocketType, ports: Collection[int]) -> bool:
    """Return whether a socket listens, has one of `ports`, or is the kernel's other end of such a connection.

    ipykernel connects its debugger to its own shell port. Sockets of Unix are none of the kernel's.
    """
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return True
        address, port = found.getsockname()[:2]
        if port in ports:
            return True
        peer_address, peer_port = found.getpeername()[:2]
        return peer_port in ports and peer_address == address
    except OSError:  # it is not connected
        return False


def _is_connection(found: socket.SocketType) -> bool:
    """Return whether a socket is connected to a server.

    Of Unix sockets it is one that was connected to a path, as clients of Docker, PostgreSQL or Redis do; the others are
    pairs of a process and its children.

    Raises:
        OSError: It is not connected.
    """
    if found.type != socket.SOCK_STREAM:
        return False
    peer = found.getpeername()
    if found.family == socket.AF_UNIX:
        return bool(peer) and _OF_TORCH not in os.fsdecode(peer)
    return found.family in (socket.AF_INET, socket.AF_INET6)
