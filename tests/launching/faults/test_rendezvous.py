"""Faults 17 to 20 of 26, as launched ranks meet them: taken ports, stale variables, sockets, foreign messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kernel.sockets import is_loopback, listening_addresses
from nbaccel import launch

pytestmark = pytest.mark.slow


def all_reduces() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")  # as a program would that knows nothing of us
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


@pytest.fixture
def port_29500() -> Iterator[None]:
    """The port that everybody else's launcher takes is taken."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        yield


ANOTHER_NOTEBOOK = """
import sys
sys.path[:0] = sys.argv[1:]
from launching.faults.test_rendezvous import all_reduces
from nbaccel import launch

print("ready", flush=True)
sys.stdin.readline()
for _ in range(3):
    assert launch(all_reduces, 2, start_method="fork", cpu=True).values == [2, 2]
print("fine")
"""


@pytest.mark.usefixtures("port_29500")
def test_fault_17_port_29500_is_busy_and_two_notebooks_launch_at_once() -> None:
    program = [sys.executable, "-c", ANOTHER_NOTEBOOK, *filter(None, sys.path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        for _ in range(3):
            assert launch(all_reduces, 2, start_method="fork", cpu=True).values == [2, 2]
        assert other.communicate(timeout=50)[0] == "fine\n"


STALE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
IN_A_NOTEBOOK = """
import warnings
from ipykernel.kernelapp import IPKernelApp
IPKernelApp.instance()  # this process is a notebook's kernel
from nbaccel import Accelerator

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(Accelerator(cpu=True).num_processes)
print(*(warning.message for warning in said))
"""


def test_fault_18_stale_variables_of_an_earlier_launch() -> None:
    assert launch(all_reduces, 2, start_method="fork", cpu=True).values == [2, 2]
    assert not set(STALE) & set(os.environ), "a launch leaves no variable behind"
    program = [sys.executable, "-c", IN_A_NOTEBOOK]
    run = subprocess.run(program, env=os.environ | STALE, capture_output=True, text=True, timeout=50, check=True)
    number, _, warned = run.stdout.partition("\n")
    assert number == "1"
    assert "ignoring RANK=1, WORLD_SIZE=2" in warned


def listens() -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[str]]:
    """While a group exists: where the rank and the kernel listen, and the names of the rank's Unix sockets."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    rank, kernel = (sorted(listening_addresses(pid)) for pid in (os.getpid(), os.getppid()))
    names = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family == socket.AF_UNIX:
                    names.append(str(connection.getsockname()))
        except OSError:  # the folder's own descriptor, or no socket
            continue
    dist.barrier()
    return rank, kernel, names


def test_fault_19_nothing_listens_beyond_loopback(start_method: str) -> None:
    for rank, _, _ in launch(listens, 2, start_method=start_method, cpu=True).values:
        assert rank, "gloo's own socket should be here; the test looks at the wrong place"
        assert all(is_loopback(address) for address, _ in rank), rank


def test_fault_20_kernel_and_ranks_have_no_address_for_messages() -> None:
    for _, kernel, names in launch(listens, 2, start_method="fork", cpu=True).values:
        assert kernel == []
        assert names, "the channel should be here; the test looks at the wrong place"
        assert set(names) == {""}, "an inherited pair of sockets has no name that a stranger could send to"
