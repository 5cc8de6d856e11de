"""Addresses by which machines reach each other. Runs in both, a relay and its agents."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["address_towards", "interface_of", "is_loopback"]

_ANY_PORT = 9  # nothing is sent there


def address_towards(other: str) -> str:
    """Return the address of this machine on the route to another one; nothing is sent.

    Args:
        other: The other machine's address.

    Raises:
        OSError: There is no route.
    """
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this machine.

    Args:
        address: The address.

    Raises:
        OSError: No interface has it.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    raise OSError(0, f"no interface has the address {address}")


def is_loopback(address: str) -> bool:
    """Return whether an address can only be reached from its own machine."""
    return ipaddress.ip_address(address).is_loopback
