"""Connections between two ends that name each other are cut, and no others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from nbaccel.features.retry.disconnect import PeerConnections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    with listener, near, far:
        yield listener, near, far


def test_a_connection_that_both_ends_name_is_cut_and_the_listener_works_on(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    listener, near, far = pair
    with PeerConnections() as wires:
        assert wires.cut(wires.ends) == 2  # both ends are in this process
    assert near.recv(1) == far.recv(1) == b""
    with socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()


def test_a_connection_that_no_peer_names_stays(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    _, near, far = pair
    with PeerConnections() as wires:
        assert wires.cut([("127.0.0.1 1", "127.0.0.1 2")]) == 0
    near.sendall(b"x")
    assert far.recv(1) == b"x"


def test_the_store_stays_connected(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listener, *_ = pair
    with PeerConnections(not_port=listener.getsockname()[1]) as wires:
        assert not [ends for ends in wires.ends if str(listener.getsockname()[1]) in "".join(ends)]


def test_looking_leaves_no_descriptor_open(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/dev/fd"))
    PeerConnections().close()
    assert len(os.listdir("/dev/fd")) == before
