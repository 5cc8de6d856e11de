"""The guard of every test finds what it is there to find: orphans, forks, programs; and is cheap."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import pytest

from leftovers import Descriptors, Handlers, Processes

SLEEP = "import time; time.sleep(60)"


def test_a_running_child_is_found_and_ended() -> None:
    before = Processes.now()
    child = subprocess.Popen([sys.executable, "-S", "-c", SLEEP])
    (left,) = before.end_new_ones(patience_s=0.1)
    assert left.startswith(str(child.pid))
    child.returncode = -9  # the guard has waited for it already


def test_a_child_that_nobody_waited_for_is_found() -> None:
    before = Processes.now()
    if (pid := os.fork()) == 0:
        os._exit(0)
    assert before.end_new_ones(patience_s=0.1) == [f"{pid} (ended, never waited for)"]


@pytest.mark.parametrize("own_session", [False, True])
def test_an_orphaned_fork_is_found(own_session: bool) -> None:
    before = Processes.now()
    reader, writer = os.pipe()
    if (middle := os.fork()) == 0:
        if own_session:
            os.setsid()
        if (orphan := os.fork()) != 0:
            os.write(writer, str(orphan).encode())
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = os.read(reader, 20).decode()
    os.close(reader)
    os.close(writer)
    assert [text.partition(" ")[0] for text in before.end_new_ones(patience_s=0.1)] == [orphan]


def orphaned_program(code: str) -> str:
    """The process id of a program whose parent has ended."""
    start = f"""if True:
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-S", "-c", {code!r}], stdout=subprocess.DEVNULL).pid)
    """
    parent = subprocess.run([sys.executable, "-S", "-c", start], stdout=subprocess.PIPE, text=True, check=True)
    return parent.stdout.strip()


def test_an_orphaned_program_is_found() -> None:
    before = Processes.now()
    orphan = orphaned_program(SLEEP)
    assert [text.partition(" ")[0] for text in before.end_new_ones(patience_s=0.1)] == [orphan]


def test_an_orphan_that_is_about_to_end_gets_the_time() -> None:
    before = Processes.now()
    orphaned_program("import time; time.sleep(0.1)")
    assert before.end_new_ones(patience_s=5) == []


def test_looking_takes_about_a_millisecond() -> None:
    start = time.perf_counter()
    for _ in range(20):
        Processes.now().end_new_ones(patience_s=0)
    assert (time.perf_counter() - start) / 20 < 0.06  # generous: other tests may be running on this machine


@pytest.mark.full
def test_open_descriptors_are_found_by_their_kind_and_cycles_may_close_theirs() -> None:
    before = Descriptors.now()
    assert before.left() == []
    ends = os.pipe()
    with socket.socket():
        assert before.left() == ["2 open pipes", "1 open socket"]
    for end in ends:
        os.close(end)
    cycle: list[object] = [os.fdopen(os.memfd_create("cycle"), "rb")]
    cycle.append(cycle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cycle
        assert before.left() == []


def test_a_changed_handler_of_a_signal_is_found() -> None:
    before = Handlers.now()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    assert before.changed() == ["SIGUSR1"]
    signal.signal(signal.SIGUSR1, previous)
    assert before.changed() == []
