"""The relay between the kernel and the agents. A process of its own beside the kernel, one for all nodes.

It speaks the zygote's language with the kernel: a rank is asked for by `fork`, and is there once all nodes have begun.
What the kernel gives to a rank, its ends, the relay keeps: it writes into the pipes what the rank has written, into the
channel what it has sent, into the ring its records, and into the control page its place. A stand-in of each rank is
signalled and ended in its place. The kernel may hold its interpreter's lock for minutes, so this is no thread of it.

A stop, and a save, at one step need every rank's place at one moment: `Handshake`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nbaccel.errors import LaunchRefused
from nbaccel.features.cluster import stand_in
from nbaccel.features.cluster.agent import GREETING, LISTS
from nbaccel.features.cluster.frames import Frame, FrameReader, FrameWriter, pieces_of, read_some
from nbaccel.features.cluster.node_environment import be_quiet
from nbaccel.features.cluster.node_streams import CONNECTED, NodeStream, NodeTransport, PipeNodes, advice
from nbaccel.features.cluster.ray_nodes import RayNodes
from nbaccel.features.cluster.routes import is_loopback
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.user_code import question_path, stack_path

__all__ = ["Relay", "main"]

_TICK_S = 0.02
_IDLE_S = 0.5
_PING_S = 1.0
_SILENT_S = 5.0
_CONNECT_S = 10.0
_HELLO_S = 60.0  # a node may load Python over a network
_OTHERS_S = 0.1  # how old another machine's knowledge of a rank may be: it only explains waits


class NodeConnection:
    """The connection to one node, as the relay sees it.

    Attributes:
        facts: What its agent has said of the machine.
        ahead_s: Seconds by which this machine's clock is ahead of the node's, by the quickest answer so far.
        lost: Why it is given up; empty while it is not.
    """

    def __init__(self, number: int, stream: NodeStream, now: float) -> None:
        self.number = number
        self.name = stream.name
        self.stream = stream
        self.writer = FrameWriter(stream.write_fd)
        self._reader: FrameReader | None = None
        self._noise = b""
        self.is_connected = False
        self.facts: dict[str, Any] | None = None
        self.route: dict[str, Any] = {}
        self.is_ready = False
        self.has_begun = False
        self.heard_at = now
        self.pinged_at = 0.0
        self.is_silent = False
        self.ahead_s = 0.0
        self._quickest_s = float("inf")
        self.lost = ""

    def read(self, now: float) -> list[Frame] | None:
        """Return the frames that have come; None at the end of the connection."""
        data = read_some(self.stream.read_fd)
        if data is None:
            return None
        if not data:
            return []
        self.heard_at = now
        if self._reader is None:
            self._noise += data
            self.is_connected = self.is_connected or CONNECTED in self._noise
            _, greeting, data = self._noise.partition(GREETING)
            if not greeting:
                return []
            self.is_connected = True
            self._reader = FrameReader()
        return list(self._reader.feed(data))

    @property
    def noise(self) -> str:
        """Return what came before the agent's greeting, or instead of it."""
        lines = self._noise.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if self._reader is None and lines else ""

    def learn_clock(self, sent: float, at: float, now: float) -> None:
        """Learn the difference of the clocks from an answer.

        Args:
            sent, now: When it was asked for, and when it came, by this machine's clock.
            at: When it was given, by the node's.
        """
        if now - sent <= self._quickest_s:
            self._quickest_s = now - sent
            self.ahead_s = (sent + now) / 2 - at


