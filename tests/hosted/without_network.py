"""Starts a program in a network of its own that has nothing but loopback: `python without_network.py PROGRAM ...`."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
DENIED = 77
"""Exit status where this process may not have a network of its own."""


def main(command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        sys.exit(DENIED)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
