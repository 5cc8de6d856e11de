"""The agent of a node: starts the ranks of this machine, and passes on what they and the kernel say. Runs on the node.

It has a zygote of its own, which stays between the cells, and makes for its ranks what the kernel makes for local
ones: channels, pipes, rings, a page. It knows no policy: who is interrupted, when and why, the kernel decides. It ends
with all its ranks when its connection ends, and when nothing has come for as long as the kernel waits for a node.

It runs as `python -m nbaccel.features.cluster.agent`, by ssh, srun, or an actor of Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.world import RUN_FOLDER, World
from nbaccel.errors import LaunchRefused
from nbaccel.features.clean_start.zygote import Zygote
from nbaccel.features.cluster.frames import Frame, FrameReader, FrameWriter, pieces_of, read_some
from nbaccel.features.cluster.mirrored_lines import MirroredLines
from nbaccel.features.cluster.node_environment import be_quiet, known_address, own_environment, share_hashes
from nbaccel.features.cluster.routes import address_towards, interface_of
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.reaper import kill_session
from nbaccel.launching.ipc.spec import WorkerBoot
from nbaccel.launching.ipc.telemetry import Rings
from nbaccel.launching.ipc.user_code import question_path, stack_path
from nbaccel.launching.launcher import LauncherResources
from nbaccel.launching.processes.asked_stacks import ask_for_stack
from nbaccel.launching.processes.handle import WorkerProcess
from nbaccel.launching.processes.workers import RankEnds

__all__ = ["GREETING", "LISTS", "Agent", "main"]

GREETING = b"\x00nbaccel-agent-1\n"
"""What an agent writes first: a shell that logs in may have written something before."""

LISTS = ("files", "boards")
"""Lists of the ranks beside the place where they meet, see `launching/libraries/one_file` and
`features/other_libraries/tracked_runs`."""

_TICK_S = 0.02
_IDLE_S = 0.5


class RemoteRank:
    """One rank of this machine, and this side's ends of what connects it."""

    def __init__(self, boot: WorkerBoot, ends: RankEnds, process: WorkerProcess) -> None:
        self.rank = boot.world.rank
        self.channel: Channel = ends.channel
        self.outputs = {"stdout": ends.out_fd, "stderr": ends.err_fd}
        self.process = process
        self.stacks_read = 0
        for fd in self.outputs.values():
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Release what is left."""
        self.channel.close()
        for fd in self.outputs.values():
            os.close(fd)
        self.outputs.clear()


class NodeRun:
    """The ranks of one run on this machine, from their start to the end of the last one.

    Args:
        order: What the relay says of the run.
        payload_fd, state_fd: The packed task, and the packed state of the kernel.
        resources: The agent's.
        zygote: Starts the ranks.
        writer: Leads to the relay.
    """

    def __init__(
        self,
        order: dict[str, Any],
        payload_fd: int,
        state_fd: int,
        resources: LauncherResources,
        zygote: Zygote,
        writer: FrameWriter,
    ) -> None:
        self._writer = writer
        self._guard = resources.guard
        self.world_size = order["total"]
        self.page = ControlPage.create(self.world_size)
        self.page.spans_nodes = True
        self.folder = tempfile.mkdtemp(prefix="nbaccel-run-")  # mode 0700
        self._guard(self.folder)
        self.store_path = os.path.join(self.folder, "store")
        self.address_path = f"{self.store_path}.address"
        self.lists = {name: MirroredLines(f"{self.store_path}.{name}") for name in LISTS}
        self._has_told_address = False
        self.rings = Rings()
        self.ranks: dict[int, RemoteRank] = {}
        self._slots: dict[int, bytes] = {}
        self._reports = b""
        ends = [RankEnds.open(self.rings.add()) for _ in order["boots"]]
        try:
            boots = [
                self._boot(fields, local, order, own, resources.kernel_pidfd)
                for local, (fields, own) in enumerate(zip(order["boots"], ends, strict=True))
            ]
            self.own = [boot.world.rank for boot in boots]
            processes = zygote.fork_for(boots, order["task"], payload_fd, state_fd, order["surroundings"])
        except BaseException:
            for own in ends:
                own.close()
            self._release()
            raise
        finally:
            for own in ends:
                own.close_theirs()
        for boot, own, process in zip(boots, ends, processes, strict=True):
            self._guard(f"+{process.pid}")
            self.ranks[boot.world.rank] = RemoteRank(boot, own, process)

    def _boot(
        self, fields: dict[str, Any], local: int, order: dict[str, Any], ends: RankEnds, kernel_pidfd: int
    ) -> WorkerBoot:
        channel_fd, stdout_fd, stderr_fd, ring_fd = ends.theirs
        known = World(**fields["world"])
        world = dataclasses.replace(
            known, local_rank=local, local_world_size=len(order["boots"]), node_rank=order["node"]
        )
        environ = fields["environ"] | world.environ(order["port"]) | {RUN_FOLDER: self.folder}
        environ |= {"MASTER_ADDR": order["master"], **order["cards"]}
        interface = order["interface"]
        environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return WorkerBoot(
            **fields
            | {
                "world": world,
                "environ": environ,
                "store_path": self.store_path,
                "address": order["address"],
                "kernel_pidfd": kernel_pidfd,
                "channel_fd": channel_fd,
                "stdout_fd": stdout_fd,
                "stderr_fd": stderr_fd,
                "page_fd": self.page.fd,
                "ring_fd": ring_fd,
            }
        )

    # --- from the ranks to the kernel --------------------------------------------------------------------------

    def pass_output(self, rank: RemoteRank, stream: str) -> bool:
        """Pass on what a rank has written; return False at the end of the stream."""
        while data := read_some(rank.outputs[stream]):
            self._writer.send(Frame("out", {"rank": rank.rank, "stream": stream}, data))
        return data is not None

    def pass_messages(self, rank: RemoteRank) -> None:
        """Pass on what a rank has sent by its channel, with the memory that came with it."""
        for message, fds in rank.channel.drain():
            for number, fd in enumerate(fds):
                self._writer.send_each(_then_closed(fd, rank=rank.rank, number=number))
            self._writer.send(Frame("message", {"rank": rank.rank, "message": message, "fds": len(fds)}))

    def tick(self) -> None:
        """Pass on where the ranks are, what they report and list, their answers to questions, and where they meet."""
        for number, ring in zip(self.own, self.rings, strict=True):
            self._pass_records(number, ring)
        self.pass_slots()
        for rank in self.ranks.values():
            self._pass_stacks(rank)
        for name, lines in self.lists.items():
            if news := lines.news():
                self._writer.send(Frame("lines", {"name": name}, news))
        if not self._has_told_address and os.path.exists(self.address_path):
            self._has_told_address = True
            with open(self.address_path, encoding="ascii") as file:
                self._writer.send(Frame("meeting", {"at": file.read()}))

    def _pass_records(self, rank: int, ring: Any, is_last: bool = False) -> None:
        records = [
            (record.at, record.kind, record.step, record.value, record.text.decode(errors="surrogateescape"))
            for record in ring.read(is_last)
        ]
        if records:
            self._writer.send(Frame("records", {"rank": rank, "records": records}))

    def pass_slots(self, op: str = "slots", must: bool = False) -> None:
        """Pass on the page's places of this machine's ranks that have changed.

        Args:
            op: The kind of the frame.
            must: Send all of them in any case.
        """
        now = {rank: self.page.slot(rank) for rank in self.own}
        changed = [rank for rank in self.own if must or now[rank] != self._slots.get(rank)]
        reports = self.page.reports
        if changed or must or reports != self._reports:
            self._slots |= {rank: now[rank] for rank in changed}
            self._reports = reports
            blob = b"".join([reports, *(now[rank] for rank in changed)])
            self._writer.send(Frame(op, {"ranks": changed, "reports": len(reports)}, blob))

    def _pass_stacks(self, rank: RemoteRank) -> None:
        with contextlib.suppress(OSError), open(stack_path(self.store_path, rank.rank), "rb") as file:
            file.seek(rank.stacks_read)
            if data := file.read():
                rank.stacks_read += len(data)
                self._writer.send(Frame("stack", {"rank": rank.rank}, data))

    def end(self, rank: RemoteRank) -> None:
        """Pass on all that is left of a rank whose process is over, and its end."""
        kill_session(rank.process.pid)
        self.pass_messages(rank)
        for stream in rank.outputs:
            self.pass_output(rank, stream)
        at = self.own.index(rank.rank)
        self._pass_records(rank.rank, list(self.rings)[at], is_last=True)
        self.tick()
        code = rank.process.reap()
        self._guard(f"-{rank.process.pid}")
        self._writer.send(Frame("end", {"rank": rank.rank, "code": code}))
        del self.ranks[rank.rank]
        rank.close()

    # --- from the kernel to the ranks --------------------------------------------------------------------------

    def freeze(self, hands_over: bool) -> None:
        """Ask the ranks to wait before their next step, and say where they are."""
        self.page.freeze(hands_over)
        self.pass_slots("frozen", must=True)

    def thaw(self, save_before: int) -> None:
        """Let the ranks go on, and save before a step that none of them has reached."""
        self.page.save_before = save_before
        self.page.save_wanted = False
        self.page.resume()

    def meet(self, at: str) -> None:
        """Tell the ranks where the first one waits for them."""
        self._has_told_address = True
        with open(f"{self.address_path}.new", "w", encoding="ascii") as file:
            file.write(at)
        os.replace(f"{self.address_path}.new", self.address_path)

    def kill(self) -> None:
        """End every process of the run that is left."""
        leaders = [rank.process.pid for rank in self.ranks.values()]
        if leaders:
            kill_session(*leaders, wait_s=5.0)

    def close(self) -> None:
        """End what is left, and release everything."""
        self.kill()
        for rank in list(self.ranks.values()):
            rank.process.reap()
            self._guard(f"-{rank.process.pid}")
            rank.close()
        self.ranks.clear()
        self._release()

    def _release(self) -> None:
        self.rings.close()
        self.page.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard(f"-{self.folder}")


class Agent:
    """Answers the relay until the connection ends.

    Args:
        read_fd, write_fd: The connection.
        silence_s: Seconds without a frame after which the relay counts as gone.
    """

    def __init__(self, read_fd: int, write_fd: int, silence_s: float = 60.0) -> None:
        os.set_blocking(read_fd, False)
        self._fd = read_fd
        self._reader = FrameReader()
        self._writer = FrameWriter(write_fd)
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._resources = LauncherResources()
        self._selector = selectors.DefaultSelector()
        self._zygote: Zygote | None = None
        self._run: NodeRun | None = None
        self._memory: dict[str, int] = {}
        self._is_over = False
        self._is_held = False

    def serve(self) -> None:
        """Answer until the connection ends, or nothing comes any more; no process is left then."""
        self._writer.write(GREETING)
        self._writer.send(Frame("hello", _facts()))
        self._selector.register(self._fd, selectors.EVENT_READ, self._on_frames)
        try:
            while not self._is_over and self._writer.is_open:
                events = selectors.EVENT_WRITE if self._writer.has_waiting else 0
                self._watch_writer(events)
                self._hold(self._writer.is_full)
                for key, _ in self._selector.select(_TICK_S if self._run is not None else _IDLE_S):
                    key.data()
                if self._run is not None:
                    self._run.tick()
                self._writer.flush()
                if time.monotonic() > self._heard_at + self._silence_s:
                    return
        finally:
            self.close()

    def _watch_writer(self, events: int) -> None:
        is_watched = self._writer.fd in self._selector.get_map()
        if events and not is_watched:
            self._selector.register(self._writer.fd, events, self._writer.flush)
        elif not events and is_watched:
            self._selector.unregister(self._writer.fd)

    def _hold(self, is_full: bool) -> None:
        """Let ranks wait that write faster than the connection takes it, as a full pipe would."""
        if self._run is None or is_full == self._is_held:
            return
        self._is_held = is_full
        for rank in self._run.ranks.values():
            for stream, fd in rank.outputs.items():
                if is_full:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, rank, stream, fd))

    def close(self) -> None:
        """End every process that was started here."""
        if self._run is not None:
            self._run.close()
            self._run = None
        self._resources.close()
        for fd in self._memory.values():
            os.close(fd)
        self._memory.clear()

    def _on_frames(self) -> None:
        data = read_some(self._fd)
        if data is None:
            self._is_over = True
            return
        if data:
            self._heard_at = time.monotonic()
        for frame in self._reader.feed(data):
            take: Callable[[Frame], None] = getattr(self, f"_on_{frame.op}")
            take(frame)

    # --- the relay's frames ------------------------------------------------------------------------------------

    def _on_ping(self, frame: Frame) -> None:
        self._writer.send_first(Frame("pong", {"sent": frame.fields["sent"], "at": time.monotonic()}))

    def _on_routes(self, frame: Frame) -> None:
        """Say by which address and interface this machine reaches another one."""
        try:
            address = address_towards(frame.fields["address"])
            self._writer.send(Frame("route", {"address": address, "interface": interface_of(address)}))
        except OSError as error:
            self._writer.send(Frame("refused", {"why": f"cannot reach {frame.fields['address']} ({error.strerror})"}))

    def _on_warm(self, frame: Frame) -> None:
        """Start the zygote; it is ready some seconds later."""
        if self._zygote is not None and not self._zygote.is_usable:
            self._zygote = None
        if self._zygote is None:
            self._silence_s = frame.fields["silence_s"]
            self._zygote = self._resources.zygote()
            self._selector.register(self._zygote, selectors.EVENT_READ, self._on_ready)
        else:
            self._writer.send(Frame("ready"))

    def _on_ready(self) -> None:
        assert self._zygote is not None
        self._selector.unregister(self._zygote)
        try:
            self._zygote.get_ready()
        except LaunchRefused as error:
            self._zygote = None
            self._writer.send(Frame("refused", {"why": str(error)}))
        else:
            self._writer.send(Frame("ready"))

    def _on_piece(self, frame: Frame) -> None:
        """Take a part of the memory that comes with a later frame: a payload, or that of a message to a rank."""
        held = self._memory
        name = frame.fields["of"]
        if name not in held:
            held[name] = os.memfd_create("nbaccel-piece", os.MFD_CLOEXEC)
        written = 0
        while written < len(frame.blob):
            written += os.write(held[name], frame.blob[written:])

    def _on_start(self, frame: Frame) -> None:
        order = frame.fields
        zygote = self._zygote
        try:
            if zygote is None or not zygote.is_usable:
                raise LaunchRefused("the process that starts ranks has ended")
            if not os.path.isdir(order["surroundings"]["cwd"]):
                raise LaunchRefused(f"there is no folder {order['surroundings']['cwd']}, which the notebook is in")
            order["surroundings"] = _here(order["surroundings"])
            self._run = NodeRun(
                order, self._memory["payload"], self._memory["state"], self._resources, zygote, self._writer
            )
        except (LaunchRefused, OSError) as error:
            self._writer.send(Frame("refused", {"why": str(error)}))
        else:
            self._is_held = False
            for rank in self._run.ranks.values():
                self._selector.register(rank.process.pidfd, selectors.EVENT_READ, partial(self._on_end, rank))
                self._selector.register(rank.channel, selectors.EVENT_READ, partial(self._on_message_of, rank))
                for stream, fd in rank.outputs.items():
                    self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, rank, stream, fd))
            self._writer.send(Frame("started"))
        finally:
            for name in ("payload", "state"):
                if name in self._memory:
                    os.close(self._memory.pop(name))

    def _on_message(self, frame: Frame) -> None:
        if (rank := self._rank(frame)) is not None:
            with contextlib.suppress(OSError):  # it has died meanwhile
                rank.channel.send(frame.fields["message"])

    def _on_signal(self, frame: Frame) -> None:
        if (rank := self._rank(frame)) is not None:
            rank.process.signal(frame.fields["number"])

    def _on_kill(self, frame: Frame) -> None:
        if (rank := self._rank(frame)) is not None:
            kill_session(rank.process.pid)

    def _on_ask(self, frame: Frame) -> None:
        if self._run is not None and (rank := self._rank(frame)) is not None:
            ask_for_stack(question_path(self._run.store_path, rank.rank))

    def _on_orders(self, frame: Frame) -> None:
        if self._run is not None:
            self._run.page.orders = bytes(frame.blob)

    def _on_freeze(self, frame: Frame) -> None:
        if self._run is not None:
            self._run.freeze(frame.fields["hands_over"])

    def _on_thaw(self, frame: Frame) -> None:
        if self._run is not None:
            self._run.thaw(frame.fields["save_before"])
            self._writer.send(Frame("thawed"))

    def _on_others(self, frame: Frame) -> None:
        """Take the places of ranks on other machines."""
        if self._run is None:
            return
        ranks = frame.fields["ranks"]
        size = len(frame.blob) // len(ranks)
        for number, rank in enumerate(ranks):
            self._run.page.put_slot(rank, bytes(frame.blob[number * size : (number + 1) * size]))

    def _on_see(self, frame: Frame) -> None:
        """Say whether this machine sees a file of the notebook's."""
        self._writer.send(Frame("seen", {"does": os.path.exists(frame.fields["path"])}))

    def _on_lines(self, frame: Frame) -> None:
        """Take what ranks of other machines have listed."""
        if self._run is not None and frame.fields["name"] in self._run.lists:
            self._run.lists[frame.fields["name"]].add(bytes(frame.blob))

    def _on_meeting(self, frame: Frame) -> None:
        if self._run is not None:
            self._run.meet(frame.fields["at"])

    def _on_over(self, frame: Frame) -> None:
        """End the run: the kernel has all that it needs."""
        if self._run is not None:
            for rank in list(self._run.ranks.values()):
                self._forget(rank)
            self._run.close()
            self._run = None

    # --- the ranks ---------------------------------------------------------------------------------------------

    def _rank(self, frame: Frame) -> RemoteRank | None:
        return None if self._run is None else self._run.ranks.get(frame.fields["rank"])

    def _on_output(self, rank: RemoteRank, stream: str, fd: int) -> None:
        if self._run is not None and not self._run.pass_output(rank, stream):
            self._selector.unregister(fd)

    def _on_message_of(self, rank: RemoteRank) -> None:
        if self._run is not None:
            self._run.pass_messages(rank)
        if not rank.channel.is_open:
            self._selector.unregister(rank.channel)

    def _on_end(self, rank: RemoteRank) -> None:
        self._forget(rank)
        if self._run is not None:
            self._run.end(rank)

    def _forget(self, rank: RemoteRank) -> None:
        for each in (rank.process.pidfd, *rank.outputs.values()):
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.channel)


