"""The stand-in of a rank that runs on another machine. A process of its own, beside the kernel; standard library only.

The kernel watches, signals and ends it as it does with a rank; the relay, at the other end of a socket, passes the
signals on, and says how the rank has ended: so does the stand-in. It runs as a script
(`python -S -E stand_in.py SOCKET`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys

__all__ = ["PASSED_ON", "main"]

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
"""Signals that the rank gets in place of the stand-in; blocked in it until it can pass them on."""


def main(connection: socket.socket) -> None:
    """Pass signals on until the relay says how the rank has ended, then end in the same way.

    Args:
        connection: The socket of the relay.
    """
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # the relay has blocked them until here
    said = b""
    while not said.endswith(b"\n"):
        piece = connection.recv(64)
        if not piece:  # the relay is gone, and the rank with it
            said = b"-9\n"
            break
        said += piece
    _end(int(said))


def _end(code: int) -> None:
    if code >= 0:
        os._exit(code & 0xFF)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
