"""Writes down who asks the network, in every Python process of a hosted notebook's test. Loaded by PYTHONPATH.

NBACCEL_TEST_NET names the file. What stays on the machine is no question: loopback and sockets of the file system.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import traceback

_LOG = os.environ.get("NBACCEL_TEST_NET", "")


def _is_local(host: object) -> bool:
    if not isinstance(host, str):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in ("", "localhost")


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.getaddrinfo" or event == "socket.gethostbyname":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if not _is_local(host):
        with open(_LOG, "a") as log:
            log.write(f"{event} {host}\n{''.join(traceback.format_stack()[-6:])}\n")


if _LOG:
    sys.addaudithook(_watch)
