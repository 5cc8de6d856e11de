"""Which sockets a process listens on, from /proc. Reads; opens nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re

_LISTEN = "0A"


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that `pid` listens on."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                inodes |= {found[1]} if found else set()
    return {address for inode, address in _listeners(pid) if inode in inodes}


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _listeners(pid: int) -> list[tuple[str, tuple[str, int]]]:
    """Inode and address of every listening socket in the network of `pid`."""
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as lines:
            rows += [line.split() for line in list(lines)[1:]]
    return [(row[9], _parsed(row[1])) for row in rows if row[3] == _LISTEN]


def _parsed(text: str) -> tuple[str, int]:
    """ "0100007F:1F90" is 127.0.0.1, port 8080: words of four bytes, each in the order of this machine."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
