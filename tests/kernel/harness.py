"""A real ipykernel in a process of its own, driven as a front end drives it. Runs in the tests.

`RealKernel.run` executes a cell and returns everything that came of it; `RealKernel.begin` returns while the cell is
running, for tests that interrupt, restart or kill. Every process that descends from the kernel can be found again,
also after the kernel is dead: they carry the kernel's tag in their environment, or were seen as its descendants.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import textwrap
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import Environment

TAG = "NBACCEL_TEST_KERNEL"

_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_PROC = Path("/proc")
_OURS = re.compile(
    r"^(\d+ ranks? on .*|\w+ works by a thread of the notebook .*|(not )?brought back.*"
    r"|.* has \d+ workers in each of .*|the notebook itself holds .*|\w+ lies on .*"
    r"|.* holds \d+ checkpoint\(s\) of earlier runs.*"
    r"|(done in|(failed|stopped) after) \d.*)\n",
    re.M,
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PANEL = "nbaccel-run-"
_START_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class CellError:
    """The error a cell ended with. `text` is the whole traceback without colours."""

    ename: str
    evalue: str
    traceback: list[str]

    @property
    def text(self) -> str:
        return _COLOURS.sub("", "\n".join(self.traceback))


@dataclass(slots=True)
class Cell:
    """What a cell did, as the front end saw it.

    seconds: from sending the cell to its reply.  sent: how many messages of each type came.
    displays: data by MIME type, in order of first appearance, each in its latest state.
    widgets: the state of those that were made meanwhile and are not closed, by model id.
    frames: the panel of the cell's run, every state of it.  panels: in how many places it stood.
    elsewhere: the latest data of displays of other cells, by their id.  payloads: what the reply has beside it.
    """

    status: str = ""
    number: int = 0
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: CellError | None = None
    errors_shown: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    frames: list[dict[str, Any]] = field(default_factory=list)
    panels: int = 0
    widgets: dict[str, dict[str, Any]] = field(default_factory=dict)
    elsewhere: dict[str, dict[str, Any]] = field(default_factory=dict)
    payloads: list[dict[str, Any]] = field(default_factory=list)
    _display_ids: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    @property
    def panel(self) -> dict[str, Any]:
        """What the notebook keeps of the panel."""
        assert self.frames, f"no panel was shown\n{self.text}"
        return self.frames[-1]

    @property
    def printed(self) -> str:
        """Standard output without our own lines: what will run, what came back, how it ended."""
        return _OURS.sub("", self.stdout)

    def take(self, message: dict[str, Any]) -> None:
        """Account for one message of the iopub channel."""
        kind, content = message["msg_type"], message["content"]
        self.sent[kind] += 1
        if str(content.get("transient", {}).get("display_id")).startswith(_PANEL):
            self.panels += kind == "display_data"
            self.frames.append(content["data"])
            return
        match kind:
            case "stream":
                setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
            case "display_data":
                self._display_ids[content.get("transient", {}).get("display_id", "")] = len(self.displays)
                self.displays.append(content["data"])
            case "update_display_data":
                own_id = content.get("transient", {}).get("display_id", "")
                if (at := self._display_ids.get(own_id)) is not None:
                    self.displays[at] = content["data"]
                else:
                    self.elsewhere[own_id] = content["data"]
            case "execute_result":
                self.result = content["data"]
            case "comm_open":
                self.widgets[content["comm_id"]] = content["data"]["state"]
            case "comm_msg" if content["data"].get("method") == "update":
                self.widgets.setdefault(content["comm_id"], {}).update(content["data"]["state"])
            case "comm_close":
                self.widgets.pop(content["comm_id"], None)
            case "error":
                self.errors_shown += 1
                self.error = CellError(content["ename"], content["evalue"], content["traceback"])

    def succeeded(self) -> Cell:
        """This cell, or an assertion that shows why it failed."""
        assert self.status == "ok", f"{self.status}: {self.error and self.error.text}\n{self.text}"
        return self

    def failed(self, ename: str) -> CellError:
        """The error, or an assertion that shows what came instead of `ename`."""
        assert self.status == "error", f"expected {ename}, the cell ended {self.status!r}\n{self.text}"
        assert self.error is not None, f"the reply says error, and no error was shown\n{self.text}"
        assert self.error.ename == ename, self.error.text
        return self.error


def accelerate(body: str, start: str = "auto", n: int = 2, flags: str = "") -> str:
    """The text of a `%%accelerate` cell on CPU ranks; the first line of `body` is line 2 of the cell."""
    line = f"%%accelerate --cpu -n {n} --start {start} {flags}".rstrip()
    return f"{line}\n{textwrap.dedent(body).strip(chr(10))}"


class Execution:
    """A cell that is running, or waits for its turn; also what comes of it after its end.

    all: every one of the kernel that somebody still looks at, by the id of its message. Whoever reads reads for all.
    """

    def __init__(
        self, client: Any, code: str, all_: MutableMapping[str, Execution], stop_on_error: bool, allow_stdin: bool
    ) -> None:
        self._client = client
        self._sent_at = time.monotonic()
        self._all = all_
        self._id = client.execute(code, stop_on_error=stop_on_error, allow_stdin=allow_stdin)
        self._all[self._id] = self
        self._is_idle = False
        self._reply: dict[str, Any] | None = None
        self.cell = Cell()

    @property
    def is_over(self) -> bool:
        """Whether `end` has seen the reply."""
        return self._reply is not None

    @property
    def is_idle(self) -> bool:
        """Whether the kernel has said that all of the cell's output was sent, and it was read."""
        return self._is_idle

    def until(self, condition: Callable[[Cell], object], timeout_s: float = 30.0, *, after_end: bool = False) -> Cell:
        """Read on until `condition` holds, while the cell goes on running, or what it has started (`after_end`)."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.cell):
            if (self._is_idle and not after_end) or time.monotonic() > deadline:
                why = "the cell ended" if self._is_idle else f"{timeout_s:g} s were over"
                raise AssertionError(f"{why} before the awaited output came\n{self._told()}")
            self._read(deadline)
        return self.cell

    def until_text(self, *texts: str, timeout_s: float = 30.0) -> Cell:
        """Read on until all `texts` were printed."""
        return self.until(lambda cell: all(text in cell.text for text in texts), timeout_s)

    def prompt(self, timeout_s: float = 30.0) -> str:
        """Wait until the cell asks for input; returns what it asks."""
        return str(self._client.get_stdin_msg(timeout=timeout_s)["content"]["prompt"])

    def answer(self, text: str) -> None:
        """Type a line."""
        self._client.input(text)

    def end(self, timeout_s: float = 60.0) -> Cell:
        """Wait until the cell is over."""
        deadline = time.monotonic() + timeout_s
        while self._reply is None:
            try:
                message = self._client.get_shell_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                while not self._is_idle and self._read(time.monotonic() + 0.1):
                    pass
                raise AssertionError(f"no reply within {timeout_s:g} s\n{self._told()}") from None
            if (other := self._all.get(message["parent_header"].get("msg_id"))) is not None:
                other._reply = message["content"]
                other.cell.seconds = time.monotonic() - other._sent_at
        while not self._is_idle:
            assert self._read(time.monotonic() + 10.0), f"no idle state after the reply\n{self._told()}"
        self.cell.status = self._reply["status"]
        self.cell.payloads = self._reply.get("payload", [])
        self.cell.number = self._reply.get("execution_count", 0)  # a cell that was dropped has none
        return self.cell

    def _read(self, deadline: float) -> bool:
        """Take one message if one comes before the deadline."""
        try:
            message = self._client.get_iopub_msg(timeout=max(0.0, min(0.1, deadline - time.monotonic())))
        except queue.Empty:
            return time.monotonic() < deadline
        if (other := self._all.get(message["parent_header"].get("msg_id"))) is not None:
            other.cell.take(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                other._is_idle = True
        return True

    def _told(self) -> str:
        return f"{self.cell.text[-3000:]}\n{self.cell.error.text if self.cell.error else ''}"


class RealKernel:
    """One kernel. `close` ends it; a kernel that was killed is closed too."""

    def __init__(self, environment: Environment, folder: Path, **environ: str) -> None:
        self.environment = environment
        self.folder = folder
        self._tag = uuid.uuid4().hex
        self._manager = environment.kernel_manager()
        self._known: dict[int, str] = {}
        self._latest: Execution | None = None
        self._executions: MutableMapping[str, Execution] = weakref.WeakValueDictionary()
        self._start = {"env": environment.environ(**{TAG: self._tag}, **environ), "cwd": str(folder)}
        self._manager.start_kernel(**self._start)
        try:
            self._known[self.pid] = stat.born if (stat := _stat(self.pid)) is not None else ""
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        provisioner = getattr(self._manager, "provisioner", None)
        return int(provisioner.pid if provisioner is not None else self._manager.kernel.pid)

    @property
    def ports(self) -> set[int]:
        """Those that the front end knows; a restarted kernel gets the same ones."""
        return {self._manager.get_connection_info()[f"{channel}_port"] for channel in _CHANNELS}

    @property
    def is_alive(self) -> bool:
        return bool(self._manager.is_alive())

    # --- cells -------------------------------------------------------------------------------------------------

    def begin(self, code: str, *, stop_on_error: bool = False, allow_stdin: bool = True) -> Execution:
        """Send a cell; the common indentation of `code` goes, and so does a first empty line.

        allow_stdin: whether somebody could answer to `input`.
        stop_on_error: where it fails, the kernel drops the cells that wait behind it, as for "Run All".
        """
        code = textwrap.dedent(code).strip("\n")
        self._latest = Execution(self._client, code, self._executions, stop_on_error, allow_stdin)
        return self._latest

    def run(self, code: str, timeout_s: float = 60.0) -> Cell:
        """Run a cell to its end, whatever that is."""
        return self.begin(code).end(timeout_s)

    def do(self, code: str, timeout_s: float = 60.0) -> Cell:
        """Run a cell that has to succeed."""
        return self.run(code, timeout_s).succeeded()

    def completions(self, line: str, timeout_s: float = 10.0) -> list[str]:
        """What Tab offers at the end of a cell's first line."""
        reply = self._client.complete(f"{line}\nx = 1", len(line), reply=True, timeout=timeout_s)
        return list(reply["content"]["matches"])

    def send(self, kind: str, content: dict[str, Any], *, subshell_id: str | None = None) -> None:
        """Send what the kernel does not answer, such as a widget's message; it is handled before the next cell.

        subshell_id: of the subshell that is to handle it.
        """
        message = self._client.session.msg(kind, content)
        message["header"] |= {"subshell_id": subshell_id} if subshell_id else {}
        self._client.shell_channel.send(message)

    def send_forged(self, kind: str, content: dict[str, Any]) -> None:
        """Send what somebody would who does not know the kernel's key."""
        session = self._client.session.clone()
        session.key = b"another"
        session.send(self._client.shell_channel.socket, session.msg(kind, content))

    def settle(self) -> None:
        """Stop the cell that a failed test left running, so that the next test finds an idle kernel."""
        if self._latest is not None and not self._latest.is_over:
            self.interrupt()
            self.interrupt()
            self._latest.end(timeout_s=15)

    def value(self, expression: str) -> Any:
        """The value in the kernel of an expression that JSON can hold."""
        cell = self.do(f"import json as _json; print(_json.dumps({expression}))")
        return json.loads(cell.stdout)

    # --- its subshells -----------------------------------------------------------------------------------------

    def start_subshell(self) -> str | None:
        """Have the kernel make a subshell, as JupyterLab does for widgets; its id, None if this kernel has none."""
        if "kernel subshells" not in self.value("get_ipython().kernel.kernel_info.get('supported_features', ())"):
            return None
        return str(self._control("create_subshell_request", {})["subshell_id"])

    def end_subshell(self, subshell_id: str) -> None:
        """Return when its thread has ended."""
        self._control("delete_subshell_request", {"subshell_id": subshell_id})

    def _control(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        message = self._client.session.msg(kind, content)
        self._client.control_channel.send(message)
        while True:
            reply = self._client.get_control_msg(timeout=10.0)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    # --- the kernel's life -------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """What the stop button of a front end does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """What "restart kernel" of a front end does: no word to the kernel before, and the same ports after."""
        self.family()
        self._client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._connect()

    def kill(self) -> None:
        """SIGKILL to the kernel alone, as the out-of-memory killer does."""
        self.family()
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        _wait_until(lambda: not _is_running(pid), 5.0)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        for pid in self.survivors(within_s=2.0):
            os.kill(pid, signal.SIGKILL)

    # --- its processes -----------------------------------------------------------------------------------------

    def family(self) -> dict[int, str]:
        """Every live process that carries the kernel's tag or descends from one that does, with its command line.

        Processes seen once are remembered: an orphan that cleared its environment is still known.
        """
        mark = f"{TAG}={self._tag}".encode()
        stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None and stat.is_running}
        family = {pid for pid in stats if mark in _read(pid, "environ").split(b"\0")}
        family |= {pid for pid, born in self._known.items() if pid in stats and stats[pid].born == born}
        grew = True
        while grew:
            new = {pid for pid, stat in stats.items() if stat.parent in family} - family
            family |= new
            grew = bool(new)
        self._known |= {pid: stats[pid].born for pid in family}
        return {pid: _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:160] for pid in family}

    def survivors(self, within_s: float = 1.0) -> dict[int, str]:
        """The processes of a kernel that is gone which are still there `within_s` after the call."""
        spared = {self.pid} if self.is_alive else set()

        def left() -> dict[int, str]:
            return {pid: command for pid, command in self.family().items() if pid not in spared}

        _wait_until(lambda: not left(), within_s)
        return left()

    def extra(self, before: dict[int, str], within_s: float = 1.0) -> dict[int, str]:
        """Members of the family that were not there `before` and are still there after `within_s`."""

        def left() -> dict[int, str]:
            return {pid: command for pid, command in self.family().items() if pid not in before}

        _wait_until(lambda: not left(), within_s)
        return left()


@dataclass(frozen=True, slots=True)
class _Stat:
    is_running: bool
    parent: int
    born: str  # with the pid it names a process for good: pids are used again


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _stat(pid: int) -> _Stat | None:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    return _Stat(fields[0] not in (b"Z", b"X"), int(fields[1]), fields[19].decode())


def _is_running(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat.is_running


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for something that sends no event; whether it happened."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
