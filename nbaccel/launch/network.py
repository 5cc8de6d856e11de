"""Network: finds the interface by which this machine reaches another one.

Runs in the process that launches; sends nothing.

Unless told otherwise, gloo and NCCL take the interface of the host's own name, and on many systems that is loopback:
then ranks of several machines wait for each other until they give up.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from nbaccel.errors import LaunchRefused

__all__ = ["interface_to", "loopback_interface"]

Interfaces = Mapping[str, list[str]]
"""The addresses of each interface by its name, "eth0"."""


def loopback_interface() -> str:
    """Return the system's name of the loopback interface: "lo", or "lo0"."""
    return next((name for name, addresses in _interfaces().items() if "127.0.0.1" in addresses), "lo")


def interface_to(host: str, port: int) -> str:
    """Return the interface whose address another machine sees when this one connects to `host`.

    It asks the system's routes by a datagram socket that is connected and never written to.

    Raises:
        LaunchRefused: the name is unknown here, means this machine itself, or no route leads there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchRefused(
            f"--master-addr {host}: this machine knows no address of that name ({error.strerror}); give the IP address "
            "of node 0."
        ) from None
    if ipaddress.ip_address(address[0]).is_loopback:
        raise LaunchRefused(
            f"--master-addr {host} is {address[0]} on this machine, which no other machine can reach (stock Debian "
            f"gives a host's own name such an address); give the IP address of node 0{_own_addresses()}."
        )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise LaunchRefused(
                f"--master-addr {host}: no way leads from this machine to {address[0]} ({error.strerror})"
                f"{_own_addresses()}."
            ) from None
        mine = probe.getsockname()[0]
    return next(name for name, addresses in _interfaces().items() if mine in addresses)


def _own_addresses() -> str:
    """Return the part of an error that lists this machine's own addresses."""
    outer = [
        f"{address} on {name}"
        for name, addresses in _interfaces().items()
        for address in addresses
        if not ipaddress.ip_address(address).is_loopback
    ]
    return f" (this machine has {', '.join(outer)})" if outer else " (this machine has loopback alone)"


def _interfaces() -> Interfaces:
    import psutil

    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in _IP]
        for name, addresses in psutil.net_if_addrs().items()
    }


_IP = (socket.AF_INET, socket.AF_INET6)
