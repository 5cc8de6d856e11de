"""What the environment says of nodes. Read in the kernel, the relay and agents; nothing else of the folder reads it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection

from nbaccel.features.cluster.routes import address_towards

__all__ = ["ADDRESS", "SSH", "be_quiet", "known_address", "own_environment", "ray_cluster", "slurm_nodes", "ssh_words"]

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
