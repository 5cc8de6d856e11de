"""Run that goes on while other cells run: of a cell with `--bg`, or of a map. Runs in the kernel, or in a script.

The ranks are started before the cell returns, so they see the notebook as of the cell; a thread then watches them, and
shows their output in the cell they belong to (`CellScreen`). Values enter the notebook in the main thread, when the
user waits for them: no variable changes during another cell. The thread ends with the kernel, and so do the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbaccel.base.events import Listener
from nbaccel.base.hardware import Platform
from nbaccel.base.notices import briefly
from nbaccel.base.quantities import duration
from nbaccel.base.world import is_notebook_kernel
from nbaccel.display.attendance import can_answer, runs_unattended
from nbaccel.display.run_view import PanelSink, RunView
from nbaccel.display.summary import line
from nbaccel.errors import LaunchRefused
from nbaccel.launching.processes.calling_thread import CallingThread
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.output.painter import Screen
from nbaccel.output.screens import ConsoleScreen, shell_here

__all__ = [
    "Background",
    "BackgroundRun",
    "BackgroundWork",
    "CellPlace",
    "CellScreen",
    "background_here",
    "why_not_in_the_background",
]

_ATTEMPTS = 20


class BackgroundWork(Protocol):
    """A run that was prepared in the main thread, and can be done in another one.

    Attributes:
        shown: The view of the run.
        error, end: Its exception, and its end in one word; valid after `go`.
    """

    shown: RunView
    error: BaseException | None
    end: str

    @property
    def name(self) -> str:
        """The run in words, as messages call it: "Cell In[5]"."""

    @property
    def ending(self) -> str:
        """The reaction to a stop, in words: "finishes its step"."""

    @property
    def has_left_something(self) -> bool:
        """Return whether there is something that only the conclusion of the run brings back; valid after `go`."""

    @property
    def left(self) -> Sequence[str]:
        """Return in words what that is."""

    def go(
        self, host: Any, *, listeners: Sequence[Listener] = (), beside: Sequence[Pollable] = (), occupied: str = ""
    ) -> None:
        """Run to the end, see `Launcher.run`. The run's own error is kept, not raised."""

    def show_end(self) -> None:
        """Show what stays on the screen."""


