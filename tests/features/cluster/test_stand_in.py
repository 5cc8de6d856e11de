"""The stand-in of a rank: a process that is signalled in its place, and ends as it has ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from nbaccel.features.cluster import stand_in


def started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    here, there = socket.socketpair()
    with there:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", stand_in.__file__, str(there.fileno())], pass_fds=[there.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    here.settimeout(20)
    return process, here


@pytest.mark.parametrize("code", [0, 3, -int(signal.SIGKILL), -int(signal.SIGTERM)])
def test_it_ends_as_the_rank_has_ended(code: int) -> None:
    process, line = started()
    with line:
        line.sendall(b"%d\n" % code)
        assert process.wait(20) == code


def test_signals_are_passed_on_also_those_that_come_before_it_can_hear_them() -> None:
    process, line = started()
    with line:
        process.send_signal(signal.SIGINT)
        assert line.recv(1) == bytes([signal.SIGINT])
        process.send_signal(signal.SIGTERM)
        assert line.recv(1) == bytes([signal.SIGTERM])
        assert process.poll() is None
        line.sendall(b"0\n")
        assert process.wait(20) == 0


def test_without_a_relay_it_ends_as_a_rank_does_that_was_killed() -> None:
    process, line = started()
    line.close()
    assert process.wait(20) == -signal.SIGKILL
