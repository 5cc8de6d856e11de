"""Ranks on the nodes of an allocation of Slurm: slurmctld in one namespace, slurmd on two machines, salloc around a
script."""

from __future__ import annotations

import os
import shutil
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

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "scontrol")


@pytest.fixture(scope="module")
def allocation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs a script inside of an allocation of both machines."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]} here (Debian: slurmctld, slurmd, slurm-client, munge)")
    folder = Path(tmp_path_factory.mktemp("slurm"))
    started: list[subprocess.Popen[bytes]] = []

    def start(space: str | None, name: str, *words: str, own: bool = False) -> None:
        """Start a server; on a machine, with a host name of its own."""
        where = [] if space is None else ["ip", "netns", "exec", space]
        line = f"hostname {name} && exec {' '.join(words)}"
        command = [*where, "unshare", "--uts", "sh", "-c", line] if own else [*where, *words]
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ))

    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    try:
        with two_machines(tmp_path_factory.mktemp("machines")) as machines:
            _configure(folder)
            socket = folder / "munge.socket"
            start(
                *(None, "munged", shutil.which("munged") or "", "--foreground", "--force", f"--socket={socket}"),
                *(f"--key-file={folder}/munge.key", f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid"),
                f"--seed-file={folder}/munge.seed",
            )
            _until(socket.exists, folder)
            start(machines.spaces["front"], "front", "slurmctld", "-D", "-f", str(folder / "slurm.conf"), own=True)
            for host in HOSTS:
                start(machines.spaces[host], host, "slurmd", "-D", "-f", str(folder / "slurm.conf"), own=True)

            def inside(script: str, *words: str, timeout_s: float = 200) -> list[Any]:
                (folder / "script.py").write_text(script)
                command = ["ip", "netns", "exec", machines.spaces["front"], "salloc", "-N2", "--quiet"]
                done = subprocess.run(
                    [*command, sys.executable, str(folder / "script.py"), *words],
                    env={**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    check=False,
                )
                said = lines_of(done.stdout)
                assert said, f"{done.stdout}{done.stderr}{_logs(folder)}"
                return said

            _until(lambda: _are_idle(machines, environ), folder)
            yield inside
    except NoMachines as error:
        pytest.skip(f"no machines can be made here: {error}")
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)


def _configure(folder: Path) -> None:
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    for host in HOSTS:
        (folder / f"spool-{host}").mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    nodes = "".join(f"NodeName={host} NodeAddr={address} CPUs=2 State=UNKNOWN\n" for host, address in HOSTS.items())
    (folder / "slurm.conf").write_text(
        f"ClusterName=tests\nSlurmctldHost=front({FRONT})\nSlurmctldPort=16817\nSlurmdPort=16818\nSlurmUser=root\n"
        f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nCryptoType=crypto/munge\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmctldPidFile={folder}/ctld.pid\n"
        f"SlurmdPidFile={folder}/slurmd-%n.pid\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        f"ReturnToService=2\nMpiDefault=none\nSlurmctldTimeout=300\nSlurmdTimeout=300\n{nodes}"
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )


def _are_idle(machines: Machines, environ: dict[str, str]) -> bool:
    command = ["ip", "netns", "exec", machines.spaces["front"], "sinfo", "--noheader", "--format=%D %t"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split() == ["2", "idle"]


def _until(is_true: Any, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, _logs(folder)
        time.sleep(0.2)


def _logs(folder: Path) -> str:
    return "".join(f"\n{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in folder.glob("*.log"))


def test_ranks_of_an_allocation_meet_fail_by_name_and_are_quick_the_second_time(allocation: Any) -> None:
    first, second, failed = allocation(SCRIPT, "functions", "slurm")
    assert [total for total, _ in first[0]] == [60] * 4, first
    where = [(names["NODE_RANK"], names["SLURMD_NODENAME"]) for _, names in first[0]]
    assert where == [("0", "east"), ("0", "east"), ("1", "west"), ("1", "west")]
    assert second[0][0][0] == 6
    assert second[1] < 10
    assert failed[0] == "ZeroDivisionError: of rank 3"


def test_cells_train_there_as_in_four_local_ranks(allocation: Any) -> None:
    for difference, _ in allocation(SCRIPT, "cells", "slurm"):
        assert difference < 1e-6