class BackgroundRun(Pollable):
    """One run, from `start` to its end. Its methods are for the main thread.

    Args:
        work: What it does.
        conclude: Brings into the notebook what the run has left, and raises its error.
        waiting, stopping: How a person does that.

    Attributes:
        name: The run in words.
        began_at: By local time, "14:02:11".
        was_interrupted: An interrupt came before its ranks had begun.
        times: Number of requests to end it, by anyone.
        is_concluded: Somebody has fetched what it left.
    """

    def __init__(
        self,
        work: BackgroundWork,
        conclude: Callable[[], Any],
        waiting: str = "%accelerate wait",
        stopping: str = "%accelerate stop",
    ) -> None:
        self.work = work
        self.name = work.name
        self.is_concluded = False
        self._conclude = conclude
        self._waiting, self._stopping = waiting, stopping
        self.began_at = time.strftime("%H:%M:%S")
        self.was_interrupted = False
        self.times = 0
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._trouble: BaseException | None = None
        self._interrupts = 0  # before the ranks could be asked to end
        self._interrupt = self._count_interrupt
        self._end_packing: Callable[[], None] = lambda: None
        self._shown_at: list[Screen] = []

    # --- in the main thread ------------------------------------------------------------------------------------

    def start(self, host: Any, listeners: Sequence[Listener], beside: Sequence[Pollable]) -> None:
        """Start the ranks and return then. An interrupt meanwhile stops them, and the run is over.

        Raises:
            The error that kept the run from starting.
        """
        occupied = (
            f"{self.name} has been running in the background since {self.began_at}, and one run at a time uses the "
            f"devices: {self._waiting} for it, or {self._stopping} it."
        )

        def go() -> None:
            try:
                caller.enter()
                self.work.go(host, listeners=listeners, beside=[self, *beside], occupied=occupied)
                self.work.show_end()
                self._say_what_waits()
            except BaseException as trouble:
                self._trouble = trouble
            finally:
                self._is_over.set()
                self._has_begun.set()

        # https://github.com/ipython/ipykernel/pull/1186.
        # Its context has the cell that a thread belongs to, which ipykernel 7 stores there.
        caller = CallingThread.capture()
        threading.Thread(target=caller.context.run, args=(go,), name="nbaccel-background", daemon=True).start()
        while not self._has_begun.is_set() or (self.was_interrupted and not self.is_over):
            try:
                (self._is_over if self.was_interrupted else self._has_begun).wait()
            except KeyboardInterrupt:
                self.was_interrupted = True
                self.stop()
        self.check()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def error(self) -> BaseException | None:
        """The run's error, or the one that kept it from ending in order; valid once it is over."""
        return self._trouble or self.work.error

    @property
    def is_worth_waiting_for(self) -> bool:
        """Return whether the run has left something that only `%accelerate wait` brings back."""
        return self.error is not None or self.work.has_left_something

    def wait(self) -> bool:
        """Wait until the run is over; return False if an interrupt ended the wait, which does not affect the run."""
        try:
            self._is_over.wait()
        except KeyboardInterrupt:
            return False
        self._show_where_asked()
        return True

    def check(self) -> None:
        """Raise the error that kept the run from ending in order, if there is one.

        Raises:
            That error.
        """
        if self._trouble is not None:
            raise self._trouble

    def conclude(self) -> Any:
        """Fetch what the run has left, which is over; return its value.

        Raises:
            The run's error, or the one that kept it from ending in order.
        """
        self.is_concluded = True
        self.check()
        return self._conclude()

    def stop(self) -> None:
        """Finish the step, or the calls of a map; a second call ends the run now."""
        self._interrupt()
        self._end_packing()

    def _count_interrupt(self) -> None:
        self._interrupts += 1

    def show_at(self, screen: Screen) -> None:
        """Show the panel on `screen`, too."""
        if self.is_over:
            self.work.shown.show_too(screen)
        else:
            self._shown_at.append(screen)

    def __str__(self) -> str:
        """Return how the run goes, or went, in half a sentence."""
        if not self.is_over:
            return f"{self.name} has been running in the background since {self.began_at} ({self._progress()})"
        if self._trouble is not None:
            return f"{self.name} came to no orderly end in the background ({type(self._trouble).__name__})"
        return f"{self.name} has ended in the background ({self.work.end})"

    @property
    def what_waits(self) -> str:
        """Return what `%accelerate wait` would bring back, in words."""
        left = () if self._trouble is not None else self.work.left
        return ", ".join([*left, *([] if self.error is None else ["its error"])]) or "no value"

    def _progress(self) -> str:
        shown = self.work.shown
        seconds = shown.elapsed_s
        for _ in range(_ATTEMPTS):
            try:
                return line(shown.history, shown.facts, seconds)
            except RuntimeError:  # the thread that watches the ranks has just added a curve
                continue
        return duration(seconds)

    # --- in the thread that watches the ranks --------------------------------------------------------------------

    def due_in(self, now: float) -> float | None:
        return None if self._has_begun.is_set() else 0.0

    def begins(self, interrupt: Callable[[], None]) -> None:
        self._end_packing = interrupt

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        for _ in range(self._interrupts):
            interrupt()
        self._interrupts = 0
        self._has_begun.set()
        self._show_where_asked()

    def interrupted(self, times: int) -> None:
        self.times = times

    def _show_where_asked(self) -> None:
        """Show the panel on the screens that were asked for.

        It runs in the watching thread, and once more in the main thread when the run is over: the thread may have ended
        just before it would have looked.
        """
        while self._shown_at:
            self.work.shown.show_too(self._shown_at.pop())

    def _say_what_waits(self) -> None:
        if self.is_worth_waiting_for and not self.was_interrupted:
            self.work.shown.write(
                "stdout", f"{self.name} is {self.work.end}: {self._waiting} brings {self.what_waits}\n"
            )


