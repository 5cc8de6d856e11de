"""Nodes of a Ray cluster: an actor on each runs an agent, and passes its bytes on. Used by the relay; needs Ray.

Ray places, authenticates and notices a dead node; ranks are processes of the agent, not of Ray. An actor for each rank
would take 20 s a launch and 180 MB a rank, where the agent's zygote takes half a second and 14 MB.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.quantities import plural
from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster.node_environment import own_environment, ray_cluster

__all__ = ["RayNodes", "RayStream", "ray_address"]

_PROBE_S = 2.0
_INIT_S = 9.0
_PLACE_S = 9.0
_READ_AT_ONCE = 1 << 18


class _AgentActor:
    """Runs an agent on the node that Ray has put it on; an actor of Ray."""

    def __init__(self, address: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nbaccel.features.cluster.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=own_environment(address=address),
            cwd=folder if os.path.isdir(folder) else None,
            start_new_session=True,
        )

    def ready(self) -> None:
        """Return once the actor is there."""

    def read(self) -> Iterator[bytes]:
        """Yield what the agent writes, until it ends."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while data := os.read(fd, _READ_AT_ONCE):
            yield data

    def write(self, data: bytes) -> None:
        """Pass bytes to the agent; none: it is to end."""
        assert self._process.stdin is not None
        if data:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        else:
            self._process.stdin.close()


class RayStream:
    """The stream to one agent, behind an actor."""

    def __init__(self, name: str, actor: Any, get: Callable[..., Any]) -> None:
        self.name = name
        self._actor = actor
        self._get = get
        self._why = ""
        mine, theirs = socket.socketpair()
        self._theirs = theirs
        mine.setblocking(False)
        self.read_fd = mine.detach()
        self.write_fd = os.dup(self.read_fd)
        for work in (self._bring, self._take):
            threading.Thread(target=work, name=f"nbaccel-ray-{name}", daemon=True).start()

    def _bring(self) -> None:
        """Bring what the agent writes, until it ends."""
        try:
            for reference in self._actor.read.options(num_returns="streaming").remote():
                self._theirs.sendall(self._get(reference))
        except Exception as error:  # whatever Ray says of an actor or a node that is gone
            self._why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_WR)

    def _take(self) -> None:
        """Take what the relay writes to the agent, one piece after the other."""
        try:
            while data := self._theirs.recv(_READ_AT_ONCE):
                self._get(self._actor.write.remote(data))
        except Exception:  # the other thread says why
            return

    def why(self) -> str:
        """Return what Ray has said about the end."""
        return self._why

    def hang_up(self) -> None:
        """Close this side, which ends nothing yet."""
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1

    def close(self) -> None:
        """End the actor, and its agent with it."""
        import ray

        self.hang_up()
        with contextlib.suppress(Exception):  # it is gone
            ray.kill(self._actor)


@dataclass(frozen=True, slots=True)
class RayNodes:
    """The nodes of a Ray cluster that have GPUs; all of them where none has.

    Args:
        address: "HOST:PORT" of the cluster, or "auto" for that of this machine.
    """

    address: str

    def connect(self) -> Sequence[RayStream]:
        """Connect to the cluster, and start an agent on each of its nodes.

        Raises:
            LaunchRefused: There is no cluster, it lets nobody in, or its nodes have no place.
        """
        _probe(self.address)
        try:
            import ray
        except ModuleNotFoundError:
            raise LaunchRefused("--nodes ray needs Ray: pip install 'nbaccel[ray]', the cluster's version.") from None
        _in_time(
            lambda: ray.init(address=self.address, log_to_driver=False, logging_level="error"),
            _INIT_S,
            f"the Ray cluster at {self.address} has not let this notebook in within {_INIT_S:.0f} s: is RAY_AUTH_MODE "
            "set here as there, and is the token (RAY_AUTH_TOKEN, or ~/.ray/auth_token) the cluster's?",
        )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes = [node for node in nodes if node["Resources"].get("GPU")] or [
            node for node in nodes if node["Resources"].get("CPU")
        ]
        if not nodes:
            raise LaunchRefused(
                f"the Ray cluster at {self.address} has no node with a CPU or GPU: ray status shows them."
            )
        streams: list[RayStream] = []
        try:
            for node in nodes:
                streams.append(RayStream(_name(node, nodes), self._actor(ray, node, nodes), ray.get))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def _actor(self, ray: Any, node: dict[str, Any], nodes: Sequence[dict[str, Any]]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = ray.remote(max_restarts=0, concurrency_groups={"in": 1, "out": 1})(_methods_in_groups(ray))
        gpus = node["Resources"].get("GPU", 0)
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = kind.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where).remote(
            node["NodeManagerAddress"], os.getcwd()
        )
        name = _name(node, nodes)
        try:
            ray.get(actor.ready.remote(), timeout=_PLACE_S)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)  # else it begins when there is a place for it
            held = (
                f"{plural(round(gpus), 'GPU')}, and other work of Ray holds some of that" if gpus else "no place left"
            )
            raise LaunchRefused(f"node {name} of the Ray cluster has {held}: ray status shows it.") from None
        except Exception as error:
            said = str(error).strip().splitlines()
            raise LaunchRefused(
                f"node {name} of the Ray cluster cannot run an agent: {said[-1] if said else error}"
            ) from None
        return actor


def ray_address(nodes: str) -> str:
    """Return the address of a cluster from what `--nodes` says.

    Raises:
        LaunchRefused: It is none.

    Example:
        >>> ray_address("ray"), ray_address("ray://10.0.0.1:6379")
        ('auto', '10.0.0.1:6379')
    """
    address = nodes.removeprefix("ray").removeprefix("://") or ray_cluster()
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal()):
        raise LaunchRefused(f"--nodes ray://HOST:PORT names a cluster by its head's address; got {address!r}.")
    return address


def _methods_in_groups(ray: Any) -> type:
    """Return the actor's class, whose directions do not wait for each other."""

    class NodeAgent(_AgentActor):
        @ray.method(concurrency_group="out")  # type: ignore[untyped-decorator]  # Ray has no types
        def read(self) -> Iterator[bytes]:
            yield from super().read()

        @ray.method(concurrency_group="in")  # type: ignore[untyped-decorator]
        def write(self, data: bytes) -> None:
            super().write(data)

    return NodeAgent


def _name(node: dict[str, Any], nodes: Sequence[dict[str, Any]]) -> str:
    """Return how a person calls a node: its host, or its address where several say the same."""
    host = str(node.get("NodeManagerHostname") or "")
    is_one = sum(each.get("NodeManagerHostname") == host for each in nodes) == 1
    return host if host and is_one else str(node["NodeManagerAddress"])


def _probe(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself waits there for two minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except OSError as error:
        raise LaunchRefused(
            f"nobody listens at {address} ({error.strerror or error}): `ray start --head --port={port}` there, or name "
            "another address."
        ) from None


def _in_time(act: Callable[[], Any], seconds: float, late: str) -> None:
    """Call `act` in a thread of its own, and refuse with `late` if it takes longer; it is left behind then."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="nbaccel-ray", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise LaunchRefused(late)
    if failures:
        said = str(failures[0]).strip().partition("\n")[0]
        raise LaunchRefused(f"Ray: {said or type(failures[0]).__name__}")
