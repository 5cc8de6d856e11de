"""A process that has loaded what the programs load, and forks for each: an import of a second costs it once.

    python -m public_programs.server SOCKET MODULE...

It listens at the path SOCKET until its standard input ends. A client (`client.py`, which a starter runs in the
program's place) sends its command, directory, environment and standard streams; the server forks a process that goes
on with these, and answers with its exit status. A client that ends first has its process ended. What is read while a
module is imported, `OMP_NUM_THREADS` say, comes from the server's environment. No library under test is loaded here
unless a module in MODULE imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

import psutil

__all__ = ["end_session"]

_REQUEST_BYTES = 1 << 20


def end_session(leader: int) -> None:
    """Kill every process of the session of `leader`, which the caller has started, and what descends from `leader`.

    Torchrun starts its ranks in sessions of their own.
    """
    descendants: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and was waited for
        descendants = {process.pid for process in psutil.Process(leader).children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid in descendants or os.getsid(process.pid) == leader:
                process.send_signal(signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def serve(path: str) -> None:
    """Fork for every client until standard input ends; then end what still runs."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    running: dict[int, tuple[socket.socket, int]] = {}  # the client and the pidfd of each child
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            key, _ = events.select()[0]
            if key.fileobj is sys.stdin:
                break
            if key.fileobj is listener:
                client, _ = listener.accept()
                child = _fork(client)
                running[child] = client, os.pidfd_open(child)
                for each in running[child]:
                    events.register(each, selectors.EVENT_READ, child)
                continue
            client, ended = running.pop(key.data)
            events.unregister(client)
            events.unregister(ended)
            status = _end(key.data)
            if key.fileobj == ended:
                with contextlib.suppress(ConnectionError):  # a client that took too long has been killed meanwhile
                    client.send(str(status).encode())
            client.close()
            os.close(ended)
    for child in running:
        _end(child)


def _end(child: int) -> int:
    """End the session that `child` leads; returns its exit status."""
    end_session(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork(client: socket.socket) -> int:
    message, streams, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 3)
    if child := os.fork():
        for stream in streams:
            os.close(stream)
        return child
    _go_on(json.loads(message), streams)


def _go_on(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Become the process that the client would have been, and end as it would."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = request["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for module in sys.argv[2:]:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
    serve(sys.argv[1])
