"""Cluster: the nodes that a notebook uses, with an agent on each. Runs in the kernel.

It starts ranks as the zygote does, by the relay, which stays between the cells with all agents. Where a node was lost,
the relay has ended with its run, and the next launch connects anew.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.errors import LaunchRefused
from nbaccel.features.clean_start.captured_state import Surroundings
from nbaccel.features.clean_start.patches import PatchFinder
from nbaccel.features.clean_start.zygote import ForkingProcess, state_of_the_kernel
from nbaccel.launching.ipc.spec import WorkerBoot
from nbaccel.launching.processes.handle import WorkerProcess
from nbaccel.namespace.payload import Payload

__all__ = ["Cluster", "Placement"]

_READY_S = 120.0
_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from nbaccel.features.cluster.relay import main; main({fd}, {pidfd}, WANTED)"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of ranks of each node, in the order of nodes, and the variables that show them their devices.

    Args:
        counts: Ranks by node.
        cards: Variables by node.
    """

    counts: Sequence[int]
    cards: Sequence[Mapping[str, str]] = field(default_factory=tuple)


class _Relay(ForkingProcess):
    """The kernel's end of the relay."""

    def __init__(self, wanted: Mapping[str, Any], kernel_pidfd: int) -> None:
        super().__init__(
            _BOOTSTRAP.replace("WANTED", repr(dict(wanted)).replace("{", "{{").replace("}", "}}")),
            kernel_pidfd,
            _READY_S,
        )
        self.facts: Sequence[Mapping[str, Any]] = ()

    def connect(self) -> Sequence[Mapping[str, Any]]:
        """Wait for all agents, and return what they say of their machines."""
        if not self.facts:
            self.facts = self._receive("nodes")[0]["facts"]
        return self.facts

    def place(self, placement: Placement) -> None:
        """Say how the ranks of the next request are spread."""
        cards = [dict(each) for each in placement.cards] or [{} for _ in placement.counts]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self._channel.send({"op": "place", "counts": list(placement.counts), "cards": cards, "port": port})

    def blind_nodes(self, path: str) -> Sequence[str]:
        """Return the nodes that do not see a file; see `Cluster.blind_nodes`."""
        self._channel.send({"op": "see", "path": path})
        blind: Sequence[str] = self._receive("seen")[0]["blind"]
        return blind

    def _why_it_ended(self, code: int) -> str:
        return f"the process that leads to the nodes ended with exit code {code}"


class Cluster:
    """Starts ranks on nodes, as a `ForkServer`.

    Args:
        wanted: The nodes, see `relay.main`.
        kernel_pidfd: See `ForkingProcess`.

    Attributes:
        placement: How the next ranks are spread.
    """

    def __init__(self, wanted: Mapping[str, Any], kernel_pidfd: int) -> None:
        self._wanted = wanted
        self._kernel_pidfd = kernel_pidfd
        self._relay: _Relay | None = None
        self._patches = PatchFinder()
        self.placement = Placement(())

    @property
    def is_open(self) -> bool:
        """Return whether the nodes are connected."""
        return self._relay is not None and self._relay.is_usable

    def fds(self) -> list[int]:
        """Return the descriptors that lead to the relay."""
        return [] if self._relay is None else [self._relay.fileno()]

    def connect(self) -> Sequence[Mapping[str, Any]]:
        """Return the facts of all nodes; connect to them if that is not done.

        Raises:
            LaunchRefused: A node cannot be reached, or lacks something; the message says which, and what.
        """
        if self._relay is not None and not self._relay.is_usable:
            self.close()
        if self._relay is None:
            self._relay = _Relay(self._wanted, self._kernel_pidfd)
        try:
            return self._relay.connect()
        except BaseException:
            self.close()
            raise

    def blind_nodes(self, path: str) -> Sequence[str]:
        """Return the nodes that do not see a file of this machine.

        Args:
            path: The file.

        Raises:
            LaunchRefused: A node was lost.
        """
        self.get_ready()
        assert self._relay is not None
        return self._relay.blind_nodes(path)

    def get_ready(self) -> None:
        """Wait until all nodes can start ranks.

        Raises:
            LaunchRefused: One cannot.
        """
        self.connect()
        assert self._relay is not None
        try:
            self._relay.get_ready()
        except LaunchRefused:
            self.close()
            raise

    def fork(self, boots: Sequence[WorkerBoot], reference: str, payload: Payload) -> list[WorkerProcess]:
        """Start one rank for each boot record, on the nodes of `placement`.

        Raises:
            LaunchRefused: No rank was started; the message says which node refused.
        """
        self.get_ready()
        assert self._relay is not None
        state = state_of_the_kernel(self._patches)
        try:
            self._relay.place(self.placement)
            return self._relay.fork_for(boots, reference, payload.fd, state.fd, _surroundings())
        except BaseException:
            self.close()
            raise
        finally:
            os.close(state.fd)

    def close(self) -> None:
        """End relay and agents; nothing is left on any node."""
        if self._relay is not None:
            relay, self._relay = self._relay, None
            relay.close()


def _surroundings() -> dict[str, Any]:
    """Return path and folder of the notebook, and what it has changed in its environment."""
    now = Surroundings.capture()
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if b"=" in each]
    before = {name: value for name, _, value in pairs}
    changed = {name: value for name, value in now.environ.items() if before.get(name) != value}
    removed = [name for name in before if name not in now.environ]
    return {"sys_path": now.sys_path, "cwd": now.cwd, "environ": changed, "removed": removed}
