"""Processes of the ranks, and all that connects them to the kernel. Runs in the kernel.

A `WorkerGroup` owns everything that exists before the first rank and after the last: the control page, the folder in
which ranks meet, the rings, and for each rank a channel and two pipes for its output. It starts the ranks and reaps
them. Between these, they do runs, which `supervisor.py` watches. `files_being_written` is asked when a run fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence

from nbaccel.launch.ipc.channel import Channel, MarkedPipe
from nbaccel.launch.ipc.control import ControlPage
from nbaccel.launch.ipc.payload import Payload
from nbaccel.launch.ipc.reaper import kill_session, remove_segments, session_members
from nbaccel.launch.ipc.spec import LaunchSpec, WorkerBoot
from nbaccel.launch.ipc.telemetry import Rings
from nbaccel.launch.processes.handle import WorkerHandle
from nbaccel.launch.processes.start import StartMethod
from nbaccel.world import World

__all__ = [
    "WorkerGroup",
    "files_being_written",
]


class WorkerGroup:
    """The worker processes of one start. Its creator closes it; no process of it is left then.

    method: the way they are started.  kernel_pidfd: the descriptor by which they notice the end of the kernel.
    guard: sends a line to the reaper, see `reaper._Watch.learn`.
    """

    def __init__(
        self, world_size: int, method: StartMethod, *, kernel_pidfd: int, guard: Callable[[str], None]
    ) -> None:
        self.members: list[WorkerHandle] = []
        self.pipes: list[MarkedPipe] = []
        self.page = ControlPage.create(world_size)
        self.rings = Rings()
        self.guard = guard
        self.folder = tempfile.mkdtemp(prefix="nbaccel-run-")  # mode 0700
        self.store_path = os.path.join(self.folder, "store")
        self._world_size = world_size
        self._watching: list[int] = []
        self._method = method
        self._kernel_pidfd = kernel_pidfd
        guard(self.folder)

    def start(self, spec: LaunchSpec, kernel_fds: Collection[int]) -> None:
        """Start all ranks or none; they begin with the task of `spec`.

        kernel_fds: other descriptors that no rank may hold.

        Raises:
            CannotSend: a name cannot be sent to the ranks.
        """
        self._watching = list(kernel_fds)
        nonce = secrets.token_hex(6)
        launch_id = secrets.token_hex(8)
        port = _free_port()
        boots: list[WorkerBoot] = []
        mine: list[tuple[Channel, int, int]] = []
        theirs: list[int] = []
        try:
            for rank in range(self._world_size):
                here, there = socket.socketpair()
                out_read, out_write = os.pipe()
                err_read, err_write = os.pipe()
                mine.append((Channel(here), out_read, err_read))
                theirs += [there.detach(), out_write, err_write, self.rings.add()]
                share = spec.devices.gpus_per_rank if spec.own_devices and self._world_size > 1 else 0
                world = World(rank, self._world_size, rank, self._world_size, 0, launch_id, own_devices=max(1, share))
                boots.append(
                    WorkerBoot(
                        world=world,
                        environ=spec.environ_of(rank) | world.environ(port),
                        sees_one_card=share == 1,
                        setup=spec.setup,
                        threads=spec.threads,
                        run_nonce=nonce,
                        store_path=self.store_path,
                        kernel_pidfd=self._kernel_pidfd,
                        channel_fd=theirs[-4],
                        stdout_fd=out_write,
                        stderr_fd=err_write,
                        page_fd=self.page.fd,
                        ring_fd=theirs[-1],
                    )
                )
            own_fds = [fd for channel, out, err in mine for fd in (channel.fileno(), out, err)]
            processes = self._method.start(boots, spec.task, [*own_fds, *kernel_fds])
        except BaseException:
            for channel, out, err in mine:
                channel.close()
                os.close(out)
                os.close(err)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for rank, (process, (channel, out, err)) in enumerate(zip(processes, mine, strict=True)):
            self.guard(f"+{process.pid}")
            self.members.append(WorkerHandle(rank, process, channel, spec.stays))
            self.pipes += [MarkedPipe(out, rank, "stdout", nonce), MarkedPipe(err, rank, "stderr", nonce)]

    def give(
        self, task: str, payload: Payload, excluded_ranks: Collection[int], renewal: tuple[int, int] | None = None
    ) -> None:
        """Give another task to persistent ranks that are idle.

        task: the reference of its class.  payload: the data from which it is unpacked.
        excluded_ranks: ranks that do not get it.
        renewal: ranks form their process groups anew before the task; the rank whose state counts, and a unique number.
        """
        gone = [member.rank for member in self.members if member.has_ended]
        absent = sorted({*excluded_ranks, *gone})
        self.page.begin(absent)
        self.page.is_cut = self.page.is_cut and renewal is None
        for member in self.members:
            member.begin(takes_part=member.rank not in absent)
        order = {"op": "task", "task": task, "excluded_ranks": absent, "renewal": renewal}
        for member in self.members:
            if member.is_working:
                with contextlib.suppress(OSError):  # it has died meanwhile, which its pidfd reports
                    member.channel.send(order, [payload.fd])

    def dismiss(self) -> None:
        """Make the ranks end with the next run instead of staying."""
        for member in self.members:
            member.stays = False

    def fds(self) -> list[int]:
        """Return the descriptors that only the kernel may hold while ranks live."""
        channels = [member.channel.fileno() for member in self.members if member.channel.is_open]
        return channels + [pipe.fd for pipe in self.pipes if pipe.is_open]

    def fds_during_its_run(self) -> list[int]:
        """Return `fds`, and those by which the kernel watches the first run; to be asked only until it is over."""
        return [*self.fds(), *self._watching]

    def reap(self, members: Sequence[WorkerHandle] | None = None) -> None:
        """End every process that is left of `members`, by default all, and every process that they have started.

        Their output can still be read. A second call changes nothing.
        """
        wanted = self.members if members is None else members
        alive = [member.process for member in wanted if member.process.is_alive]
        leaders = [process.pid for process in alive]
        if leaders and session_members(leaders):
            kill_session(*leaders, wait_s=5.0)
        for process in alive:
            process.reap()
            self.guard(f"-{process.pid}")
        for member in wanted:
            remove_segments(member.segments)
            member.segments.clear()

    @property
    def exit_codes(self) -> list[int]:
        """Return the exit codes by rank; 0 for those that live."""
        return [member.process.exit_code or 0 for member in self.members]

    def close(self) -> None:
        """End every process of the ranks, whatever happened before, and release everything else."""
        self.reap()
        for pipe in self.pipes:
            if pipe.is_open:
                pipe.close()
        for member in self.members:
            member.channel.close()
        self._method.close()
        self.rings.close()
        self.page.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.guard(f"-{self.folder}")


def _free_port() -> int:
    """Return a port without a listener, for programs that read MASTER_PORT; nbaccel's own ranks meet in a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_NOT_FILES = ("/dev/", "/proc/", "/memfd:", "/sys/")
