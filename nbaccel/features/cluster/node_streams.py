"""Where agents run, and the streams of bytes that lead to them. Runs in the process of the relay."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol

__all__ = ["CONNECTED", "NodeStream", "NodeTransport", "PipeNodes", "advice"]

CONNECTED = b"\x00nbaccel-connected\n"
"""What the line for a shell writes before it starts an agent."""

_END_S = 1.0
_LAST_BYTES = 600
_OF_SSH = 255  # "an error occurred": it has said which, or its connection has ended


class NodeStream(Protocol):
    """The connection to the agent of one node.

    Attributes:
        name: The node, as a person calls it.
        read_fd, write_fd: Descriptors of this process, for the bytes of both directions.
    """

    name: str
    read_fd: int
    write_fd: int

    def why(self) -> str:
        """Return what is known about the end of the connection, as half a sentence; empty if nothing is."""

    def hang_up(self) -> None:
        """End the connection; the agent ends with it. A second call changes nothing."""

    def close(self) -> None:
        """Hang up, and release what is left."""


class NodeTransport(Protocol):
    """A way to reach nodes: one class for each engine."""

    def connect(self) -> Sequence[NodeStream]:
        """Start an agent on each node, and return the streams to them, in the order of nodes.

        Raises:
            OSError, LaunchRefused: The engine is not there; nothing was started.
        """


@dataclass(frozen=True, slots=True)
class PipeNodes:
    """Agents behind the pipes of a command for each node: `ssh`, `srun`. Nothing of ours listens.

    Args:
        names: The nodes.
        commands: For each node the words of the command that runs its last word, a line for a shell, on that node.
    """

    names: Sequence[str]
    commands: Sequence[Sequence[str]]

    @classmethod
    def by_ssh(cls, hosts: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> PipeNodes:
        """Return nodes that `ssh` reaches without a password.

        Args:
            hosts: As ssh knows them.
            ssh: The words to run in place of ssh.
        """
        words = [*ssh, "-oBatchMode=yes", "-oConnectTimeout=8", "-T"]
        words += ["-oServerAliveInterval=0", "-oTCPKeepAlive=no"]  # the relay asks itself, and knows for how long
        return cls(hosts, [[*words, "--", host, agent_line()] for host in hosts])

    @classmethod
    def by_srun(cls, hosts: Sequence[str]) -> PipeNodes:
        """Return the nodes of the Slurm allocation that this process is in."""
        srun = [
            "srun",
            "--nodes=1",
            "--ntasks=1",
            "--overlap",
            "--unbuffered",
            "--export=ALL",
            "--input=all",
            "--quiet",
        ]
        return cls(hosts, [[*srun, f"--nodelist={host}", "sh", "-c", agent_line()] for host in hosts])

    def connect(self) -> Sequence[PipeStream]:
        streams: list[PipeStream] = []
        try:
            for name, command in zip(self.names, self.commands, strict=True):
                streams.append(PipeStream(name, command))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams


class PipeStream:
    """The stream to one agent, behind the pipes of a process of this machine."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.write_fd = os.dup(self._process.stdin.fileno())
        self.read_fd = os.dup(self._process.stdout.fileno())
        self._process.stdin.close()
        self._process.stdout.close()
        os.set_blocking(self.read_fd, False)

    def why(self) -> str:
        """Return the last words of the command, and how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _LAST_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1].strip()
        code = self._process.poll()
        return f"exit code {code}" if code is not None and code > 0 and code != _OF_SSH else ""

    def hang_up(self) -> None:
        """Close the pipes, which ends the agent."""
        for fd in (self.write_fd, self.read_fd):
            if fd >= 0:
                os.close(fd)
        self.write_fd = self.read_fd = -1

    def close(self) -> None:
        """Hang up; the command gets a second to end."""
        self.hang_up()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def agent_line(python: str = sys.executable) -> str:
    """Return the line for a shell that runs an agent, in the folder that this process is in.

    Args:
        python: The interpreter, at the same path on each node.
    """
    folder = shlex.quote(os.getcwd())
    connected = "printf '\\000nbaccel-connected\\n'"
    return f"{connected} && cd {folder} && exec {shlex.quote(python)} -m nbaccel.features.cluster.agent"


_ADVICE = (
    (r"cd: ", "each node needs the notebook's folder, {folder}: start Jupyter in one that all nodes see"),
    (
        r"No module named '?nbaccel",
        "nbaccel is missing there: install it on each node, {python} -m pip install nbaccel",
    ),
    (r"not found|No such file", "each node needs the notebook's Python at the same path, {python}"),
    (r"Permission denied", "ssh must not ask for a password: ssh-copy-id {name}, or a key in ssh's configuration"),
    (r"Host key verification", "its key is not known: connect once by hand, ssh {name}"),
    (r"resolve|not known", "no machine of that name is known: write it as ssh knows it"),
    (r"refused|timed out|No route", "nothing answers there: is the machine on, and does its ssh server run?"),
)
"""Of a command's last words, and the next move."""


def advice(said: str, name: str) -> str:
    """Return the last words about a node that could not be reached, with the next move if one is known.

    Args:
        said: The words; empty if there were none.
        name: The node.
    """
    if not said:
        return "the connection has ended without a word"
    folder, python = os.getcwd(), sys.executable
    moves = (move.format(folder=folder, python=python, name=name) for words, move in _ADVICE if re.search(words, said))
    move = next(moves, "")
    return f"{said.rstrip('.')}. {move[:1].upper()}{move[1:]}." if move else said
