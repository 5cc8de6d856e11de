"""Button that stops a running cell by a click, and the pump that brings the click to it. Runs in the kernel.

It runs in the thread that watches the run, the kernel's main thread during a cell. Frames of the panel are shown in
widgets once a front end has reported that it shows them. Otherwise (no widgets in the front end or the kernel, an
ipykernel that the pump does not know), the panel is displayed as usual and says how to stop instead. An error here does
not harm the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nbaccel.display.attendance import can_answer
from nbaccel.display.run_view import PanelSink
from nbaccel.launching.processes.interaction import Pollable

if TYPE_CHECKING:  # it imports ipywidgets, which take a while and may be missing
    from nbaccel.features.panel.stop_button import StopButton

__all__ = ["FormerButton", "Pump", "StopControl", "steered"]

_PUMP_S = 0.05  # a person does not feel it, and it costs half a percent of a core
_PATIENCE_S = 4.0
"""Seconds for a front end to load its widgets and report that it shows these; it may be far away."""


# The message is lost in ipykernel: https://github.com/ipython/ipykernel/issues/1557.
class FormerButton:
    """Keeps the widgets of a finished run until the next run has opened its own; then closes them.

    JupyterLab makes the kernel start a subshell, a thread, when a page opens its first widget, and delete it when the
    last one is closed. The page also sends the subshell a message that the button has left the screen. If that message
    and the end of the subshell coincide, ipykernel (7.0 to 7.4) loses it, and "Task was destroyed but it is pending!"
    is printed in red into the cell: https://github.com/jupyterlab/jupyterlab/issues/19722. As long as a widget stays,
    so does the subshell, and no message can coincide with its end. A page that was reloaded during the run finds its
    last state in them.

    Args:
        kernel: Ipykernel's. If no page uses a subshell, widgets are closed at once.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._button: StopButton | None = None

    def take(self, button: StopButton) -> None:
        """Take over the button of a run that is over."""
        self.close()
        if _has_subshells(self._kernel):
            button.retire()
            self._button = button
        else:
            button.close()

    def close(self) -> None:
        """Close the kept button."""
        button, self._button = self._button, None
        if button is not None:
            button.close()


