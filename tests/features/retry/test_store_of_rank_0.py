"""A search where rank 0 holds the store, as under mpirun and srun, where no launcher holds it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SEARCH = """
import os, time, nbaccel
from nbaccel.features.retry import disconnect as board

is_first = os.environ["RANK"] == "0"
if not is_first:
    board._GLANCE_S = 0.8  # it looks up when rank 0 has long been done

@nbaccel.find_executable_batch_size(starting_batch_size=4)
def train(batch_size):
    if batch_size > 2:
        raise MemoryError
    time.sleep(0.4 * is_first)
    return batch_size

print(train(), flush=True)
os._exit(0)  # with the store's server, on rank 0
"""


@pytest.mark.slow
def test_rank_0_that_holds_the_store_leaves_a_search_last() -> None:
    """As under mpirun and srun, where no launcher holds it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SEARCH],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=50) for process in ranks]
    assert [out for out, _ in said] == ["2\n", "2\n"], said
