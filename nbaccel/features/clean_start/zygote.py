"""The zygote: a clean process with torch loaded that forks ranks on request. Both ends: `Zygote` runs in the kernel.

It serves kernels whose own state would break a fork, above all a CUDA context. It is exec'd, so it has none of the
kernel's sockets, threads or contexts; it forks in milliseconds, because torch is loaded already. At every launch a rank
gets the state that a fork would have inherited (`captured_state`) and the names its task reads (`namespace/payload`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import LaunchRefused
from nbaccel.features.clean_start.captured_state import KernelState, Surroundings
from nbaccel.features.clean_start.library_settings import LibrarySettings
from nbaccel.features.clean_start.patches import PatchFinder
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import SAVE_GRACE_S
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import watch_of_flags
from nbaccel.launching.ipc.reaper import kill_session, session_members
from nbaccel.launching.ipc.spec import Task, WorkerBoot, load_named
from nbaccel.launching.processes.attached_debugger import undebugged
from nbaccel.launching.processes.handle import WorkerProcess
from nbaccel.launching.rank.main import Rank, run_rank
from nbaccel.namespace.inventory import no_collections
from nbaccel.namespace.payload import Payload, pack, packages_in, unpack

__all__ = [
    "ForkingProcess",
    "Zygote",
    "state_of_the_kernel",
    "torch_fingerprint",
]

_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "cloudpickle", "psutil")
_START_TIMEOUT_S = 120.0
_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from " + __name__ + " import main; main({fd}, {pidfd}, {shell})"


def torch_fingerprint() -> tuple[str, float]:
    """Return which torch would be imported now: its place and the time its version file was written."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ("", 0.0)
    version = os.path.join(os.path.dirname(spec.origin), "version.py")
    try:
        return (spec.origin, os.stat(version).st_mtime)
    except OSError:
        return (spec.origin, 0.0)