class StopControl(PanelSink, Pollable):
    """A panel with a button, as long as everything that it needs is available.

    Args:
        poll: Handles messages of the widgets `model_ids`, from time to time; None if the main thread is free to do it.
        otherwise: The panel's hint when there is no button.
        former: The notebook's; gets the button in the end.
    """

    def __init__(
        self,
        poll: Callable[[], None] | None,
        model_ids: set[str],
        otherwise: str,
        former: FormerButton,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll = poll
        self._model_ids = model_ids
        self._otherwise = otherwise
        self._former = former
        self._clock = clock
        self._button: StopButton | None = None
        self._has_given_up = False
        self._shown_at = 0.0
        self._times = 0
        self._interrupt: Callable[[], None] = _nothing

    # --- for the panel -----------------------------------------------------------------------------------------

    @property
    def hint(self) -> str:
        return self._otherwise if self._has_given_up else ""

    def get_ready(self) -> None:
        if self._button is None and not self._has_given_up:
            with self._or_without():
                from nbaccel.features.panel.stop_button import StopButton

                self._button = StopButton(self._on_click)
                if self._times:
                    self._button.interrupted(self._times)
                self._model_ids |= self._button.model_ids
                self._shown_at = self._clock()
                self._former.close()

    def show(self, data: dict[str, Any]) -> dict[str, Any] | None:
        button = self._button
        if button is not None:
            with self._or_without():
                button.show(data["text/html"])
                if button.is_seen:
                    return None
                if self._clock() - self._shown_at < _PATIENCE_S:
                    return data | button.data
                self.close()
        return data

    def close(self) -> None:
        self._has_given_up = True
        button, self._button = self._button, None
        if button is not None:
            with contextlib.suppress(Exception):
                self._former.take(button)

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        """Continue without the button if ipywidgets are missing, or an unknown version."""
        try:
            yield
        except Exception:
            self.close()

    # --- beside the run ----------------------------------------------------------------------------------------

    def due_in(self, now: float) -> float | None:
        return _PUMP_S if self._button is not None and self._poll is not None else None

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        if self._button is not None and self._poll is not None:
            with self._or_without():
                self._poll()

    def interrupted(self, times: int) -> None:
        self._times = times
        if self._button is not None:
            with self._or_without():
                self._button.interrupted(times)

    def _on_click(self) -> None:
        """Pass a click on; it may run in any thread, so it must do no more than this."""
        self._interrupt()


def _nothing() -> None:
    """Do nothing, before the ranks have been started."""


def _has_subshells(kernel: Any) -> bool:
    """Return whether a front end has this kernel run a subshell; ipykernel's private names for it may change."""
    manager = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
    names = getattr(manager, "list_subshell", None)
    return bool(names is not None and names())


@contextlib.contextmanager
def steered(shell: Any, former: FormerButton) -> Iterator[tuple[PanelSink, list[Pollable]]]:
    """Yield how the running cell is shown, and what is checked beside it; other messages wait for its end."""
    model_ids: set[str] = set()
    pump = Pump.of(getattr(shell, "kernel", None), model_ids) if can_answer(shell) else None
    if pump is None:
        yield PanelSink(), []
        return
    with pump:
        button = StopControl(pump.poll, model_ids, PanelSink().hint, former)
        yield button, [button]


_MOST_AT_ONCE = 100
"""Messages per poll: a flood of them must not keep the run from its own work."""

_KINDS = ("comm_msg", "comm_close")


# A click waits until the cell is over: https://github.com/jupyter-widgets/ipywidgets/issues/1349; JupyterLab sends it
# to a subshell where there are such: https://github.com/jupyterlab/jupyterlab/pull/17363.
class Pump:
    """Handles, by `poll`, the messages for `comm_ids`, a live collection, between `with` and its end.

    A kernel handles one shell message after the other, so a click waits until the cell is over. ipykernel 7.0 to 7.3
    let a front end send it on a separate thread; others do not, and a front end need not. The pump reads messages
    meanwhile where the kernel would: those for its widgets are handled, all others (cells, other widgets, whose
    callbacks expect no running cell) are kept in their order and handed back when the cell ends.

    It relies on private parts of ipykernel and pyzmq. If one is missing, `Pump.of` returns None, and nothing was
    touched.

    `poll`, and the end of `with`, are for the main thread, inside a cell.
    """

    def __init__(self, kernel: Any, stream: Any, comm_ids: Collection[str]) -> None:
        self._kernel = kernel
        self._stream = stream
        self._comm_ids = comm_ids
        self._kept: list[Any] = []

    @classmethod
    def of(cls, kernel: Any, comm_ids: Collection[str]) -> Self | None:
        """Return a pump; None if this kernel has no place to read from: then a front end's Stop is the interrupt."""
        stream = _main_stream(kernel)
        has_all = (
            all(hasattr(stream, name) for name in ("socket", "flush", "io_loop", "_run_callback", "_recv_copy"))
            and getattr(stream, "_recv_callback", None) is not None
            and hasattr(kernel, "comm_manager")
            and hasattr(kernel, "_publish_status")
            and hasattr(getattr(kernel, "session", None), "feed_identities")
        )
        return cls(kernel, stream, comm_ids) if has_all else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def poll(self) -> None:
        """Handle the messages that have arrived; never wait."""
        import zmq

        for _ in range(_MOST_AT_ONCE):
            try:
                frames = self._stream.socket.recv_multipart(zmq.NOBLOCK, copy=self._stream._recv_copy)
            except zmq.Again:
                return
            if not (self._is_for_us(frames) and self._handle(frames)):
                self._kept.append(frames)

    def close(self) -> None:
        """Hand back the kept messages, in their order and before all later ones.

        It does so at once, not in a later turn of the event loop: if the cell has failed, the kernel is about to drop
        the cells that wait after it, and the kept ones are among them.
        """
        kept, self._kept = self._kept, []
        for frames in kept:
            self._stream._run_callback(self._stream._recv_callback, frames)
        self._stream.io_loop.add_callback(self._stream.flush)  # the socket was read past the stream, which rechecks it

    def _is_for_us(self, frames: list[Any]) -> bool:
        """Return whether this is a message for one of the pump's widgets.

        It reads the message unchecked, so that the kernel can check it.
        """
        try:
            _, parts = self._kernel.session.feed_identities(frames, copy=False)
            header, content = (self._kernel.session.unpack(bytes(parts[at].bytes)) for at in (1, 4))
            return header["msg_type"] in _KINDS and content["comm_id"] in self._comm_ids
        except Exception:  # the kernel handles any other message
            return False

    def _handle(self, frames: list[Any]) -> bool:
        """Handle a message as the kernel would, with the running cell as the parent of the callbacks' output.

        It returns False for a message without a valid signature: the kernel reports it when it handles it.
        """
        kernel = self._kernel
        identity, parts = kernel.session.feed_identities(frames, copy=False)
        try:
            message = kernel.session.deserialize(parts, content=True, copy=False)
        except Exception:
            return False
        kernel._publish_status("busy", "shell", parent=message)
        try:
            getattr(kernel.comm_manager, message["msg_type"])(self._stream, identity, message)
        finally:
            kernel._publish_status("idle", "shell", parent=message)  # front ends send the next one after this
            kernel._publish_status("busy", "shell")  # and think that the cell is over, unless told otherwise
        return True


def _main_stream(kernel: Any) -> Any:
    """Return the stream that brings shell messages to the main thread; None if it is not found."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:  # ipykernel 6
        return getattr(kernel, "shell_stream", None)
    pair = getattr(getattr(thread, "manager", None), "_shell_channel_to_main", None)
    return getattr(pair, "to_stream", None)
