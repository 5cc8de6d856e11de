"""The watch for hangs of a script's ranks, as ranks of cells have it. Runs in `nbaccel launch`, and in its ranks.

torch elastic sees only processes that end. `ScriptWatch` has a page of memory, which each rank of this machine opens by
its path under /proc, and a folder, where it leaves its process number and its stacks. Ranks on other machines are not
watched: their stacks are not here.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from nbaccel.base.events import Event, StepEntered, StepsEnded
from nbaccel.base.world import World
from nbaccel.launching.ipc.control import ControlPage, StepGate
from nbaccel.launching.ipc.peer_watch import PeerWatch
from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.processes.hangs import HangWatch
from nbaccel.launching.rank.process_setup import StacksOnRequest

__all__ = ["ScriptWatch", "WatchedRank"]

_WATCH = "NBACCEL_SCRIPT_WATCH"
"""Variable with the path of the page and that of the folder, in a rank of `nbaccel launch`."""

_TICK_S = 0.5


class ScriptWatch:
    """Watches the ranks of one launch on this machine in a thread, and ends them when none can go on.

    Args:
        say: Shows one line of the project.

    Attributes:
        hang: The text on the hang that ended them; empty if none did.
    """

    def __init__(self, ranks: int, say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._say = say
        self.hang = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nbaccel-script-watch", daemon=True)

    def __enter__(self) -> ScriptWatch:
        """Begin; ranks that this process starts from now on are watched."""
        self._page = ControlPage.create(self._ranks)
        self._folder = tempfile.mkdtemp(prefix="nbaccel-script-")  # mode 0700
        os.environ[_WATCH] = os.pathsep.join((f"/proc/{os.getpid()}/fd/{self._page.fd}", self._folder))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End; no rank of this machine is left."""
        os.environ.pop(_WATCH, None)
        self._is_over.set()
        self._thread.join()
        self._page.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def steps(self) -> list[int]:
        """The training steps that each rank has begun."""
        return [self._page.read(rank).step + 1 for rank in range(self._ranks)]

    def _watch(self) -> None:
        pids: list[int] = []
        while not self._is_over.wait(_TICK_S):
            if (found := self._pids()) != pids:  # they begin, or torch elastic has started them again
                pids = found
                members = [_ScriptRank(rank, pid, self._page) for rank, pid in enumerate(pids)]
                store = os.path.join(self._folder, "store")
                hangs = HangWatch(self._page, members, store, None, self._say, time.monotonic())
            if pids and (hang := hangs.tick(time.monotonic())) is not None:
                self.hang = str(hang)
                for member in members:
                    member.process.signal(signal.SIGTERM)  # torch elastic notices, and ends those that do not hear it
                return

    def _pids(self) -> list[int]:
        """Return the process of each rank; nothing before all have begun."""
        try:
            return [int(_read(os.path.join(self._folder, f"pid-{rank}"))) for rank in range(self._ranks)]
        except (OSError, ValueError):
            return []


class _ScriptRank:
    """One rank, as `HangWatch` looks at it."""

    report: RankReport | None = None

    def __init__(self, rank: int, pid: int, page: ControlPage) -> None:
        self.rank = rank
        self.process = _ScriptProcess(pid)
        self._page = page

    @property
    def is_working(self) -> bool:
        return not self._page.has_finished(self.rank) and os.path.exists(f"/proc/{self.process.pid}")


class _ScriptProcess:
    """A process that torch elastic has started, and reaps."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def signal(self, number: int) -> None:
        if os.path.exists(f"/proc/{self.pid}"):
            os.kill(self.pid, number)


class WatchedRank:
    """The rank's end of a watch: takes the events of the rank, marks its steps, and looks at its peers' collectives."""

    def __init__(self, page: ControlPage, folder: str, rank: int) -> None:
        self._page = page
        self._rank = rank
        page.renew(rank)
        self._gate = StepGate(page, rank)
        self._peers = PeerWatch(page, rank)
        self.enter_step = self._gate.enter_step
        stacks = StacksOnRequest(os.path.join(folder, "store"), rank)
        stacks.install()
        threading.Thread(target=_answer, args=(stacks,), name="nbaccel-stacks", daemon=True).start()
        path = os.path.join(folder, f"pid-{rank}")
        with open(f"{path}.new", "w") as file:
            file.write(str(os.getpid()))
        os.replace(f"{path}.new", path)

    @classmethod
    def from_env(cls) -> WatchedRank | None:
        """Return this rank's end; None if nobody watches, or not from this machine."""
        path, _, folder = os.environ.pop(_WATCH, "").partition(os.pathsep)
        world = World.from_env()
        if not path or world.world_size == 1:
            return None
        try:
            return cls(ControlPage(os.open(path, os.O_RDWR | os.O_CLOEXEC), world.world_size), folder, world.rank)
        except OSError:  # the launch is in another namespace of processes
            return None

    def __call__(self, event: Event) -> None:
        """Take an event of this rank."""
        if isinstance(event, StepEntered | StepsEnded):
            self._gate(event)
        self._peers(event)

    def record_loss(self, value: Any, step: int) -> None:
        """Leave a loss to the program."""

    def record_metric(self, values: Mapping[str, Any], step: int) -> None:
        """Leave numbers to the program."""

    def finish(self) -> None:
        """Mark that the program of this rank is over."""
        self._page.finish(self._rank)


def _answer(stacks: StacksOnRequest) -> None:
    while stacks.questions is not None:
        select.select([stacks.questions], [], [])
        stacks.answer()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
