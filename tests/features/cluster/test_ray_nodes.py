"""Ranks on the nodes of a Ray cluster: two machines of tests, with a head in a third namespace that lets in by a token.

The notebook's side is a script in the head's namespace, since Ray reaches it by the network, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from features.cluster.launches import SCRIPT, lines_of
from features.cluster.machines import FRONT, HOSTS, Machines, NoMachines, two_machines

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]

PORT = 26379
ADDRESS = f"ray://{FRONT}:{PORT}"
RESOURCES = ("--num-cpus=2", "--num-gpus=1")
"""Of each node; that there is no such GPU Ray does not know."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Path, dict[str, str]]]:
    """The machines with Ray on them, a folder for scripts, and the environment that its token is in."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'nbaccel[ray]'")
    folder = tmp_path_factory.mktemp("ray")
    (folder / ".ray").mkdir()
    (folder / ".ray" / "auth_token").write_text("0123456789" * 4)
    environ = {
        **os.environ,
        "HOME": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--object-store-memory=100000000", "--block"]
    ray += ["--disable-usage-stats"]
    processes: list[subprocess.Popen[bytes]] = []

    def start(machines: Machines, host: str, *words: str) -> None:
        command = ["ip", "netns", "exec", machines.spaces[host], *ray, *words]
        with (folder / f"{host}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
            )

    try:
        with two_machines(tmp_path_factory.mktemp("machines")) as machines:
            try:
                head = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
                start(machines, "front", *head, f"--node-ip-address={FRONT}", f"--temp-dir={folder}/t")
                _wait_for(folder / "front.log", "Ray runtime started")
                for host, address in HOSTS.items():
                    start(machines, host, f"--address={FRONT}:{PORT}", f"--node-ip-address={address}", *RESOURCES)
                    _wait_for(folder / f"{host}.log", "Ray runtime started")
                yield machines, folder, environ
            finally:
                for process in processes:
                    process.terminate()
                for process in processes:
                    process.wait(30)
    except NoMachines as error:
        pytest.skip(f"no machines can be made here: {error}")


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)


def run(cluster: tuple[Machines, Path, dict[str, str]], what: str, *addresses: str, **environ: str) -> list[Any]:
    """What the script has said, and in how many seconds, line by line."""
    machines, folder, known = cluster
    (folder / "script.py").write_text(SCRIPT)
    front = ["ip", "netns", "exec", machines.spaces["front"]]
    command = [*front, sys.executable, str(folder / "script.py"), what, *addresses]
    done = subprocess.run(
        command, env={**known, **environ}, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    said = lines_of(done.stdout)
    assert len(said) == {"functions": 3, "cells": 2, "taken": 1}[what] * len(addresses), done.stdout + done.stderr
    return said


def test_ranks_on_rays_nodes_meet_and_a_second_launch_is_quick(cluster: Any) -> None:
    first, second, failed = run(cluster, "functions", ADDRESS)
    assert [total for total, _ in first[0]] == [60] * 4
    assert [names["NODE_RANK"] for _, names in first[0]] == ["0", "0", "1", "1"]
    assert {names["GLOO_SOCKET_IFNAME"] for _, names in first[0]} == {"eth0"}
    assert second[0][0][0] == 6
    assert second[1] < 10
    assert failed[0] == "ZeroDivisionError: of rank 3"


def test_cells_train_there_as_in_four_local_ranks(cluster: Any) -> None:
    for difference, _ in run(cluster, "cells", ADDRESS):
        assert difference < 1e-6


def test_what_leads_to_no_cluster_is_refused_within_seconds(cluster: Any) -> None:
    said = run(cluster, "functions", f"ray://{FRONT}:1", "ray://nowhere")
    assert all(seconds < 12 for _, seconds in said)
    assert said[0][0].startswith(f"LaunchRefused: nobody listens at {FRONT}:1 (Connection refused)")
    assert said[3][0].startswith("LaunchRefused: --nodes ray://HOST:PORT names a cluster by its head's address")


def test_a_node_whose_gpus_are_taken_is_named_and_no_agent_waits_for_them(cluster: Any) -> None:
    (text, seconds), (free, _) = run(cluster, "taken", ADDRESS, HOSTS["west"])
    assert text.startswith(f"LaunchRefused: node {HOSTS['west']} of the Ray cluster has 1 GPU, and other work of Ray")
    assert seconds < 20
    assert free == 1


@pytest.mark.parametrize("environ", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "wrong" * 8}])
def test_without_the_clusters_token_nobody_gets_in_and_is_told_why(cluster: Any, environ: dict[str, str]) -> None:
    text, seconds = run(cluster, "functions", ADDRESS, **environ)[0]
    assert text.startswith("LaunchRefused: ")
    assert "token" in text
    assert seconds < 15
