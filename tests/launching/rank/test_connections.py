"""A connection that the notebook has opened is not shared by its ranks."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.world import World
from nbaccel.launching.api import launch
from nbaccel.launching.rank.connections import Connections

SERVER = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = (self.path * 500).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


def ask(client: http.client.HTTPConnection, path: str) -> bool:
    client.request("GET", path)
    return client.getresponse().read().decode() == path * 500


def test_each_rank_gets_its_own_answers_and_the_notebooks_connection_stays(port: int) -> None:
    requests = pytest.importorskip("requests")

    def asks() -> list[str]:
        paths = [f"/{World.from_env().rank}/{number}" for number in range(50)]
        return [path for path in paths if session.get(f"http://127.0.0.1:{port}{path}").text != path * 500]

    with requests.Session() as session:
        assert session.get(f"http://127.0.0.1:{port}/a").text == "/a" * 500
        assert launch(asks, 3, start_method="fork", cpu=True).values == [[], [], []]
        assert session.get(f"http://127.0.0.1:{port}/b").text == "/b" * 500


def test_what_uses_the_socket_itself_goes_on_in_the_first_rank_and_is_told_in_others(port: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.connect()
    client.auto_open = 0

    def asks() -> bool:
        return ask(client, "/a")

    try:
        assert launch(asks, 1, start_method="fork", cpu=True).value
        with pytest.raises(OSError, match=r"Broken pipe|not connected") as caught:
            launch(asks, 2, start_method="fork", cpu=True)
        assert "Open it in this cell" in "\n".join(caught.value.__notes__)
    finally:
        client.close()


def test_an_encrypted_connection_stays_the_notebooks() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    try:
        found = Connections.find([])
        assert {client.fileno(), served.fileno()} <= found.families.keys()
        assert not {here.fileno(), listener.fileno()} & found.families.keys()
        # As ipykernel's debugger is to the kernel's own shell port, in every kernel.
        own = Connections.find([listener.getsockname()[1]])
        assert not own.families.keys() & {served.fileno(), client.fileno()}

        def works() -> list[bool]:
            return [_is_connected(client), _is_connected(served)]

        def in_fork(encrypted: frozenset[int]) -> Any:
            Connections(found.families, encrypted).leave(is_first=True)
            return works()

        assert launch(lambda: in_fork(frozenset({client.fileno()})), 1, start_method="fork", cpu=True).value == [
            False,
            True,
        ]
        assert works() == [True, True]
    finally:
        for each in (here, there, listener, client, served):
            each.close()


def test_a_socket_that_listens_is_open_in_no_rank() -> None:
    """A rank that outlives its kernel would hold the kernel's ports, which the restarted kernel needs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = os.fstat(listener.fileno()).st_ino

        def holds() -> bool:
            open_now = [
                each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
            ]  # not that of the listing
            return f"socket:[{held}]" in [os.readlink(each) for each in open_now]

        assert launch(holds, 2, start_method="fork", cpu=True).values == [False, False]


def test_a_connection_to_the_path_of_a_server_goes_on_in_the_first_rank_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "server")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        listener.bind(path)
        listener.listen()
        client.connect(path)
        served, _ = listener.accept()
        with served:
            found = Connections.find([]).families
            assert found[client.fileno()] == socket.AF_UNIX
            assert served.fileno() not in found
            assert launch(lambda: _is_connected(client), 2, start_method="fork", cpu=True).values == [True, False]
            client.sendall(b"a")
            assert served.recv(1) == b"a"


def test_torchs_own_connection_for_shared_memory_goes_on_in_all_ranks(tmp_path: Path) -> None:
    """As it has one by ``torch.multiprocessing.set_sharing_strategy("file_system")``: it shares tensors by it."""
    (tmp_path / "torch-shm-dir-1").mkdir()
    path = str(tmp_path / "torch-shm-dir-1" / "manager.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        assert client.fileno() not in Connections.find([]).families


@pytest.mark.parametrize("kind", [ssl.SSLSocket, type("OfALibrary", (ssl.SSLSocket,), {})])
def test_sockets_that_encrypt_are_found_by_their_class(kind: type[ssl.SSLSocket]) -> None:
    context = ssl.create_default_context()
    context.sslsocket_class = kind
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as plain:
        client = socket.create_connection(listener.getsockname())
        with context.wrap_socket(client, server_hostname="a", do_handshake_on_connect=False) as encrypted:
            found = Connections.find([])
            assert encrypted.fileno() in found.encrypted
            assert plain.fileno() in found.families.keys() - found.encrypted


def _is_connected(end: socket.socket) -> bool:
    try:
        end.getpeername()
    except OSError:
        return False
    return True
