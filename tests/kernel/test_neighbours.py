"""Several notebooks on one machine, taken ports and stale variables disturb nobody; nothing listens to the network."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate
from kernel.sockets import is_loopback, listening_addresses

COLLECTIVE = """
import torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total))
"""

STALE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}


@pytest.fixture
def port_29500() -> Iterator[socket.socket]:
    """The port that everybody else's launcher takes is taken."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        yield taken


@pytest.mark.full
@pytest.mark.usefixtures("port_29500")
def test_two_kernels_launch_at_once_with_stale_variables_and_a_taken_port(
    kernel: RealKernel, new_kernel: Kernels, start: str
) -> None:
    stale = new_kernel(**STALE)
    stale.do("import torch\n%load_ext nbaccel")
    for _ in range(3):
        running = [each.begin(accelerate(COLLECTIVE, start)) for each in (kernel, stale)]
        for execution in running:
            assert execution.end(timeout_s=30).succeeded().printed == "total 2\n"


@pytest.mark.full
def test_stale_variables_do_not_decide_the_number_of_ranks(new_kernel: Kernels) -> None:
    stale = new_kernel(**STALE)
    stale.do("%load_ext nbaccel")
    cell = stale.do("%%accelerate --cpu\nprint(accelerator.num_processes)")
    assert cell.printed == "1\n"


@pytest.mark.usefixtures("port_29500")
def test_an_env_group_of_the_users_own_forms_though_the_usual_port_is_taken(kernel: RealKernel, start: str) -> None:
    kernel.do("""
        def train():
            import torch.distributed as dist
            dist.init_process_group("gloo")
            return dist.get_world_size()
    """)
    assert kernel.value(f"nbaccel.launch(train, 2, start_method={start!r}).values") == [2, 2]


LISTENS = """
import os, time
import torch.distributed as dist
dist.barrier()
dist.new_group([0, 1])
print("process", os.getpid())
time.sleep(60)
"""


def test_every_socket_of_ours_is_on_loopback(kernel: RealKernel, start: str) -> None:
    running = kernel.begin(accelerate(LISTENS, start))
    told = running.until(lambda cell: len(re.findall(r"process \d+\n", cell.text)) == 2)
    ranks = [int(pid) for pid in re.findall(r"process (\d+)\n", told.text)]
    family = kernel.family()
    assert set(ranks) < set(family)
    ours = {address for pid in family for address in listening_addresses(pid)}
    of_ranks = {address for pid in ranks for address in listening_addresses(pid)}
    kernel.interrupt()
    running.end().failed("KeyboardInterrupt")
    assert of_ranks, "gloo's own sockets should be among them; the test looks at the wrong place"
    assert [address for address, _ in ours if not is_loopback(address)] == []
    assert not {port for _, port in of_ranks} & kernel.ports, "a restarted kernel could not have its ports back"
