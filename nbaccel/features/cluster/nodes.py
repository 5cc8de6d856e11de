"""Where ranks go: the nodes of `--nodes`, what they say of themselves, and the ranks of each. Runs in the kernel.

Pure functions of what was asked for and what the agents have said. What cannot be is refused here, in one sentence.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from nbaccel.base.hardware import Gpu, MemoryInfo, Survey
from nbaccel.base.quantities import in_gb, plural
from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster.cluster import Placement
from nbaccel.features.cluster.node_environment import slurm_nodes, ssh_words
from nbaccel.features.cluster.ray_nodes import ray_address
from nbaccel.launching.ipc.spec import Devices

__all__ = ["NODE_TIMEOUT_S", "NodeFacts", "NodesDevices", "refuse_unlike", "spread", "survey_of", "wanted_of"]

NODE_TIMEOUT_S = 60.0
"""Seconds after which a node that does not answer is given up: a pause of the network must not end hours of work."""


def wanted_of(nodes: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Return what `--nodes` asks for, as the relay takes it.

    Args:
        nodes: "slurm", "ray", "ray://HOST:PORT", or hosts with commas between them.
        timeout_s: Seconds after which a node that does not answer is given up.

    Raises:
        LaunchRefused: It names nothing, or a host twice.

    Example:
        >>> wanted_of("gpu1,gpu2")["hosts"]
        ['gpu1', 'gpu2']
    """
    silence = {"silence_s": timeout_s or NODE_TIMEOUT_S}
    if nodes == "slurm":
        return {"kind": "slurm", "hosts": _allocated(), **silence}
    if nodes == "ray" or nodes.startswith("ray://"):
        return {"kind": "ray", "hosts": [nodes], "address": ray_address(nodes), **silence}
    hosts = [host.strip() for host in nodes.split(",") if host.strip()]
    if not hosts:
        raise LaunchRefused("--nodes names no host: write --nodes host1,host2, slurm or ray.")
    if twice := [host for number, host in enumerate(hosts) if host in hosts[:number]]:
        raise LaunchRefused(
            f"--nodes names {twice[0]} twice: one agent serves all ranks of a machine, -n says how many."
        )
    return {"kind": "ssh", "hosts": hosts, "ssh": ssh_words(), **silence}


def _allocated() -> list[str]:
    """Return the hosts of the Slurm allocation that this process is in."""
    listed = slurm_nodes()
    if not listed:
        raise LaunchRefused(
            "--nodes slurm needs an allocation, and this kernel is in none (SLURM_JOB_NODELIST is not set): start "
            "Jupyter inside of salloc or sbatch."
        )
    try:
        said = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchRefused(
            f"--nodes slurm: scontrol could not be asked for the nodes of the allocation ({error})."
        ) from None
    if said.returncode or not said.stdout.split():
        raise LaunchRefused(f"--nodes slurm: scontrol does not know the nodes {listed}: {said.stderr.strip()}")
    return said.stdout.split()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts that the agent of one node has said of its machine.

    Args:
        name: The node, as a person calls it.
        host: What the machine calls itself.
        gpus: Numbered as on that machine.
    """

    name: str
    host: str
    python: str
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    why_no_gpu: str
    cores: int
    free_bytes: int

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> NodeFacts:
        """Return the facts from an agent's first frame."""
        gpus = tuple(Gpu(**gpu | {"compute_capability": tuple(gpu["compute_capability"])}) for gpu in said["gpus"])
        known = {
            name: said[name] for name in ("name", "host", "python", "versions", "why_no_gpu", "cores", "free_bytes")
        }
        return cls(gpus=gpus, **known)

    def __str__(self) -> str:
        gpus = ", ".join(dict.fromkeys(gpu.name for gpu in self.gpus))
        what = f"{plural(len(self.gpus), 'GPU')} ({gpus})" if self.gpus else "no GPU"
        versions = ", ".join(f"{name} {number or 'missing'}" for name, number in self.versions.items())
        memory = f"{in_gb(self.free_bytes)} free"
        return f"{self.name}: {what}, {plural(self.cores, 'core')}, {memory}; Python {self.python}, {versions}"


def refuse_unlike(nodes: Sequence[NodeFacts]) -> None:
    """Refuse nodes on which the notebook's objects would be others: another Python, torch or nbaccel.

    Raises:
        LaunchRefused: Names node, package and both versions.
    """
    here = {"nbaccel": version("nbaccel"), "torch": version("torch")}
    ours = ".".join(platform.python_version_tuple()[:2])
    for node in nodes:
        theirs = ".".join(node.python.split(".")[:2])
        if theirs != ours:
            raise LaunchRefused(
                f"node {node.name} has Python {theirs}, and the notebook {ours}: its objects could not travel."
            )
        for name, number in here.items():
            if node.versions.get(name) != number:
                has = node.versions.get(name) or "none"
                raise LaunchRefused(
                    f"node {node.name} has {name} {has}, and the notebook {number}: install the same on all nodes."
                )