def _then_closed(fd: int, **fields: Any) -> Any:
    try:
        yield from pieces_of(fd, **fields)
    finally:
        os.close(fd)


def _here(surroundings: dict[str, Any]) -> dict[str, Any]:
    """Return the surroundings of ranks on this machine: its own, and what the notebook has added or changed."""
    path = [*sys.path]
    path += [entry for entry in surroundings["sys_path"] if entry not in path and os.path.isdir(entry or os.curdir)]
    environ = own_environment(without=surroundings["removed"]) | surroundings["environ"]
    return {"sys_path": path, "cwd": surroundings["cwd"], "environ": environ}


def _facts() -> dict[str, Any]:
    """Return what the kernel has to know of this machine before it sends ranks."""
    survey = Survey.take()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "address": known_address(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("nbaccel", "torch")},
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "number": gpu.number,
                "total_bytes": gpu.total_bytes,
                "used_bytes": gpu.used_bytes,
                "compute_capability": gpu.compute_capability,
            }
            for gpu in survey.gpus
        ],
        "why_no_gpu": survey.why_no_gpu,
        "cores": survey.cpu_count,
        "free_bytes": survey.ram.available_bytes,
        "at": time.monotonic(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Run the agent on standard input and output, which nothing else writes to then."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Its store warns of each peer whose address has no name.
    be_quiet()
    share_hashes()
    read_fd, write_fd = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    Agent(read_fd, write_fd).serve()


if __name__ == "__main__":
    main()
