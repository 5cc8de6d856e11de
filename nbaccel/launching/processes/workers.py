"""Processes of the ranks, and all that connects them to the kernel. Runs in the kernel.

A `WorkerGroup` owns everything that exists before the first rank and after the last: the control page, the folder in
which ranks meet, the rings, and for each rank a channel and two pipes for its output. It starts the ranks and reaps
them. Between these, they do runs, which `supervisor.py` watches. `files_being_written` is asked when a run fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbaccel.base.world import RUN_FOLDER, World
from nbaccel.launching.ipc.channel import Channel, MarkedPipe
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.reaper import kill_session, remove_segments, session_members
from nbaccel.launching.ipc.spec import LaunchSpec, WorkerBoot
from nbaccel.launching.ipc.telemetry import Rings
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.start import StartMethod
from nbaccel.namespace.payload import Payload

__all__ = [
    "WorkerGroup",
    "files_being_written",
]


class WorkerGroup:
    """The worker processes of one start. Its creator closes it; no process of it is left then.

    Args:
        spec: The run for which they are started.
        method: The way they are started.
        kernel_pidfd: The descriptor by which they notice the end of the kernel.
        guard: Sends lines to the reaper, see `reaper._Watch.learn`.
        folder: The empty folder in which the ranks meet; the group removes it.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        method: StartMethod,
        *,
        kernel_pidfd: int,
        guard: Callable[..., None],
        folder: str,
    ) -> None:
        self.members: list[WorkerHandle] = []
        self.pipes: list[MarkedPipe] = []
        self.page = ControlPage.create(spec.world_size)
        self.rings = Rings()
        self.guard = guard
        self.folder = folder
        self.store_path = os.path.join(self.folder, "store")
        self.nodes = spec.devices.nodes
        self._spec = spec
        self._lives = [0] * spec.world_size
        self._watching: list[int] = []
        self._method = method
        self._kernel_pidfd = kernel_pidfd
        self._nonce = os.urandom(6).hex()
        self._launch_id = os.urandom(8).hex()
        self._port = _free_port()

    @property
    def world_size(self) -> int:
        return len(self._lives)

    def start(self, kernel_fds: Collection[int]) -> None:
        """Start all ranks or none; they begin with the task of their run.

        Args:
            kernel_fds: Other descriptors that no rank may hold.

        Raises:
            CannotSend: A name cannot be sent to the ranks.
        """
        self._watching = list(kernel_fds)
        ends = [RankEnds.open(self.rings.add()) for _ in range(self.world_size)]
        for rank, (member, pipes) in enumerate(self._started(self._spec, dict(enumerate(ends)), kernel_fds)):
            assert member.rank == rank
            self.members.append(member)
            self.pipes += pipes

    def restart(self, rank: int, kernel_fds: Collection[int]) -> None:
        """Start a new process for `rank` alone, whose old one was reaped and is not watched any more.

        It begins with the task of its run, in the place of the old one in `members`, and with a ring of its own; the
        other ranks notice nothing. Its random numbers are those of no process before it: the n-th process of a rank
        starts at the seed plus n times the number of ranks, to which it adds its rank.

        Args:
            kernel_fds: As for `start`.
        """
        self.members[rank].channel.close()
        for pipe in [pipe for pipe in self.pipes if pipe.rank == rank]:
            if pipe.is_open:
                pipe.close()
            self.pipes.remove(pipe)
        self.page.renew(rank)
        self._lives[rank] += 1
        spec = self._spec
        if spec.settings.seed is not None:
            seed = spec.settings.seed + self._lives[rank] * self.world_size
            spec = replace(spec, settings=replace(spec.settings, seed=seed))
        ends = {rank: RankEnds.open(self.rings.replace(rank))}
        ((member, pipes),) = self._started(spec, ends, [*self.fds(), *kernel_fds])
        self.members[rank] = member
        self.pipes += pipes

    def _started(
        self, spec: LaunchSpec, ends: Mapping[int, RankEnds], kernel_fds: Collection[int]
    ) -> list[tuple[WorkerHandle, list[MarkedPipe]]]:
        """Return the ranks that were started, all or none of those in `ends`, with the pipes of their output."""
        try:
            boots = [self._boot(rank, spec, own) for rank, own in ends.items()]
            own_fds = [fd for own in ends.values() for fd in own.here]
            processes = self._method.start(boots, spec.task, [*own_fds, *kernel_fds])
        except BaseException:
            for own in ends.values():
                own.close()
            raise
        finally:
            for own in ends.values():
                own.close_theirs()
        self.guard(*(f"+{process.pid}" for process in processes))
        started = []
        for (rank, own), process in zip(ends.items(), processes, strict=True):
            pipes = [
                MarkedPipe(own.out_fd, rank, "stdout", self._nonce),
                MarkedPipe(own.err_fd, rank, "stderr", self._nonce),
            ]
            started.append((WorkerHandle(rank, process, own.channel, spec.end.stays), pipes))
        return started

    def _boot(self, rank: int, spec: LaunchSpec, ends: RankEnds) -> WorkerBoot:
        """Return the facts for the process of `rank`."""
        share = spec.devices.gpus_per_rank if spec.own_devices and self.world_size > 1 else 0
        world = World(rank, self.world_size, rank, self.world_size, 0, self._launch_id, own_devices=max(1, share))
        channel_fd, stdout_fd, stderr_fd, ring_fd = ends.theirs
        return WorkerBoot(
            world=world,
            environ=spec.environ_of(rank) | world.environ(self._port) | {RUN_FOLDER: self.folder},
            sees_one_card=share == 1,
            setup=spec.setup,
            threads=spec.threads,
            run_nonce=self._nonce,
            store_path=self.store_path,
            parts=spec.parts,
            watches_flags=spec.watches_flags,
            kernel_pidfd=self._kernel_pidfd,
            channel_fd=channel_fd,
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
            page_fd=self.page.fd,
            ring_fd=ring_fd,
        )

    def give(
        self, task: str, payload: Payload, excluded_ranks: Collection[int], renewal: tuple[int, int] | None = None
    ) -> None:
        """Give another task to persistent ranks that are idle.

        Args:
            task: The reference of its class.
            payload: The data from which it is unpacked.
            excluded_ranks: Ranks that do not get it.
            renewal: Ranks form their process groups anew before the task; the rank whose state counts, and a unique
                number.
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
        if leaders:
            self.guard(*(f"-{pid}" for pid in leaders))
        for member in wanted:
            remove_segments(member.segments)
            member.segments.clear()

    @property
    def has_written_files(self) -> bool:
        """Return whether ranks of a loop that prepares nothing have saved or opened a file, see `one_file`."""
        with contextlib.suppress(OSError):
            return os.path.getsize(f"{self.store_path}.files") > 0
        return False

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


@dataclass(frozen=True, slots=True)
class RankEnds:
    """Both ends of what connects one rank to the kernel.

    Args:
        channel, out_fd, err_fd: The kernel's.
        theirs: The rank's channel, stdout, stderr and ring; the kernel closes its copies once the rank has them.
    """

    channel: Channel
    out_fd: int
    err_fd: int
    theirs: tuple[int, int, int, int]

    @classmethod
    def open(cls, ring_fd: int) -> RankEnds:
        here, there = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        return cls(Channel(here), out_read, err_read, (there.detach(), out_write, err_write, ring_fd))

    @property
    def here(self) -> tuple[int, int, int]:
        """Return the kernel's descriptors."""
        return self.channel.fileno(), self.out_fd, self.err_fd

    def close(self) -> None:
        """Close the kernel's ends."""
        self.channel.close()
        os.close(self.out_fd)
        os.close(self.err_fd)

    def close_theirs(self) -> None:
        """Close the kernel's copies of the rank's ends."""
        for fd in self.theirs:
            os.close(fd)


def _free_port() -> int:
    """Return a port without a listener, for programs that read MASTER_PORT; nbaccel's own ranks meet in a file."""
    probe = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM)  # the class in C: it does less
    try:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
    finally:
        probe.close()


_NOT_FILES = ("/dev/", "/proc/", "/memfd:", "/sys/")
_DELETED = " (deleted)"
_UNFINISHED = ".tmp-"
"""Part of the folder's name of a checkpoint that was being written: it will not exist under that name."""


def files_being_written(pids: Iterable[int], own_folder: str) -> list[str]:
    """Return the paths of regular files that processes hold open for writing, and this process does not.

    Files that were written and closed before are not found, nor those that a library writes in its own process.

    A forked rank holds the files that the kernel had open: the history of IPython is not one of the rank's files.

    Args:
        own_folder: The run's private folder, which is removed with the run; files in it are left out.
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
