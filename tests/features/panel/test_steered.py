"""What becomes of the panel and its button when something they lean on is missing, or breaks. No kernel runs here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nbaccel.features.panel.stop_control import FormerButton, StopControl

WIDGET = "application/vnd.jupyter.widget-view+json"
PANEL = {"text/plain": "running", "text/html": "<b>running</b>"}
HINT = "Stop: interrupt the kernel"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(steered: StopControl) -> dict[str, Any] | None:
    """A state of the panel as it is displayed."""
    steered.get_ready()
    return steered.show(dict(PANEL))


def steered_by(
    poll: Callable[[], None] | None = lambda: None, clock: Clock | None = None, former: FormerButton | None = None
) -> StopControl:
    return StopControl(poll, set(), HINT, former or FormerButton(None), clock or Clock())


def kernel_with(*subshells: str) -> Any:
    """ipykernel's, as far as it tells which subshells front ends have asked for."""
    manager = SimpleNamespace(list_subshell=lambda: list(subshells))
    return SimpleNamespace(shell_channel_thread=SimpleNamespace(manager=manager))


def button_of(steered: StopControl) -> Any:
    """The button, once the panel is shown; its widget has a comm as long as it is open."""
    shown(steered)
    assert steered._button is not None
    return steered._button._button


def test_the_panel_is_displayed_with_the_button_until_a_front_end_shows_it() -> None:
    steered = steered_by()
    assert steered.hint == ""
    assert sorted(shown(steered) or {}) == [WIDGET, "text/html", "text/plain"]
    button = steered._button
    assert button is not None
    button._button.set_state({"_view_count": 1})  # as a front end's message does
    assert shown(steered) is None
    assert "<b>running</b>" in button._panel.value
    steered.close()


def test_where_no_front_end_shows_it_within_seconds_the_panel_goes_on_without() -> None:
    clock = Clock()
    steered = steered_by(clock=clock)
    shown(steered)
    clock.now = 4.1
    assert shown(steered) == PANEL
    assert steered.hint == HINT
    assert shown(steered) == PANEL


def test_where_a_page_has_a_subshell_some_widget_is_open_from_the_first_run_on() -> None:
    interrupts: list[int] = []
    former = FormerButton(kernel_with("subshell"))
    steered = steered_by(former=former)
    first = button_of(steered)
    steered.tick(0.0, lambda: interrupts.append(1))
    steered.close()
    first.click()  # by a page that is far behind
    assert first.comm is not None
    assert first.layout.display == "none"
    assert interrupts == []
    steered = steered_by(former=former)
    second = button_of(steered)
    assert first.comm is None
    steered.close()
    assert second.comm is not None
    former.close()
    assert second.comm is None


@pytest.mark.parametrize("kernel", [None, kernel_with(), SimpleNamespace(shell_channel_thread=object())])
def test_where_no_page_has_a_subshell_the_button_is_closed_with_its_run(kernel: Any) -> None:
    steered = steered_by(former=FormerButton(kernel))
    button = button_of(steered)
    assert button.comm is not None
    steered.close()
    assert button.comm is None


def test_without_ipywidgets_the_panel_says_how_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "nbaccel.features.panel.stop_button", raising=False)
    steered = steered_by()
    assert shown(steered) == PANEL
    assert steered.hint == HINT


def test_a_pump_that_breaks_takes_the_button_with_it_and_not_the_run() -> None:
    def poll() -> None:
        raise AttributeError("another ipykernel")

    steered = steered_by(poll)
    shown(steered)
    assert steered.due_in(0.0) is not None
    steered.tick(0.0, lambda: None)
    assert steered.due_in(0.0) is None
    assert shown(steered) == PANEL
    assert steered.hint == HINT


def test_nothing_is_polled_while_there_is_no_button() -> None:
    steered = steered_by()
    assert steered.due_in(0.0) is None
    shown(steered)
    assert steered.due_in(0.0) == pytest.approx(0.05)
    steered.close()
    assert steered.due_in(0.0) is None


def test_every_click_presses_and_the_label_says_what_the_next_one_does() -> None:
    interrupts: list[int] = []
    steered = steered_by()
    shown(steered)
    steered.tick(0.0, lambda: interrupts.append(1))
    button = steered._button
    assert button is not None
    labels = []
    for times in range(1, 3):
        labels.append((button._button.description, button._button.disabled))
        button._button.click()
        steered.interrupted(times)
    labels.append((button._button.description, button._button.disabled))
    assert len(interrupts) == 2
    assert labels == [("Stop after this step", False), ("Stop now", False), ("Stopping", True)]
    steered.close()


def test_a_press_before_the_button_is_there_is_not_forgotten() -> None:
    steered = steered_by()
    steered.interrupted(1)
    shown(steered)
    assert steered._button is not None
    assert steered._button._button.description == "Stop now"
    steered.close()


def test_the_panel_names_the_interrupt_only_where_there_is_no_button() -> None:
    from nbaccel.display.history import History
    from nbaccel.display.summary import RunState
    from nbaccel.features.panel.panel import Panel

    panel = Panel(History(2))
    assert HINT in panel.bundle(1.0, RunState("running", hint=HINT))["text/html"]
    assert "Stop" not in panel.bundle(1.0)["text/html"]
