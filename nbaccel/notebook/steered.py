"""Steered: a running cell that a click can stop. Runs in the kernel, in the thread that watches the run.

Frames of the panel are shown in widgets once a front end has reported that it shows them. Otherwise (no widgets in the
front end or the kernel, an ipykernel that the pump does not know), the panel is displayed as usual and says how to stop
instead. An error here does not harm the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbaccel.launch.beside import Beside
from nbaccel.launch.screen.audience import can_answer
from nbaccel.launch.screen.frames import Frames
from nbaccel.notebook.pump import Pump

if TYPE_CHECKING:  # it imports ipywidgets, which take a while and may be missing
    from nbaccel.notebook.stop_button import StopButton

__all__ = ["FormerButton", "Steered", "steered"]

_PUMP_S = 0.05  # a person does not feel it, and it costs half a percent of a core
_PATIENCE_S = 4.0
"""Seconds for a front end to load its widgets and report that it shows these; it may be far away."""


class FormerButton:
    """Keeps the widgets of a finished run until the next run has opened its own; then closes them.

    JupyterLab makes the kernel start a subshell, a thread, when a page opens its first widget, and delete it when the
    last one is closed. The page also sends the subshell a message that the button has left the screen. If that message
    and the end of the subshell coincide, ipykernel (7.0 to 7.4) loses it, and "Task was destroyed but it is pending!"
    is printed in red into the cell: https://github.com/jupyterlab/jupyterlab/issues/19722. As long as a widget stays,
    so does the subshell, and no message can coincide with its end. A page that was reloaded during the run finds its
    last state in them.

    kernel: ipykernel's. If no page uses a subshell, widgets are closed at once.
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


class Steered(Frames, Beside):
    """A panel with a button, as long as everything that it needs is available.

    poll: handles messages of the widgets `model_ids`, from time to time; None if the main thread is free to do it.
    otherwise: the panel's hint when there is no button.
    former: the notebook's; gets the button in the end.
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
        self._press: Callable[[], None] = _nothing

    # --- for the panel -----------------------------------------------------------------------------------------

    @property
    def hint(self) -> str:
        return self._otherwise if self._has_given_up else ""

    def get_ready(self) -> None:
        if self._button is None and not self._has_given_up:
            with self._or_without():
                from nbaccel.notebook.stop_button import StopButton

                self._button = StopButton(self._on_click)
                self._button.pressed(self._times)
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

    def tick(self, now: float, press: Callable[[], None]) -> None:
        self._press = press
        if self._button is not None and self._poll is not None:
            with self._or_without():
                self._poll()

    def pressed(self, times: int) -> None:
        self._times = times
        if self._button is not None:
            with self._or_without():
                self._button.pressed(times)

    def _on_click(self) -> None:
        """Pass a click on; it may run in any thread, so it must do no more than this."""
        self._press()


def _nothing() -> None:
    """Do nothing, before the ranks have been started."""


def _has_subshells(kernel: Any) -> bool:
    """Return whether a front end has this kernel run a subshell; ipykernel's private names for it may change."""
    manager = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
    names = getattr(manager, "list_subshell", None)
    return bool(names is not None and names())


@contextlib.contextmanager
def steered(shell: Any, former: FormerButton) -> Iterator[tuple[Frames, list[Beside]]]:
    """Yield how the running cell is shown, and what is checked beside it; other messages wait for its end."""
    model_ids: set[str] = set()
    pump = Pump.of(getattr(shell, "kernel", None), model_ids) if can_answer(shell) else None
    if pump is None:
        yield Frames(), []
        return
    with pump:
        button = Steered(pump.poll, model_ids, Frames().hint, former)
        yield button, [button]
