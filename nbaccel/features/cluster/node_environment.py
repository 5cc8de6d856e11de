"""What the environment says of nodes. Read in the kernel, the relay and agents; nothing else of the folder reads it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from nbaccel.features.cluster.routes import address_towards

__all__ = [
    "ADDRESS",
    "SSH",
    "be_quiet",
    "known_address",
    "own_environment",
    "ray_cluster",
    "share_hashes",
    "slurm_nodes",
    "ssh_words",
    "ways_to_nodes",
]

SSH = "NBACCEL_SSH"
"""Variable with the words to run in place of `ssh`, such as "ssh -F cluster.conf"."""

ADDRESS = "NBACCEL_NODE_ADDRESS"
"""Variable with the address of a node, where what starts its agent knows it."""


def ssh_words() -> list[str]:
    """Return the command that reaches a host."""
    return shlex.split(os.environ.get(SSH, "ssh"))


def slurm_nodes() -> str:
    """Return the nodes of the Slurm allocation that this process is in, as Slurm writes them; empty outside of one."""
    return os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST") or ""


def ray_cluster() -> str:
    """Return the Ray cluster that this process is to use: "HOST:PORT", or "auto" for that of this machine."""
    return os.environ.get("RAY_ADDRESS") or "auto"


def known_address() -> str:
    """Return the address by which this machine was reached; empty if that is not known.

    Sources: SSH_CONNECTION has the client's address and port, then the server's (https://man.openbsd.org/ssh#ENVIRONMENT);
    SLURM_LAUNCH_NODE_IPADDR is the address of the machine that runs srun (https://slurm.schedmd.com/srun.html).
    """
    if known := os.environ.get(ADDRESS):
        return known
    if launches := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return address_towards(launches)
    return "".join(os.environ.get("SSH_CONNECTION", "").split(" ")[2:3])


def own_environment(without: Collection[str] = (), address: str = "") -> dict[str, str]:
    """Return the variables of this process, for another one.

    Args:
        without: Names that are left out.
        address: The address of this node for that process; empty to leave it as it is.
    """
    own = {name: value for name, value in os.environ.items() if name not in without}
    return own | ({ADDRESS: address} if address else {})


def be_quiet() -> None:
    """Choose what nobody has: that torch's store is silent of peers without a name, and that Ray reports no usage."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def share_hashes() -> None:
    """Choose the seed of hashes of Pythons that this one starts: those of all nodes go through sets in one order."""
    os.environ.setdefault("PYTHONHASHSEED", "0")


def ways_to_nodes() -> str:
    """Return in words which of ssh, Ray and Slurm `--nodes` could use here, without any variable's value."""
    words = ssh_words()
    name = "ssh" if words == ["ssh"] else SSH
    by_ssh = name if words and shutil.which(words[0]) else f"no {name}"
    try:
        by_ray = f"Ray {version('ray')}"
    except PackageNotFoundError:
        by_ray = "no Ray (pip install 'nbaccel[ray]')"
    by_slurm = "an allocation of Slurm" if slurm_nodes() else "no allocation of Slurm"
    return f"{by_ssh}; {by_ray}; {by_slurm}"