_DELETED = " (deleted)"
_UNFINISHED = ".tmp-"
"""Part of the folder's name of a checkpoint that was being written: it will not exist under that name."""


def files_being_written(pids: Iterable[int], own_folder: str) -> list[str]:
    """Return the paths of regular files that processes hold open for writing, and this process does not.

    Files that were written and closed before are not found, nor those that a library writes in its own process.

    A forked rank holds the files that the kernel had open: the history of IPython is not one of the rank's files.

    own_folder: the run's private folder, which is removed with the run; files in it are left out.
    """
    private = os.path.realpath(own_folder) + os.sep
    ours = set(_written_by(os.getpid()))
    theirs = {path for pid in pids for path in _written_by(pid) if not path.startswith(private)}
    return sorted(theirs - ours)


def _written_by(pid: int) -> list[str]:
    paths = []
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it is over already
        return []
    for number in numbers:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if (
                not path.startswith("/")
                or path.startswith(_NOT_FILES)
                or path.endswith(_DELETED)
                or _UNFINISHED in path
            ):
                continue
            with open(f"/proc/{pid}/fdinfo/{number}", encoding="utf-8") as info:
                flags = dict(line.split(":", 1) for line in info if ":" in line)["flags"]
        except (OSError, KeyError):
            continue
        if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
            paths.append(path)
    return paths
