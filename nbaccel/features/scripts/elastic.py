"""Run a script in every rank of one or several machines by torch elastic. Runs in the process of `nbaccel launch`.

torch elastic, the engine of torchrun, starts the ranks, watches them, and ends all of them when one fails. This module
adds the values that a person would otherwise have to find: devices, settings, CPU threads, the network interface, one
seed of hashes for the ranks of all machines, and on one machine a rendezvous that no other machine can reach. Nothing
here knows notebooks.

Reasons: docs/design/several-machines.md
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from nbaccel.base.quantities import listed
from nbaccel.errors import LaunchRefused
from nbaccel.features.flag_effects.effect_table import as_json
from nbaccel.features.scripts.script import FLAGS
from nbaccel.features.scripts.script_watch import ScriptWatch
from nbaccel.options.given_flags import GivenFlag
from nbaccel.output.terminal import say

__all__ = ["Elastic", "Nodes", "Program", "ScriptExit", "interface_to", "loopback_interface"]

_MASTER_PORT = 29500  # torchrun's
_RUNNER = "nbaccel.features.scripts.script"
_SIGNAL = 128  # what a shell adds to a signal's number


@dataclass(frozen=True, slots=True)
class Program:
    """The program of every rank: a script, or with `is_module` a module as `python -m` runs it; and its own arguments.

    Args:
        is_executable: The program is an executable of the system, which Python does not run.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a launch, and the number of this one.

    Args:
        count: Number of machines.
        rank: Number of this one, 0-based.
        master_addr, master_port: The address on which node 0 listens for the others.
        rdzv_backend, rdzv_conf: The rendezvous of the machines, and its options, as torchrun takes them; None for
            "static".
    """

    count: int = 1
    rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str | None = None

    def __post_init__(self) -> None:
        """Refuse an incomplete or contradictory description.

        Raises:
            LaunchRefused: The description is incomplete or contradictory.
        """
        if self.count == 1:
            given = [flag for flag, value in self._flags() if value is not None]
            if given and self.rank != 0:
                raise LaunchRefused(
                    f"{given[0]} is for a launch on several machines: say how many with --nnodes, or leave it out."
                )
            return
        missing = [flag for flag, value in self._flags()[:2] if value is None]
        if missing:
            raise LaunchRefused(
                f"--nnodes {self.count} needs {' and '.join(missing)}: every machine gets the same command but for "
                f"--node-rank, which is 0..{self.count - 1}, and --master-addr is the IP address of node 0."
            )
        if self.rank is not None and self.rank >= self.count:
            raise LaunchRefused(
                f"--node-rank {self.rank}: {self.count} nodes (--nnodes) have the numbers 0..{self.count - 1}."
            )

    def _flags(self) -> list[tuple[str, object]]:
        return [
            ("--node-rank", self.rank),
            ("--master-addr", self.master_addr),
            ("--master-port", self.master_port),
        ]

    def interface(self) -> str:
        """Return the network interface that gloo and NCCL have to use.

        Raises:
            LaunchRefused: No other machine could reach it.
        """
        if self.count == 1:
            return loopback_interface()
        return interface_to(str(self.master_addr), self.master_port or _MASTER_PORT)

    def arguments(self) -> list[str]:
        """Return the words for torchrun."""
        if self.count == 1:
            return ["--standalone"]
        port = self.master_port or _MASTER_PORT
        meeting = ["--master-addr", str(self.master_addr), "--master-port", str(port)]
        if self.rdzv_backend is not None:
            meeting = ["--rdzv-backend", self.rdzv_backend, "--rdzv-endpoint", f"{self.master_addr}:{port}"]
        if self.rdzv_conf is not None:
            meeting += ["--rdzv-conf", self.rdzv_conf]
        return ["--nnodes", str(self.count), "--node-rank", str(self.rank), *meeting]


@dataclass(frozen=True, slots=True)
class ScriptExit:
    """The end of a launch: the exit status, and a sentence if it is not 0."""

    status: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Elastic:
    """One launch.

    Args:
        num_processes: Ranks on this machine.
        threads: CPU threads of each.
        environ: Variables that are set in every rank (settings, devices); they override the caller's environment.
        torchrun: More words for torchrun, on how it watches and shows the ranks.
        flags: What each rank watches: the flags whose effect depends on how the program trains.
    """

    program: Program
    num_processes: int
    threads: int
    nodes: Nodes = Nodes()
    environ: Mapping[str, str] = field(default_factory=dict)
    torchrun: tuple[str, ...] = ()
    flags: tuple[GivenFlag, ...] = ()

    def arguments(self) -> list[str]:
        """Return the words after `torchrun`."""
        kind = ["--module"] if self.program.is_module else ["--no-python"] if self.program.is_executable else []
        return [*self._torchruns(), *kind, *self._programs()]

    def _torchruns(self) -> list[str]:
        return [*self.nodes.arguments(), "--nproc-per-node", str(self.num_processes), *self.torchrun]

    def _programs(self) -> list[str]:
        return [self.program.name, *self.program.arguments]

    def _arguments_by_us(self) -> list[str]:
        """Return the same words, with a Python program run by `worker.script`, which ends it cleanly."""
        if self.program.is_executable:
            return self.arguments()
        flags = [FLAGS, as_json(self.flags)] if self.flags else []
        kind = ["-m"] if self.program.is_module else []
        return [*self._torchruns(), "--module", _RUNNER, *flags, *kind, *self._programs()]

    def changes(self) -> dict[str, str]:
        """Return the variables in which a rank's environment differs from the caller's.

        Raises:
            LaunchRefused: See `Nodes.interface`.
        """
        interface = self.nodes.interface()
        defaults = {
            "OMP_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "PYTHONHASHSEED": "0",  # or each rank would go through a set of strings in an order of its own
        }
        wanted = {**defaults, **os.environ, **self.environ}
        return {name: wanted[name] for name in (*defaults, *self.environ)}

    def __str__(self) -> str:
        """Return a shell command that does the same.

        Two things differ: the interface on which the ranks of a single machine meet, and the end of the ranks, see
        `worker.script`.
        """
        words = (f"{name}={shlex.quote(value)}" for name, value in self.changes().items())
        return " ".join([*words, "torchrun", *map(shlex.quote, self.arguments())])

    def run(self) -> ScriptExit:
        """Run to the end in this process, whose environment it changes; no rank of this machine is left afterwards.

        Raises:
            LaunchRefused: See `Nodes.interface`.
        """
        os.environ.update(self.changes())
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

        from nbaccel.features.scripts.loopback import LOOPBACK, offer_loopback

        asked = parse_args(self._arguments_by_us())
        if asked.standalone:
            offer_loopback()
            asked.standalone, asked.rdzv_backend, asked.rdzv_endpoint = False, LOOPBACK, "localhost"
        watch = ScriptWatch(self.num_processes, say) if self.nodes.count == 1 and self.num_processes > 1 else None
        try:
            with watch or nullcontext():
                run(asked)
                steps = [] if watch is None else watch.steps
        except ChildFailedError as error:
            if watch is not None and watch.hang:
                return ScriptExit(1, watch.hang)
            rank, failure = error.get_first_failure()
            return _failed(rank, failure.pid, failure.exitcode)
        except SignalException as stop:
            return ScriptExit(
                _SIGNAL + stop.sigval, f"stopped by {stop.sigval.name}; the ranks of this machine are gone."
            )
        if len(set(steps)) > 1:
            each = listed([f"rank {rank} {count}" for rank, count in enumerate(steps)])
            say(
                f"the ranks have begun different numbers of training steps: {each}. Unless join_uneven_inputs has "
                "given them different numbers of batches, they were trained a step apart: look for an exception that "
                "only some ranks catch, a `break` or a `continue`."
            )
        return ScriptExit(0)


def _failed(rank: int, pid: int, exit_code: int) -> ScriptExit:
    if exit_code < 0:
        return ScriptExit(
            _SIGNAL - exit_code,
            f"rank {rank} (process {pid}) was ended by signal {-exit_code}"
            f"{', as the system does when memory runs out' if exit_code == -9 else ''}; the other ranks were ended.",
        )
    return ScriptExit(
        exit_code, f"rank {rank} (process {pid}) ended with exit status {exit_code}; what it said is above this line."
    )


Interfaces = Mapping[str, list[str]]
"""The addresses of each interface by its name, "eth0"."""


def loopback_interface() -> str:
    """Return the system's name of the loopback interface: "lo", or "lo0"."""
    return next((name for name, addresses in _interfaces().items() if "127.0.0.1" in addresses), "lo")