class ForkingProcess:
    """The kernel's end of a process that starts ranks on request.

    Starting it returns at once; the first `fork_for` waits until it is ready.

    Args:
        code: What it runs; `{path}` is the kernel's path, `{fd}` the channel, `{pidfd}` the kernel's.
        kernel_pidfd: The descriptor by which it notices the end of the kernel.
        ready_s: Seconds that it may take to answer.
    """

    def __init__(self, code: str, kernel_pidfd: int, ready_s: float = _START_TIMEOUT_S) -> None:
        mine, theirs = Channel.pair()
        self._channel = mine
        self._is_ready = False
        self._is_broken = False
        self._ready_s = ready_s
        self._exits: dict[int, int] = {}
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python itself uses no others
        with undebugged():
            self._process = subprocess.Popen(
                [sys.executable, "-c", code.format(path=path, fd=theirs.fileno(), pidfd=kernel_pidfd)],
                pass_fds=[theirs.fileno(), kernel_pidfd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def is_usable(self) -> bool:
        """Return whether the process lives, and has answered every request."""
        return not self._is_broken and self._process.poll() is None

    def fork_for(
        self,
        boots: Sequence[WorkerBoot],
        reference: str,
        payload_fd: int,
        state_fd: int,
        surroundings: Mapping[str, Any],
    ) -> list[WorkerProcess]:
        """Start one rank per boot, for a kernel whose state was captured before, perhaps on another machine.

        Args:
            boots: The boot records.
            reference: The class of the task, see `Task`.
            payload_fd, state_fd: The packed task, and the packed state of the kernel.
            surroundings: A `Surroundings`, as plain data.

        Raises:
            LaunchRefused: The process died, or says why it starts none.
        """
        try:
            for boot in boots:
                self._channel.send(
                    {"op": "fork", "boot": _boot_as_json(boot), "task": reference, "surroundings": surroundings},
                    [*(getattr(boot, name) for name in WorkerBoot.FDS), payload_fd, state_fd],
                )
            return self._forked(len(boots))
        except BaseException:
            self._is_broken = True  # the next request would read late answers to this one
            raise

    def _forked(self, count: int) -> list[WorkerProcess]:
        """Return the ranks as the process reports them; all or none."""
        processes: list[WorkerProcess] = []
        try:
            for _ in range(count):
                message, fds = self._receive("forked")
                pid = int(message["pid"])
                processes.append(WorkerProcess(pid, fds[0], lambda pid=pid: self._exit_code(pid)))  # type: ignore[misc]
        except BaseException:
            for process in processes:
                process.signal(signal.SIGKILL)
                os.close(process.pidfd)
            raise
        return processes

    def close(self) -> None:
        """End the process and every rank it still has."""
        self._channel.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            kill_session(self._process.pid)
            self._process.wait()

    def get_ready(self) -> None:
        """Wait until it can start ranks. An interrupt ends only this wait: the process goes on loading.

        Raises:
            LaunchRefused: It could not start, or died.
        """
        if not self._is_ready:
            select.select([self._channel], [], [], self._ready_s)  # an interrupt here loses no part of a frame
            self._receive("ready")
            self._is_ready = True

    def _receive(self, op: str) -> tuple[dict[str, Any], list[int]]:
        """Return the next frame of kind `op`; exits that arrive meanwhile are stored for later requests."""
        while True:
            try:
                frame = self._channel.receive(self._ready_s)
            except TimeoutError as error:
                raise LaunchRefused(f"the process that starts ranks does not answer: {error}") from None
            if frame is None:
                raise LaunchRefused(self._why_it_ended(self._process.wait()))
            message, fds = frame
            self._take(message)
            if message["op"] == "refused":
                raise LaunchRefused(message["why"])
            if message["op"] == op:
                return message, fds

    def _take(self, message: dict[str, Any]) -> None:
        """Note what the process says without being asked: the end of a rank, or that it can start no more."""
        if message["op"] == "exit":
            self._exits[message["pid"]] = message["code"]
        elif message["op"] == "broken":
            self._is_broken = True

    def _why_it_ended(self, code: int) -> str:
        return (
            f"the process that starts ranks ended with exit code {code}; its messages are in the log of the "
            "Jupyter server. Can `python -c 'import torch'` run here?"
        )

    def _exit_code(self, pid: int) -> int:
        while pid not in self._exits:
            try:
                frame = self._channel.receive()
            except OSError:
                frame = None
            if frame is None:
                return -signal.SIGKILL  # the process is gone, and its ranks with it
            self._take(frame[0])
        return self._exits.pop(pid)


class Zygote(ForkingProcess):
    """The kernel's end of the zygote of this machine, which is ready once torch is loaded (1-2 s)."""

    def __init__(self, kernel_pidfd: int, has_shell: bool) -> None:
        self.fingerprint = torch_fingerprint()
        self._patches = PatchFinder()
        super().__init__(_BOOTSTRAP.replace("{shell}", str(has_shell)), kernel_pidfd)

    @property
    def is_usable(self) -> bool:
        """Return whether the zygote lives, has answered every request, and has the torch that is installed now."""
        return super().is_usable and self.fingerprint == torch_fingerprint()

    def fork(self, boots: Sequence[WorkerBoot], reference: str, payload: Payload) -> list[WorkerProcess]:
        """Fork one rank per boot from the zygote.

        Raises:
            LaunchRefused: The zygote could not start, or died.
        """
        self.get_ready()
        state = state_of_the_kernel(self._patches)
        try:
            surroundings = dataclasses.asdict(Surroundings.capture())
            return self.fork_for(boots, reference, payload.fd, state.fd, surroundings)
        finally:
            os.close(state.fd)


def state_of_the_kernel(patches: PatchFinder) -> Payload:
    """Return what ranks that are no copies of this kernel get of it, packed; the caller closes it.

    Args:
        patches: Finds what the notebook has changed in libraries.
    """
    found = {"state": KernelState.capture(), "patches": patches.find(), "settings": LibrarySettings.capture()}
    return pack(found)


def _boot_as_json(boot: WorkerBoot) -> dict[str, Any]:
    fields = {field.name: getattr(boot, field.name) for field in dataclasses.fields(boot)}
    return fields | {"world": dataclasses.asdict(boot.world), "environ": dict(boot.environ)}


def main(channel_fd: int, kernel_pidfd: int, has_shell: bool) -> None:
    """Run the zygote: load torch, fork ranks, report their ends, die with the kernel."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.from_fd(channel_fd)
    with no_collections():  # they would take a fifth of the time; the one below finds it all
        for module in _PRELOAD:
            importlib.import_module(module)
    if has_shell:
        with contextlib.suppress(ImportError):
            _new_shell()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):  # the kernel has closed the channel
        channel.send({"op": "ready"})
        ranks = _serve(channel, kernel_pidfd)
        _wait_for_last_checkpoints(ranks, kernel_pidfd)
    # Ranks watch the kernel themselves; this ends them also if the kernel lives and only closed the channel.
    me = os.getpid()
    kill_session(me, spare=me)
    os._exit(0)


def _wait_for_last_checkpoints(ranks: Collection[int], kernel_pidfd: int) -> None:
    """Give ranks time to save, if the kernel has died; those that save nothing end at once by themselves.

    Args:
        ranks: A pidfd for each.
    """
    kernel = select.poll()
    kernel.register(kernel_pidfd, select.POLLIN)
    if not ranks or not kernel.poll(1000):  # the kernel closes its sockets before its pidfd reports its end
        return
    deadline = time.monotonic() + SAVE_GRACE_S
    for pidfd in ranks:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _serve(channel: Channel, kernel_pidfd: int) -> Collection[int]:
    """Fork ranks and report their ends until the kernel is gone; return pidfds of those that are left."""
    pids: dict[int, int] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(kernel_pidfd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == kernel_pidfd:
                return pids
            if fd != channel.fileno():
                pid = pids.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                if session_members([pid]):
                    kill_session(pid)  # before its number can be reused
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel.send({"op": "exit", "pid": pid, "code": code})
                continue
            for message, fds in channel.drain():
                pidfd = _fork(channel, message, fds, list(pids))
                pids[pidfd[1]] = pidfd[0]
                poll.register(pidfd[1], select.POLLIN)
                channel.send({"op": "forked", "pid": pidfd[0]}, [pidfd[1]])
            if not channel.is_open:
                return pids


def _fork(channel: Channel, message: dict[str, Any], fds: list[int], zygote_fds: list[int]) -> tuple[int, int]:
    """Fork one rank; return its pid and a pidfd for it. The descriptors that came with the request are closed here."""
    _load_once(message)
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()  # with the descriptors of requests that are still waiting in it
            _be_rank(message, fds, zygote_fds)
        finally:
            os._exit(70)
    for fd in fds:
        os.close(fd)
    return pid, os.pidfd_open(pid)


def _new_shell() -> None:
    """Give a process of the zygote an IPython shell, as a fork would have inherited one. Called in the zygote."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class RankShell(InteractiveShell):
        """A kernel's shell for a process without a kernel."""

        def enable_gui(self, gui: str | None = None) -> None:
            """Do nothing: there is no event loop to join; `%matplotlib inline` calls this all the same."""

    if InteractiveShell.initialized():
        return
    config = Config()
    config.HistoryManager.enabled = False  # sqlite and its thread do not survive a fork
    RankShell.instance(config=config)


def _load_once(message: dict[str, Any]) -> None:
    """Do once what every rank of such a request needs. An error here is left for the rank, which meets it again."""
    with contextlib.suppress(OSError):
        Surroundings(**message["surroundings"]).apply()
    boot = message["boot"]
    for reference in (message["task"], boot["setup"]):
        if reference is not None:
            with contextlib.suppress(Exception):
                load_named(reference)
    if boot["setup"] is not None:
        setup = sys.modules.get(boot["setup"].partition(":")[0])
        if (load_for_ranks := getattr(setup, "load_for_ranks", None)) is not None:
            load_for_ranks(RunSettings.from_env(boot["environ"]), boot["world"]["world_size"])
    if boot["watches_flags"]:
        watch_of_flags()


def _be_rank(message: dict[str, Any], fds: list[int], zygote_fds: list[int]) -> NoReturn:
    *boot_fds, task_fd, state_fd = fds
    os.chdir(message["surroundings"]["cwd"])  # an error if it is gone; all else is the zygote's
    kernel = unpack(state_fd)
    kernel["state"].apply(when_loaded)
    fields = message["boot"] | dict(zip(WorkerBoot.FDS, boot_fds, strict=True))
    boot = WorkerBoot(**fields | {"world": World(**fields["world"])})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def make_task() -> Task:
        kernel["patches"].make(packages_in(task_fd))
        kernel["settings"].apply(when_loaded)
        task: Task = load_named(message["task"]).unpack(task_fd)
        return task

    run_rank(Rank(boot), make_task, zygote_fds, is_fork=False)
