"""Kernels that are forked from a process that has imported torch and has run no cell; for tests that need hundreds.

A kernel of its own takes four seconds of a core until it can train, and one of these a quarter of a second. It is the
same ipykernel, with processes, sockets and state of its own; what it shares with the others is the seed of hashes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

__all__ = ["ForkedKernels"]

_TEMPLATE = """
import gc, importlib, os, pkgutil, signal, sys
import IPython, ipykernel.kernelapp, matplotlib_inline.backend_inline, numpy, torch, torch._dynamo, tqdm
import nbaccel
for folder in ("launching", "notebook", "display", "namespace", "train", "options", "features.cell_checkpoints"):
    package = importlib.import_module(f"nbaccel.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                pass
from jupyter_client import BlockingKernelClient
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    folder, connection = line.rstrip("\\n").split("\\t")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.chdir(folder)
        sys.argv = ["ipykernel_launcher", "-f", connection]
        sys.path[0] = ""
        del sys.modules["__main__"].__dict__["folder"]
        ipykernel.kernelapp.IPKernelApp.launch_instance(argv=["-f", connection])
        os._exit(0)
    print(pid, flush=True)
"""


class ForkedKernels:
    """The process that forks kernels, in the place of an `Environment`; a context around it."""

    def __enter__(self) -> Self:
        self._template = subprocess.Popen(
            [sys.executable, "-c", _TEMPLATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._template.stdout is not None
        assert self._template.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._template.stdin.close()
        self._template.wait(timeout=20)
        self._template.stdout.close()

    def fork(self, folder: str, connection: str) -> int:
        """Start a kernel; return its process."""
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._template.stdin.write(f"{folder}\t{connection}\n")
        return int(self._template.stdout.readline())

    def kernel_manager(self) -> _Manager:
        """Return a manager of one kernel, see `Environment`."""
        return _Manager(self)

    def environ(self, **changes: str) -> dict[str, str]:
        """Return nothing: a process that is forked has its parent's variables."""
        return {}


@dataclass
class _Process:
    pid: int


class _Manager:
    """A manager as jupyter_client has one, of a kernel that is forked."""

    def __init__(self, kernels: ForkedKernels) -> None:
        self._kernels = kernels
        self._file = ""

    def start_kernel(self, env: dict[str, str], cwd: str) -> None:
        from jupyter_client.connect import write_connection_file

        self._file = str(Path(cwd) / f".connection-{uuid.uuid4().hex}.json")
        write_connection_file(self._file, key=uuid.uuid4().hex.encode())
        self.provisioner = _Process(self._kernels.fork(cwd, self._file))

    def client(self) -> Any:
        from jupyter_client import BlockingKernelClient

        is_alive = self.is_alive

        class Client(BlockingKernelClient):
            """A client that asks the process whether the kernel lives: heartbeats are late on a busy machine."""

            async def _async_is_alive(self) -> bool:
                return is_alive()

        client = Client(connection_file=self._file)
        client.load_connection_file()
        return client

    def is_alive(self) -> bool:
        try:
            stat = Path(f"/proc/{self.provisioner.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def shutdown_kernel(self, now: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.provisioner.pid, signal.SIGKILL)

    def cleanup_resources(self) -> None:
        Path(self._file).unlink(missing_ok=True)