def interface_to(host: str, port: int) -> str:
    """Return the interface whose address another machine sees when this one connects to `host`.

    Unless told otherwise, gloo and NCCL take the interface of the host's own name, and on many systems that is
    loopback: then ranks of several machines wait for each other until they give up.

    It asks the system's routes by a datagram socket that is connected and never written to.

    Raises:
        LaunchRefused: The name is unknown here, means this machine itself, or no route leads there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchRefused(
            f"--master-addr {host}: this machine knows no address of that name ({error.strerror}); give the IP address "
            "of node 0."
        ) from None
    if ipaddress.ip_address(address[0]).is_loopback:
        raise LaunchRefused(
            f"--master-addr {host} is {address[0]} on this machine, which no other machine can reach (stock Debian "
            f"gives a host's own name such an address); give the IP address of node 0{_own_addresses()}."
        )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise LaunchRefused(
                f"--master-addr {host}: no way leads from this machine to {address[0]} ({error.strerror})"
                f"{_own_addresses()}."
            ) from None
        mine = probe.getsockname()[0]
    return next(name for name, addresses in _interfaces().items() if mine in addresses)


def _own_addresses() -> str:
    """Return the part of an error that lists this machine's own addresses."""
    outer = [
        f"{address} on {name}"
        for name, addresses in _interfaces().items()
        for address in addresses
        if not ipaddress.ip_address(address).is_loopback
    ]
    return f" (this machine has {', '.join(outer)})" if outer else " (this machine has loopback alone)"


def _interfaces() -> Interfaces:
    import psutil

    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in _IP]
        for name, addresses in psutil.net_if_addrs().items()
    }


_IP = (socket.AF_INET, socket.AF_INET6)