class Member:
    """The ends of one rank, which the relay holds in its place.

    Args:
        boot: The boot record that the kernel has sent for it.
        fds: The rank's descriptors, in the order of `WorkerBoot.FDS`.
    """

    def __init__(self, boot: dict[str, Any], node: NodeConnection, fds: Sequence[int]) -> None:
        kernel_pidfd, channel_fd, stdout_fd, stderr_fd, page_fd, ring_fd = fds
        os.close(kernel_pidfd)
        os.close(page_fd)
        self.rank = int(boot["world"]["rank"])
        self.node = node
        self.channel = Channel.from_fd(channel_fd)
        self.outputs = {"stdout": FrameWriter(stdout_fd), "stderr": FrameWriter(stderr_fd)}
        self._ring_fd = ring_fd
        self.ring = RingWriter(ring_fd)
        self.memory: dict[int, int] = {}
        self.code: int | None = None  # how the rank has ended
        self.is_through = False  # the kernel knows
        here, there = socket.socketpair()
        self.line = here
        signal.pthread_sigmask(signal.SIG_BLOCK, stand_in.PASSED_ON)  # until the stand-in can pass them on
        try:
            with there:
                self.stand_in = subprocess.Popen(
                    [sys.executable, "-S", "-E", stand_in.__file__, str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stand_in.PASSED_ON)
        here.setblocking(False)

    def send(self, message: dict[str, Any], count: int = 0) -> None:
        """Send a message to the kernel as the rank would, with the memory that has come for it."""
        fds = [self.memory.pop(number) for number in range(count)]
        try:
            with contextlib.suppress(OSError):  # the kernel needs it no more
                self.channel.send(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Release everything; the stand-in ends if it has not yet."""
        for writer in self.outputs.values():
            writer.close()
        self.channel.close()
        self.ring.close()
        os.close(self._ring_fd)
        for fd in self.memory.values():
            os.close(fd)
        self.memory.clear()
        self.line.close()
        self.stand_in.wait()


@dataclass(slots=True)
class Handshake:
    """Asks all nodes at once where their ranks are. They wait before their next step until it is answered.

    Args:
        waiting: The nodes that have not said it.
        done: Called when all have.
    """

    waiting: set[int]
    done: Callable[[], None]


@dataclass(slots=True)
class Request:
    """The ranks that the kernel asks for, until all boot records have come."""

    task: str
    surroundings: dict[str, Any]
    payload_fd: int
    state_fd: int
    boots: list[dict[str, Any]] = field(default_factory=list)
    fds: list[Sequence[int]] = field(default_factory=list)


class RelayedRun:
    """One run: its members, and the page that the kernel has of it."""

    def __init__(
        self, members: Sequence[Member], page: ControlPage, store_path: str, nodes: Sequence[NodeConnection]
    ) -> None:
        self.members = {member.rank: member for member in members}
        self.page = page
        self.store_path = store_path
        self.nodes = nodes
        self.orders = page.orders
        self.handshake: Handshake | None = None
        self.thawing: set[int] = set()
        self.told: dict[int, dict[int, bytes]] = {node.number: {} for node in nodes}
        self.told_at = 0.0
        self.questions: dict[int, int] = {}
        for rank in self.members:
            path = question_path(store_path, rank)
            os.mkfifo(path, 0o600)
            self.questions[rank] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def living(self) -> list[NodeConnection]:
        """Return the nodes that have ranks which have not ended."""
        return [node for node in self.nodes if not node.lost and any(self.of(node))]

    def of(self, node: NodeConnection) -> list[Member]:
        """Return the ranks of a node that have not ended."""
        return [each for each in self.members.values() if each.node is node and each.code is None]

    def close(self) -> None:
        """Release everything."""
        for member in self.members.values():
            member.close()
        for fd in self.questions.values():
            os.close(fd)
        self.page.close()


class Relay:
    """Serves one kernel until it is gone.

    Args:
        channel: The kernel's.
        kernel_pidfd: Becomes readable when the kernel is dead.
        transport: Leads to the nodes.
        silence_s: Seconds after which a node that does not answer is given up.
    """

    def __init__(self, channel: Channel, kernel_pidfd: int, transport: NodeTransport, silence_s: float) -> None:
        self._kernel = channel
        self._kernel_pidfd = kernel_pidfd
        self._transport = transport
        self._silence_s = silence_s
        self._selector = selectors.DefaultSelector()
        self._nodes: list[NodeConnection] = []
        self._request: Request | None = None
        self._placement: dict[str, Any] = {}
        self._run: RelayedRun | None = None
        self._is_over = False
        self._is_warm = False
        self._blind: list[str] = []
        self._asked = 0
        self._told_at = 0.0

    def serve(self) -> None:
        """Connect, and serve the kernel until it closes its channel, or a node was lost; nothing is left then."""
        began = time.monotonic()
        self._selector.register(self._kernel, selectors.EVENT_READ, self._on_kernel)
        self._selector.register(self._kernel_pidfd, selectors.EVENT_READ, self._end)
        try:
            try:
                streams = self._transport.connect()
            except LaunchRefused as error:
                self._refuse(str(error))
                return
            except OSError as error:
                self._refuse(f"{error.filename or 'the nodes'}: {error.strerror}")
                return
            self._nodes = [NodeConnection(number, stream, began) for number, stream in enumerate(streams)]
            for node in self._nodes:
                self._selector.register(node.stream.read_fd, selectors.EVENT_READ, partial(self._on_node, node))
            while not self._is_over:
                self._flush()
                for key, _ in self._selector.select(_IDLE_S if self._run is None and self._is_warm else _TICK_S):
                    key.data()
                self._tick(time.monotonic(), began)
        finally:
            self._close()

    def _end(self) -> None:
        self._is_over = True

    def _close(self) -> None:
        for node in self._nodes:  # all of them first: an agent may take a second to end
            node.stream.hang_up()
        if self._run is not None:
            self._run.close()
        for node in self._nodes:
            node.stream.close()

    def _refuse(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._kernel.send({"op": "refused", "why": why})
        self._is_over = True

    def _flush(self) -> None:
        """Write what waits, and have the selector say when a node can take more."""
        for node in self._nodes:
            if node.lost:
                continue
            node.writer.flush()
            is_watched = node.writer.fd in self._selector.get_map()
            if node.writer.has_waiting and not is_watched:
                self._selector.register(node.writer.fd, selectors.EVENT_WRITE, node.writer.flush)
            elif not node.writer.has_waiting and is_watched:
                self._selector.unregister(node.writer.fd)
        if self._run is not None:
            for member in self._run.members.values():
                for writer in member.outputs.values():
                    writer.flush()

    def _tick(self, now: float, began: float) -> None:
        for node in self._nodes:
            self._watch(node, now)
        if not self._is_warm:
            for limit_s, mute in (
                (_CONNECT_S, [node.name for node in self._nodes if not node.is_connected]),
                (_HELLO_S, [node.name for node in self._nodes if node.facts is None]),
            ):
                if mute and now > began + limit_s:
                    self._refuse(f"no answer from {', '.join(mute)} within {limit_s:.0f} s")
            return
        if self._run is not None and all(node.has_begun for node in self._nodes):
            self._tick_run(self._run, now)
        elif self._run is not None and now > self._told_at + _PING_S:
            self._told_at = now
            with contextlib.suppress(OSError):
                self._kernel.send({"op": "sending"})  # which may take minutes: the kernel goes on waiting

    def _watch(self, node: NodeConnection, now: float) -> None:
        """Ask a node whether it is there, and give it up when it has not answered for too long."""
        if node.lost or node.facts is None:
            return
        if now > node.pinged_at + _PING_S:
            node.pinged_at = now
            node.writer.send_first(Frame("ping", {"sent": now}))
        silent_s = now - node.heard_at
        if silent_s > self._silence_s:
            self._lose(node, f"has not answered for {silent_s:.0f} s")
        elif silent_s > _SILENT_S and not node.is_silent:
            node.is_silent = True
            self._say(
                f"node {node.name} has not answered for {silent_s:.0f} s; it is given up after "
                f"{self._silence_s:g} s (--node-timeout)"
            )
        elif silent_s < _SILENT_S and node.is_silent:
            node.is_silent = False
            self._say(f"node {node.name} answers again")

    def _say(self, text: str) -> None:
        if self._run is not None:
            member = next(iter(self._run.members.values()))
            member.send({"op": "say", "text": text})

    def _lose(self, node: NodeConnection, why: str) -> None:
        """Give a node up: its ranks have ended."""
        node.lost = why
        with contextlib.suppress(OSError):
            self._kernel.send({"op": "broken"})  # before the ends of the ranks: the next launch connects anew
        self._selector.unregister(node.stream.read_fd)
        if node.writer.fd in self._selector.get_map():
            self._selector.unregister(node.writer.fd)
        run = self._run
        if run is None or not all(each.has_begun for each in self._nodes):  # the kernel waits until all are there
            self._refuse(f"node {node.name} {why}")
            return
        for member in run.of(node):
            member.send({"op": "lost", "node": node.name, "why": why})
            member.code = -signal.SIGKILL
        run.thawing.discard(node.number)
        self._has_frozen(run, node)

    # --- the run -----------------------------------------------------------------------------------------------

    def _tick_run(self, run: RelayedRun, now: float) -> None:
        page = run.page
        if run.handshake is None and not run.thawing:
            if page.stop_requested and page.stop_after is None and not page.is_settled:
                self._shake(run, page.hands_over, partial(setattr, page, "is_settled", True))
            elif page.save_wanted and not page.stop_requested:
                self._shake(run, False, partial(self._thaw, run))
        if run.handshake is None and (orders := page.orders) != run.orders and not self._has_to_ask(page):
            run.orders = orders
            for node in run.living:
                node.writer.send(Frame("orders", {}, orders))
        if now > run.told_at + _OTHERS_S:
            run.told_at = now
            self._tell_others(run)
        for rank, fd in run.questions.items():
            if read_some(fd) and run.members[rank].code is None:
                run.members[rank].node.writer.send(Frame("ask", {"rank": rank}))
        for member in run.members.values():
            if member.code is not None and not member.is_through:
                self._finish(run, member)
        if all(member.is_through for member in run.members.values()):
            self._run = None
            run.close()
            for node in self._nodes:
                if not node.lost:
                    node.has_begun = False
                    node.writer.send(Frame("over"))
            self._is_over = self._is_over or any(node.lost for node in self._nodes)

    @staticmethod
    def _has_to_ask(page: ControlPage) -> bool:
        """Return whether the kernel asks the ranks to stop, and has not answered: a handshake asks the nodes."""
        return page.stop_requested and page.stop_after is None

    def _shake(self, run: RelayedRun, hands_over: bool, done: Callable[[], None]) -> None:
        run.handshake = Handshake({node.number for node in run.living}, done)
        for node in run.living:
            node.writer.send(Frame("freeze", {"hands_over": hands_over}))
        if not run.handshake.waiting:
            run.handshake = None
            done()

    def _has_frozen(self, run: RelayedRun, node: NodeConnection) -> None:
        if run.handshake is not None:
            run.handshake.waiting.discard(node.number)
            if not run.handshake.waiting:
                done, run.handshake = run.handshake.done, None
                done()

    def _thaw(self, run: RelayedRun) -> None:
        step = run.page.next_step
        run.page.save_before, run.page.save_wanted = step, False
        run.orders = run.page.orders
        for node in run.living:
            run.thawing.add(node.number)
            node.writer.send(Frame("thaw", {"save_before": step}))

    def _tell_others(self, run: RelayedRun) -> None:
        """Tell each node where the ranks of the other nodes are."""
        now = {rank: run.page.slot(rank) for rank in run.members}
        for node in run.living:
            told = run.told[node.number]
            news = [
                rank for rank, member in run.members.items() if member.node is not node and now[rank] != told.get(rank)
            ]
            if news:
                told.update({rank: now[rank] for rank in news})
                node.writer.send(Frame("others", {"ranks": news}, b"".join(now[rank] for rank in news)))

    def _finish(self, run: RelayedRun, member: Member) -> None:
        """Let the kernel know that a rank has ended, once it has all that the rank has written."""
        code = member.code
        if code is None or any(writer.has_waiting and writer.is_open for writer in member.outputs.values()):
            return
        if member.stand_in.poll() is None:
            for writer in member.outputs.values():
                writer.close()
            with contextlib.suppress(OSError):
                member.line.sendall(b"%d\n" % code)
                member.line.shutdown(socket.SHUT_WR)
        ended = member.stand_in.wait()
        member.is_through = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.channel)
        with contextlib.suppress(OSError):
            self._kernel.send({"op": "exit", "pid": member.stand_in.pid, "code": ended})

    # --- the kernel's messages ---------------------------------------------------------------------------------

    def _on_kernel(self) -> None:
        for message, fds in self._kernel.drain():
            if message["op"] == "place":
                self._placement = message
            elif message["op"] == "see":
                self._blind = []
                self._asked = len(self._nodes)
                for node in self._nodes:
                    node.writer.send(Frame("see", {"path": message["path"]}))
            elif message["op"] == "fork":
                self._take_boot(message, fds)
        if not self._kernel.is_open:
            self._is_over = True

    def _take_boot(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        *boot_fds, payload_fd, state_fd = fds
        if self._request is None:
            self._request = Request(message["task"], message["surroundings"], payload_fd, state_fd)
        else:
            os.close(payload_fd)
            os.close(state_fd)
        request = self._request
        request.boots.append(message["boot"])
        request.fds.append(boot_fds)
        if len(request.boots) == message["boot"]["world"]["world_size"]:
            self._request = None
            self._begin(request)

    def _begin(self, request: Request) -> None:
        """Give all nodes their ranks."""
        owners = [
            node for node, count in zip(self._nodes, self._placement["counts"], strict=True) for _ in range(count)
        ]
        page = ControlPage(os.dup(request.fds[0][4]), len(owners))
        page.spans_nodes = True
        members = [Member(boot, node, fds) for boot, node, fds in zip(request.boots, owners, request.fds, strict=True)]
        self._run = RelayedRun(members, page, request.boots[0]["store_path"], self._nodes)
        self._run.orders = page.orders
        for member in members:
            self._selector.register(member.line, selectors.EVENT_READ, partial(self._on_stand_in, member))
            self._selector.register(member.channel, selectors.EVENT_READ, partial(self._on_channel, member))
        for node in self._nodes:
            boots = [boot for boot, owner in zip(request.boots, owners, strict=True) if owner is node]
            if not boots:
                node.has_begun = True
                continue
            for name, fd in (("payload", request.payload_fd), ("state", request.state_fd)):
                node.writer.send_each(pieces_of(fd, of=name))
            node.writer.send(
                Frame(
                    "start",
                    {
                        "boots": boots,
                        "task": request.task,
                        "surroundings": request.surroundings,
                        "total": len(owners),
                        "node": node.number,
                        "address": node.route["address"],
                        "interface": node.route["interface"],
                        "master": self._nodes[0].route["address"],
                        "port": self._placement["port"],
                        "cards": self._placement["cards"][node.number],
                    },
                )
            )
        self._held = (request.payload_fd, request.state_fd)

    def _begun(self) -> None:
        """Tell the kernel that all ranks are there."""
        run = self._run
        assert run is not None
        for fd in self._held:
            os.close(fd)
        for rank in sorted(run.members):
            pid = run.members[rank].stand_in.pid
            pidfd = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                self._kernel.send({"op": "forked", "pid": pid}, [pidfd])
            os.close(pidfd)

    # --- the stand-ins and the ends of ranks -------------------------------------------------------------------

    def _on_stand_in(self, member: Member) -> None:
        """Pass on a signal; or end the rank, because its stand-in was ended."""
        try:
            data = member.line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(member.line)
            if member.code is None:
                member.node.writer.send(Frame("kill", {"rank": member.rank}))
            return
        for number in data:
            if number and member.code is None:
                member.node.writer.send(Frame("signal", {"rank": member.rank, "number": number}))

    def _on_channel(self, member: Member) -> None:
        """Pass on what the kernel says to a rank."""
        for message, fds in member.channel.drain():
            for fd in fds:
                os.close(fd)
            if member.code is None:
                member.node.writer.send(Frame("message", {"rank": member.rank, "message": message}))
        if not member.channel.is_open:
            self._selector.unregister(member.channel)

    # --- the agents' frames ------------------------------------------------------------------------------------

    def _hold(self, node: NodeConnection) -> bool:
        """Return whether a node has to wait, because the kernel does not read what its ranks have written."""
        run = self._run
        return run is not None and any(each.is_full for rank in run.of(node) for each in rank.outputs.values())

    def _on_node(self, node: NodeConnection) -> None:
        if self._hold(node):
            node.heard_at = time.monotonic()
            time.sleep(_TICK_S)
            return
        frames = node.read(time.monotonic())
        if frames is None:
            why = node.stream.why() or node.noise
            if self._is_warm:
                self._lose(node, f"is gone: its connection has ended{f' ({why})' if why else ''}")
            else:
                self._refuse(f"node {node.name}: {advice(why or node.noise, node.name)}")
            return
        for frame in frames:
            take: Callable[[NodeConnection, Frame], None] = getattr(self, f"_take_{frame.op}")
            take(node, frame)

    def _take_hello(self, node: NodeConnection, frame: Frame) -> None:
        node.facts = frame.fields
        if all(each.facts is not None for each in self._nodes):
            self._kernel.send(
                {"op": "nodes", "facts": [{"name": each.name, **(each.facts or {})} for each in self._nodes]}
            )
            for each in self._nodes:
                each.writer.send(Frame("warm", {"silence_s": self._silence_s}))
            self._ask_for_meeting_place()

    def _ask_for_meeting_place(self) -> None:
        """Ask the first node, where all ranks meet, for its address on the way to the second one."""
        try:
            known = [address_of(node) for node in self._nodes]
        except OSError as error:
            self._refuse(
                f"the address of a node is not known ({error.strerror}): name it as this machine can resolve it."
            )
            return
        alone = [node.name for node, address in zip(self._nodes, known, strict=True) if is_loopback(address)]
        if alone and len(alone) < len(known) and alone != [self._nodes[0].name]:
            self._refuse(
                f"{', '.join(alone)} is an address of this machine alone (loopback): name it, in --nodes and in "
                "/etc/hosts, by an address that the other nodes can reach."
            )
        else:
            self._nodes[0].writer.send(Frame("routes", {"address": known[min(1, len(known) - 1)]}))

    def _take_route(self, node: NodeConnection, frame: Frame) -> None:
        node.route = frame.fields
        if node.number == 0:
            for each in self._nodes[1:]:
                each.writer.send(Frame("routes", {"address": frame.fields["address"]}))
        self._warm_up()

    def _take_seen(self, node: NodeConnection, frame: Frame) -> None:
        self._asked -= 1
        if not frame.fields["does"]:
            self._blind.append(node.name)
        if not self._asked:
            self._kernel.send({"op": "seen", "blind": self._blind})

    def _take_ready(self, node: NodeConnection, frame: Frame) -> None:
        node.is_ready = True
        self._warm_up()

    def _warm_up(self) -> None:
        if not self._is_warm and all(each.is_ready and each.route for each in self._nodes):
            self._is_warm = True
            self._kernel.send({"op": "ready"})

    def _take_refused(self, node: NodeConnection, frame: Frame) -> None:
        self._refuse(f"node {node.name}: {frame.fields['why']}")

    def _take_pong(self, node: NodeConnection, frame: Frame) -> None:
        node.learn_clock(frame.fields["sent"], frame.fields["at"], time.monotonic())

    def _take_started(self, node: NodeConnection, frame: Frame) -> None:
        node.has_begun = True
        if all(each.has_begun for each in self._nodes):
            self._begun()

    def _member(self, frame: Frame) -> Member | None:
        member = None if self._run is None else self._run.members.get(frame.fields["rank"])
        return member if member is not None and member.code is None else None

    def _take_out(self, node: NodeConnection, frame: Frame) -> None:
        if (member := self._member(frame)) is not None:
            member.outputs[frame.fields["stream"]].write(bytes(frame.blob))

    def _take_piece(self, node: NodeConnection, frame: Frame) -> None:
        if (member := self._member(frame)) is None:
            return
        number = frame.fields["number"]
        if number not in member.memory:
            member.memory[number] = os.memfd_create("nbaccel-report", os.MFD_CLOEXEC)
        written = 0
        while written < len(frame.blob):
            written += os.write(member.memory[number], frame.blob[written:])

    def _take_message(self, node: NodeConnection, frame: Frame) -> None:
        if (member := self._member(frame)) is not None:
            member.send(frame.fields["message"], frame.fields["fds"])

    def _take_records(self, node: NodeConnection, frame: Frame) -> None:
        if (member := self._member(frame)) is not None:
            for at, kind, step, value, text in frame.fields["records"]:
                member.ring.write(kind, step, value, text.encode(errors="surrogateescape"), at + node.ahead_s)

    def _take_slots(self, node: NodeConnection, frame: Frame) -> None:
        run = self._run
        if run is None:
            return
        ranks, reports = frame.fields["ranks"], frame.fields["reports"]
        data = bytes(frame.blob)
        flags, data = bytearray(data[:reports]), data[reports:]
        if node.number in run.thawing:
            flags[-1] = 0  # the wish to save that has just been granted
        run.page.add_reports(bytes(flags))
        size = len(data) // max(1, len(ranks))
        for number, rank in enumerate(ranks):
            run.page.put_slot(rank, data[number * size : (number + 1) * size], node.ahead_s)

    def _take_frozen(self, node: NodeConnection, frame: Frame) -> None:
        self._take_slots(node, frame)
        if self._run is not None:
            self._has_frozen(self._run, node)

    def _take_thawed(self, node: NodeConnection, frame: Frame) -> None:
        if self._run is not None:
            self._run.thawing.discard(node.number)

    def _take_stack(self, node: NodeConnection, frame: Frame) -> None:
        if self._run is not None and (member := self._member(frame)) is not None:
            with open(stack_path(self._run.store_path, member.rank), "ab") as file:
                file.write(frame.blob)

    def _take_lines(self, node: NodeConnection, frame: Frame) -> None:
        if self._run is not None and frame.fields["name"] in LISTS:
            with open(f"{self._run.store_path}.{frame.fields['name']}", "ab") as file:
                file.write(frame.blob)
            for each in self._run.living:
                if each is not node:
                    each.writer.send(frame)

    def _take_meeting(self, node: NodeConnection, frame: Frame) -> None:
        if self._run is not None:
            for each in self._run.living:
                if each is not node:
                    each.writer.send(Frame("meeting", frame.fields))

    def _take_end(self, node: NodeConnection, frame: Frame) -> None:
        if (member := self._member(frame)) is not None:
            member.code = frame.fields["code"]


def address_of(node: NodeConnection) -> str:
    """Return an address of a node as this machine knows it."""
    return str((node.facts or {}).get("address") or socket.gethostbyname(node.name))


def main(channel_fd: int, kernel_pidfd: int, wanted: dict[str, Any]) -> None:
    """Run the relay.

    Args:
        channel_fd: Its end of the channel to the kernel.
        kernel_pidfd: See `Relay`.
        wanted: The nodes, see `nodes.wanted_of`.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    be_quiet()
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(kernel_pidfd, False)
    transports: dict[str, Callable[[], NodeTransport]] = {
        "ssh": lambda: PipeNodes.by_ssh(wanted["hosts"], wanted["ssh"]),
        "slurm": lambda: PipeNodes.by_srun(wanted["hosts"]),
        "ray": lambda: RayNodes(wanted["address"]),
    }
    Relay(Channel.from_fd(channel_fd), kernel_pidfd, transports[wanted["kind"]](), wanted["silence_s"]).serve()
    os._exit(0)  # threads of Ray may wait for a cluster that does not answer
