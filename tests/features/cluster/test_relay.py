"""The relay where a node is lost: who waits for what then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.features.cluster.relay import Handshake, NodeConnection, Relay
from nbaccel.launching.ipc.channel import Channel


class Pipes:
    """A stream that leads nowhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.read_fd, self._other = os.pipe()
        self._nowhere, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def why(self) -> str:
        return ""

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        for fd in (self.read_fd, self._other, self._nowhere, self.write_fd):
            os.close(fd)


class Member:
    """A rank of which only the node counts."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.code: int | None = None

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)


@pytest.fixture
def connected() -> Iterator[tuple[Relay, Channel]]:
    """A relay with two nodes that are there, and the kernel's end of its channel."""
    kernel, theirs = Channel.pair()
    pidfd = os.pidfd_open(os.getpid())
    relay = Relay(theirs, pidfd, SimpleNamespace(connect=lambda: ()), 60.0)  # type: ignore[arg-type]
    relay._nodes = [NodeConnection(number, Pipes(name), 0.0) for number, name in enumerate(("east", "west"))]
    relay._is_warm = True
    for node in relay._nodes:
        relay._selector.register(node.stream.read_fd, 1)
    yield relay, kernel
    for node in relay._nodes:
        node.stream.close()
    relay._selector.close()
    os.close(pidfd)
    kernel.close()
    theirs.close()


def _run(member: Member, **more: Any) -> Any:
    return SimpleNamespace(
        of=lambda node: [member] if node.name == "west" else [], thawing=set(), handshake=None, **more
    )


def test_a_node_that_is_lost_before_all_have_begun_ends_the_wait_for_ranks(connected: tuple[Relay, Channel]) -> None:
    relay, kernel = connected
    relay._nodes[0].has_begun = True
    relay._run = _run(Member())
    relay._lose(relay._nodes[1], "is gone")
    assert [message for message, _ in kernel.drain()] == [
        {"op": "broken"},
        {"op": "refused", "why": "node west is gone"},
    ]
    assert relay._is_over


def test_ranks_of_a_lost_node_have_been_killed_and_nobody_waits_for_its_answer(
    connected: tuple[Relay, Channel],
) -> None:
    relay, kernel = connected
    for node in relay._nodes:
        node.has_begun = True
    member, settled = Member(), []
    relay._run = run = _run(member)
    run.thawing, run.handshake = {1}, Handshake({1}, lambda: settled.append(True))
    relay._lose(relay._nodes[1], "has not answered for 61 s")
    assert member.said == [{"op": "lost", "node": "west", "why": "has not answered for 61 s"}]
    assert member.code == -signal.SIGKILL
    assert (run.thawing, settled) == (set(), [True])
    assert not relay._is_over
    assert [message for message, _ in kernel.drain()] == [{"op": "broken"}]
