"""A rank whose program has left nothing that others may use ends before they do; any other waits for them."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbaccel import launch

_KEPT: list[Any] = []


def _ends_while_the_other_works(folder: Path, leave: Callable[[], Any] | None, most_s: float) -> bool | None:
    """Return, in rank 1, whether rank 0 has ended within `most_s` of its own end."""
    if os.environ["RANK"] == "0":
        if leave is not None:
            _KEPT.append(leave())
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(folder / "pid")
        return None
    while not (folder / "pid").exists():
        time.sleep(0.005)
    status = Path(f"/proc/{(folder / 'pid').read_text()}/stat")
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        try:
            is_over = status.read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:  # and reaped
            is_over = True
        if is_over:
            return True
        time.sleep(0.005)
    return False


def test_a_rank_that_leaves_nothing_ends_while_another_works(tmp_path: Path, start_method: str) -> None:
    run = launch(_ends_while_the_other_works, 2, (tmp_path, None, 30.0), cpu=True, start_method=start_method)
    assert run.values == [None, True]


def _a_connection() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _a_connection_under_the_number_of_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        os.dup2(own.fileno(), 0)


def _a_thread() -> threading.Thread:
    thread = threading.Thread(target=time.sleep, args=(0.5,))
    thread.start()
    return thread


def _a_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"])


def _an_exit_function() -> object:
    return atexit.register(int)


@pytest.mark.parametrize(
    "leave", [_a_connection, _a_connection_under_the_number_of_another, _a_thread, _a_child, _an_exit_function]
)
def test_a_rank_that_leaves_something_lives_until_the_other_has_reported(
    tmp_path: Path, leave: Callable[[], Any]
) -> None:
    run = launch(_ends_while_the_other_works, 2, (tmp_path, leave, 0.4), cpu=True)
    assert run.values == [None, False]
