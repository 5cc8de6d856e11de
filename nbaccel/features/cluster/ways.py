"""Which ways to other machines there are here: the row "nodes" of the doctor's report. Runs in kernels and terminals.

It imports none of what it looks for, and prints no variable's value.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version

from nbaccel.features.cluster.node_environment import SSH, slurm_nodes, ssh_words

__all__ = ["ways_to_nodes"]


def ways_to_nodes() -> str:
    """Return in words which of ssh, Ray and Slurm `--nodes` could use here."""
    words = ssh_words()
    name = "ssh" if words == ["ssh"] else SSH
    by_ssh = name if words and shutil.which(words[0]) else f"no {name}"
    try:
        by_ray = f"Ray {version('ray')}"
    except PackageNotFoundError:
        by_ray = "no Ray (pip install 'nbaccel[ray]')"
    by_slurm = "an allocation of Slurm" if slurm_nodes() else "no allocation of Slurm"
    return f"{by_ssh}; {by_ray}; {by_slurm}"
