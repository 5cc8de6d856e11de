"""Machines of tests: two network namespaces with an ssh server each, joined by a bridge in a third one.

The kernel stays where it is. Its `ssh` runs in the third namespace, so its agents are reached over the network, and by
nothing else; ranks of the two machines reach each other over the bridge, and see no process of each other. Files and
clocks are shared.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Machines", "NoMachines", "local_ssh", "two_machines"]

FRONT = "10.77.0.1"
HOSTS = {"east": "10.77.0.11", "west": "10.77.0.12"}


class NoMachines(Exception):
    """Why there can be none here."""


@dataclass
class Machines:
    """Two machines that are up.

    Attributes:
        ssh: The value of NBACCEL_SSH with which a kernel reaches them by their names, "east" and "west".
    """

    ssh: str
    spaces: dict[str, str]
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def cable(self, host: str, state: str) -> None:
        """Connect a machine ("up") or cut it off ("down")."""
        run("ip", "-n", self.spaces["front"], "link", "set", f"to-{host}", state)

    def listeners(self, host: str) -> list[tuple[str, str]]:
        """What listens on a machine, but for its ssh server: address and process."""
        said = run("ip", "netns", "exec", self.spaces[host], "ss", "-ltnpH").splitlines()
        rows = [line.split(maxsplit=5) for line in said if "sshd" not in line]
        return [(row[3], row[5] if len(row) > 5 else "") for row in rows]

    def kill_node(self, host: str) -> None:
        """End every process of a machine but its ssh server, all at once, as a machine ends."""
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def processes(self, host: str) -> dict[int, str]:
        """The processes of a machine without its ssh server, as they are seen from here, with their command lines."""
        found = {}
        for pid in map(int, run("ip", "netns", "pids", self.spaces[host]).split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if not re.search(r"\bsshd\b|^unshare", command):
                    found[pid] = command
        return found

    def process(self, host: str, own: int) -> int:
        """The number here of a process that has the number `own` on its machine."""
        for pid in self.processes(host):
            numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if numbers is not None and int(numbers[1].split()[-1]) == own:
                return pid
        raise ProcessLookupError(f"no process {own} on {host}")


def run(*words: str, timeout_s: float = 20.0) -> str:
    """Run a command and return what it says.

    Raises:
        NoMachines: It failed.
    """
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoMachines(f"{' '.join(words)}: {getattr(error, 'stderr', None) or error}") from None


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Yield two machines, and end them.

    Args:
        folder: Keys and configurations are made there.

    Raises:
        NoMachines: This system lets nobody make them, or lacks ssh.
    """
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(server) or shutil.which("ssh") is None:
        raise NoMachines("there is no ssh, or no sshd (Debian: openssh-client, openssh-server)")
    spaces = {name: f"nbaccel-{os.getpid()}-{name}" for name in ("front", *HOSTS)}
    machines = Machines("", spaces)
    made: list[str] = []
    try:
        for space in spaces.values():
            run("ip", "netns", "add", space)
            made.append(space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        front = spaces["front"]
        run("ip", "-n", front, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", front, "address", "add", f"{FRONT}/24", "dev", "bridge0")
        run("ip", "-n", front, "link", "set", "bridge0", "up")
        for host, address in HOSTS.items():
            run(
                "ip",
                "-n",
                front,
                "link",
                "add",
                f"to-{host}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                spaces[host],
            )
            run("ip", "-n", front, "link", "set", f"to-{host}", "master", "bridge0")
            run("ip", "-n", front, "link", "set", f"to-{host}", "up")
            run("ip", "-n", spaces[host], "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", spaces[host], "link", "set", "eth0", "up")
        for key in ("host", "client"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        shutil.copy(folder / "client.pub", folder / "authorized")
        os.makedirs("/run/sshd", exist_ok=True)
        for host, address in HOSTS.items():
            (folder / f"sshd-{host}").write_text(
                f"ListenAddress {address}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
                "PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nAcceptEnv OMP_NUM_THREADS\n"
            )
            own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # processes that others do not see
            command = [
                "ip",
                "netns",
                "exec",
                spaces[host],
                *own,
                server,
                "-D",
                "-e",
                "-f",
                str(folder / f"sshd-{host}"),
            ]
            machines.servers.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        entries = "".join(f"Host {host}\n  HostName {address}\n" for host, address in HOSTS.items())
        (folder / "config").write_text(
            f"{entries}Host *\n  User root\n  IdentityFile {folder}/client\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  SendEnv OMP_NUM_THREADS\n"
        )
        machines.ssh = shlex.join(["ip", "netns", "exec", front, "ssh", "-F", str(folder / "config")])
        _wait_for_servers(machines)
        yield machines
    finally:
        for each in machines.servers:
            each.kill()
            each.wait()
        for space in made:
            with contextlib.suppress(NoMachines):
                for pid in run("ip", "netns", "pids", space).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
                run("ip", "netns", "del", space)


def _wait_for_servers(machines: Machines) -> None:
    deadline = time.monotonic() + 20
    for host in HOSTS:
        while True:
            try:
                run(*shlex.split(machines.ssh), "-oConnectTimeout=2", host, "true")
                break
            except NoMachines:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def local_ssh(folder: Path) -> str:
    """Return a value of NBACCEL_SSH with which every host is this machine, reached by a pipe alone."""
    script = folder / "local_ssh"
    script.write_text('#!/bin/sh\nfor last; do :; done\nSSH_CONNECTION="1 2 127.0.0.1 3" exec sh -c "$last"\n')
    script.chmod(0o700)
    return str(script)