class Background:
    """The one run that a notebook may have in the background, and the commands on it. For the main thread.

    Args:
        say: Prints a line.
        place: Returns where a run that begins now is shown.
    """

    def __init__(self, say: Callable[[str], None], place: Callable[[], CellPlace]) -> None:
        self._say = say
        self.place = place
        self._current: BackgroundRun | None = None

    @property
    def current(self) -> BackgroundRun | None:
        """Return the run, until its results have been brought back; None without one."""
        if self._current is not None and self._current.is_concluded:
            self._current = None
        return self._current

    def make_room(self, *, for_another: bool = False) -> None:
        """Check that ranks can be used now, in the background too if `for_another`.

        Raises:
            LaunchRefused: A run is going on, or has left results that `for_another` would displace.
        """
        current = self.current
        if current is None:
            return
        if not current.is_over:
            raise LaunchRefused(
                f"{current}, and one run at a time uses the devices: %accelerate wait for it, or %accelerate stop it, "
                "and then run this cell again."
            )
        if not current.is_worth_waiting_for:
            current.conclude()
        elif for_another:
            raise LaunchRefused(
                f"{current}, and %accelerate wait has not brought {current.what_waits} yet: run that, and then this "
                "cell again."
            )
        else:
            self._say(f"{current}: %accelerate wait brings {current.what_waits}")

    def begin(
        self,
        work: BackgroundWork,
        conclude: Callable[[], Any],
        host: Any,
        listeners: Sequence[Listener],
        beside: Sequence[Pollable],
    ) -> BackgroundRun:
        """Start `work`; the arguments are those of `BackgroundRun` and of its `start`.

        A run that was interrupted before it had begun is over, and concluded like one in the foreground.

        Raises:
            LaunchRefused: Nothing was started.
        """
        current = BackgroundRun(work, conclude)
        current.start(host, listeners, beside)
        if current.was_interrupted:
            current.conclude()
        self._current = current
        self._say("in the background: %accelerate wait, status, attach and stop come back to it")
        return current

    def wait(self) -> Any:
        """Wait for the run; return the value of the cell's last expression, after its results are in the notebook.

        Raises:
            The run's error; KeyboardInterrupt: the wait was interrupted, and the run goes on.
        """
        current = self._running_or_over()
        if current is None:
            return None
        if not current.wait():
            raise briefly(KeyboardInterrupt(f"the waiting was interrupted; {current}. %accelerate wait waits again."))
        return current.conclude()

    def attach(self) -> Any:
        """Show the panel in the cell that runs now, and wait.

        An interrupt leaves the run alone, and is no error.
        """
        current = self._running_or_over()
        if current is None:
            return None
        current.show_at(self.place().screen)
        if not current.wait():
            self._say(f"detached; {current}")
            return None
        return current.conclude()

    def stop(self) -> bool:
        """Ask the run to end; return False if none is running."""
        current = self.current
        if current is None or current.is_over:
            return False
        is_first = current.times == 0
        current.stop()
        self._say(
            f"{current.name} {current.work.ending}; %accelerate wait brings what it has, %accelerate stop ends it now"
            if is_first
            else f"{current.name} is being ended"
        )
        return True

    def close(self) -> None:
        """End a running run at once, without a message."""
        current, self._current = self.current, None
        if current is not None and not current.is_over:
            current.stop()
            current.stop()
            current.wait()

    @property
    def is_running(self) -> bool:
        """Return whether a run goes on now."""
        return self.current is not None and not self.current.is_over

    @property
    def status(self) -> str:
        """Return a line on the run; empty if there is nothing to say."""
        current = self.current
        if current is None:
            return ""
        waits = (
            f"; %accelerate wait brings {current.what_waits}"
            if current.is_over and current.is_worth_waiting_for
            else ""
        )
        return f"{current}{waits}"

    def _running_or_over(self) -> BackgroundRun | None:
        if self.current is None:
            self._say("nothing runs in the background; a cell does with %%accelerate --bg")
        return self.current


# The rules changed twice: https://github.com/ipython/ipykernel/pull/1186, and pull/1451 there.
class CellScreen(ConsoleScreen):
    """The screen of the cell that runs when this is made.

    It shows output also after the end of the cell and while others run, from any thread. Kernels send output to the
    cell that runs now, and each ipykernel has other rules for threads. Here every message names its cell itself.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self._kernel = kernel
        self._cell = kernel.get_parent("shell")

    def write(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text})

    def publish(self, message: dict[str, Any]) -> None:
        if not message["data"]:  # the next input: the cell has been answered long ago
            return
        display_id = message.get("display_id")
        content = {
            "data": message["data"],
            "metadata": message.get("metadata") or {},
            "transient": {"display_id": display_id} if display_id else {},
        }
        self._send("update_display_data" if message["kind"] == "update" else "display_data", content)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel = self._kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._cell, ident=kernel._topic(kind))


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The place of a run in a notebook.

    Args:
        screen: The screen of its cell.
        frames, beside: A button there, for panel and run.
    """

    screen: Screen
    frames: PanelSink
    beside: Sequence[Pollable]


def background_here() -> Background | None:
    """Return the background of this notebook, whose extension is loaded if that was not done; None in a script."""
    shell = shell_here()
    if shell is None:
        return None
    shell.extension_manager.load_extension("nbaccel")
    found: Background = shell.magics_manager.registry["AccelerateMagics"].session.background
    return found


def why_not_in_the_background(start_method: str, shell: Any, platform: Platform) -> str:
    """Return why a run cannot go on in the background; empty if its cell can return, and users can come back to it.

    Args:
        shell: IPython's; None in a script, which does what it likes meanwhile.
    """
    if start_method == "inline":
        return "a run in the notebook's own process leaves no room for other cells"
    if shell is None:
        return ""
    if not is_notebook_kernel():
        return "a terminal has no place that other cells leave alone"
    if runs_unattended(platform) or not can_answer(shell):
        return "a program executes this notebook, and would not come back to the run"
    return ""
