"""Crew: the processes of the ranks, and all that ties them to the kernel. Runs in the kernel.

It owns what has to be there before the first rank and goes after the last: the control page, the folder where ranks
meet, the rings, and per rank a channel and two pipes for what it prints. It starts the ranks and buries them; what
they do in between is a run, which `group.py` watches.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Sequence

from nbaccel.launch.guardian import kill_session, remove_segments, session_members
from nbaccel.launch.member import Member
from nbaccel.launch.spec import LaunchSpec, RankBoot
from nbaccel.launch.start import StartMethod
from nbaccel.launch.telemetry import Rings
from nbaccel.launch.wire.channel import Channel
from nbaccel.launch.wire.control import ControlPage
from nbaccel.launch.wire.parcel import Parcel
from nbaccel.launch.wire.pipes import MarkedPipe
from nbaccel.world import World

__all__ = ["Crew"]


class Crew:
    """The ranks of one start. Whoever made it closes it; no process of it is left then.

    method: how they come into being.  kernel_pidfd: by which they notice the kernel's end.
    guard: tells the guardian, see `guardian._Watch.learn`.
    """

    def __init__(
        self, world_size: int, method: StartMethod, *, kernel_pidfd: int, guard: Callable[[str], None]
    ) -> None:
        self.members: list[Member] = []
        self.pipes: list[MarkedPipe] = []
        self.page = ControlPage.create(world_size)
        self.rings = Rings()
        self.guard = guard
        self.folder = tempfile.mkdtemp(prefix="nbaccel-run-")  # mode 0700
        self.store_path = os.path.join(self.folder, "store")
        self._world_size = world_size
        self._method = method
        self._kernel_pidfd = kernel_pidfd
        guard(self.folder)

    def start(self, spec: LaunchSpec, kernel_fds: Collection[int]) -> None:
        """Start the ranks, all or none; they begin with the task of `spec`.

        kernel_fds: other descriptors that no rank may hold.

        Raises:
            CannotSend: a name cannot travel to the ranks.
        """
        nonce = secrets.token_hex(6)
        launch_id = secrets.token_hex(8)
        port = _free_port()
        boots: list[RankBoot] = []
        mine: list[tuple[Channel, int, int]] = []
        theirs: list[int] = []
        try:
            for rank in range(self._world_size):
                here, there = socket.socketpair()
                out_read, out_write = os.pipe()
                err_read, err_write = os.pipe()
                mine.append((Channel(here), out_read, err_read))
                theirs += [there.detach(), out_write, err_write, self.rings.add()]
                world = World(rank, self._world_size, rank, self._world_size, 0, launch_id)
                boots.append(
                    RankBoot(
                        world=world,
                        environ=spec.environ_of(rank) | world.environ(port),
                        sees_one_card=spec.own_devices and self._world_size > 1,
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
            self.members.append(Member(rank, process, channel, spec.stays))
            self.pipes += [MarkedPipe(out, rank, "stdout", nonce), MarkedPipe(err, rank, "stderr", nonce)]

    def give(
        self, task: str, parcel: Parcel, outsiders: Collection[int], renewal: tuple[int, int] | None = None
    ) -> None:
        """Give ranks that stay, and have nothing to do, another task.

        task: its class's reference.  parcel: from which it unpacks itself.  outsiders: ranks that do not get it.
        renewal: with which they form their groups anew before; the rank whose state counts, and a number of its own.
        """
        gone = [member.rank for member in self.members if member.has_ended]
        absent = sorted({*outsiders, *gone})
        self.page.begin(absent)
        self.page.is_cut = self.page.is_cut and renewal is None
        for member in self.members:
            member.begin(takes_part=member.rank not in absent)
        order = {"op": "task", "task": task, "outsiders": absent, "renewal": renewal}
        for member in self.members:
            if member.is_working:
                with contextlib.suppress(OSError):  # it has died meanwhile: its pidfd will tell
                    member.channel.send(order, [parcel.fd])

    def dismiss(self) -> None:
        """Ranks that stay do so no longer; the next run over this crew is their farewell."""
        for member in self.members:
            member.stays = False

    def fds(self) -> list[int]:
        """Descriptors that only the kernel may hold, while ranks live."""
        channels = [member.channel.fileno() for member in self.members if member.channel.is_open]
        return channels + [pipe.fd for pipe in self.pipes if pipe.is_open]

    def bury(self, members: Sequence[Member] | None = None) -> None:
        """End every process that is left of `members`, by default all; also those that they have started.

        What they printed can still be read. A second time changes nothing.
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
        """By rank; 0 for those that live."""
        return [member.process.exit_code or 0 for member in self.members]

    def close(self) -> None:
        """No process of the crew survives this, whatever happened before; then all else goes."""
        self.bury()
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
    """A port that nobody listens on, for programs that read MASTER_PORT; our ranks meet in a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