def survey_of(here: Survey, nodes: Sequence[NodeFacts]) -> Survey:
    """Return the machines of all nodes as one: their GPUs in the order of nodes, numbered anew.

    Args:
        here: The survey of the notebook's machine.
        nodes: The nodes.
    """
    gpus = [gpu for node in nodes for gpu in node.gpus]
    return replace(
        here,
        gpus=tuple(replace(gpu, index=number) for number, gpu in enumerate(gpus)),
        cpu_count=sum(node.cores for node in nodes),
        ram=MemoryInfo(0, min(node.free_bytes for node in nodes)),
    )


@dataclass(frozen=True, slots=True)
class NodesDevices(Devices):
    """Devices of ranks on several machines, each of which shows its ranks its own.

    Args:
        shares: For each node its name, and its ranks.
    """

    shares: tuple[tuple[str, int], ...] = field(default=())

    def environ(self) -> dict[str, str]:
        """Return nothing: see `Placement.cards`."""
        return {}

    def names(self) -> tuple[str, ...]:
        """Return the node of each rank, with its device."""
        own = Devices.names(self) or ("CPU",) * self.num_processes
        return tuple(f"{node} {device}" for node, device in zip(self.nodes, own, strict=True))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the node of each rank."""
        return tuple(name for name, count in self.shares for _ in range(count))

    def in_short(self, width: int) -> str:
        """Return how many ranks there are on which node."""
        return f"{plural(self.num_processes, 'rank')}: {self._on}"

    @property
    def _on(self) -> str:
        return ", ".join(f"{count} on {name}{self._cards(number)}" for number, (name, count) in enumerate(self.shares))

    def _cards(self, node: int) -> str:
        first = sum(count for _, count in self.shares[:node])
        kinds = dict.fromkeys(gpu.name for gpu in self.gpus[first : first + self.shares[node][1]])
        return f" ({', '.join(kinds)})" if kinds else " (CPU)"

    def __str__(self) -> str:
        return self.in_short(0)


def spread(devices: Devices, nodes: Sequence[NodeFacts], is_counted: bool) -> tuple[NodesDevices, Placement]:
    """Return the devices of a run as those of the nodes, and how many ranks each node gets.

    Args:
        devices: What was chosen of the `survey_of` all nodes.
        nodes: The nodes.
        is_counted: Whether the number of ranks was given; else each node without a GPU gets one rank.

    Raises:
        LaunchRefused: There are fewer ranks than nodes.
    """
    total = devices.num_processes if is_counted or devices.gpus else len(nodes)
    if total < len(nodes):
        raise LaunchRefused(
            f"{plural(total, 'rank')} for {plural(len(nodes), 'node')}: use -n {len(nodes)} or more, or fewer nodes."
        )
    counts = _balanced(total, [len(node.gpus) for node in nodes] if devices.gpus else [total] * len(nodes))
    cards = [_cards_of(node, count, bool(devices.gpus)) for node, count in zip(nodes, counts, strict=True)]
    gpus: list[Gpu] = []
    if devices.gpus:
        for node, count in zip(nodes, counts, strict=True):
            gpus += node.gpus[:count]
    shares = tuple((node.name, count) for node, count in zip(nodes, counts, strict=True))
    own = NodesDevices(total, tuple(gpus), hides_gpus=devices.hides_gpus, why_no_gpu=devices.why_no_gpu, shares=shares)
    return own, Placement(counts, cards)


def _balanced(total: int, most: Sequence[int]) -> list[int]:
    """Return shares of `total` that are as equal as the largest shares allow.

    Example:
        >>> _balanced(5, [4, 4]), _balanced(5, [1, 8])
        ([3, 2], [1, 4])
    """
    counts = [0] * len(most)
    for _ in range(total):
        open_nodes = [node for node, limit in enumerate(most) if counts[node] < limit]
        counts[min(open_nodes, key=lambda node: (counts[node], node))] += 1
    return counts


def _cards_of(node: NodeFacts, count: int, has_gpus: bool) -> dict[str, str]:
    if not has_gpus:
        return {"CUDA_VISIBLE_DEVICES": ""} if node.gpus else {}
    names = [str(gpu.number) if gpu.number is not None else gpu.uuid for gpu in node.gpus[:count]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if all(names) else {}
