"""Hooks of the training that `raw_loop` makes of loops that prepare nothing. Runs in ranks.

What prepares by itself says so here, and asks here for the step of such a loop, without importing that training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = [
    "LoopState",
    "batches_are_parts",
    "begin_anew",
    "count_steps_by",
    "forget",
    "hold_loop_state",
    "loop_state",
    "restore_loop_state",
    "step_back",
    "step_under_way",
    "when_beginning_anew",
    "when_stepping_back",
    "window_is_open",
]


class LoopState(Protocol):
    """State of a loop that is trained unprepared, beyond what the program holds."""

    def window_is_open(self) -> bool:
        """Return whether the loop is between two batches, or parts of one, of one optimizer step."""

    def batches_are_parts(self) -> bool:
        """Return whether each rank has had a part of a batch, so that values made of it differ between the ranks."""

    def state(self) -> dict[str, Any]:
        """Return the state with which the loop goes on, as JSON can hold it; its random streams are in it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `state` returned, in another process too."""


_watches: list[Callable[[], None]] = []
_renewed: list[Callable[[], None]] = []
_counts: list[Callable[[], int | None]] = []
_states: dict[str, LoopState] = {}


def when_stepping_back(leave: Callable[[], None]) -> None:
    """Call `leave` at the next `step_back`, once."""
    _watches.append(leave)


def forget(leave: Callable[[], None]) -> None:
    """Do not call `leave` at the next `step_back` any more."""
    _watches[:] = [each for each in _watches if each != leave]


def count_steps_by(step: Callable[[], int | None] | None) -> None:
    """Let `step` answer `step_under_way` from now on; None where nothing trains unprepared any more."""
    _counts[:] = [] if step is None else [step]


def step_under_way() -> int | None:
    """Return the step of the loop that trains without having prepared anything, 0-based; None without such a loop."""
    return _counts[0]() if _counts else None


def hold_loop_state(name: str, state: LoopState | None) -> None:
    """Let `state` be part of the state of the loop from now on, under `name`; None where it is not any more."""
    if state is None:
        _states.pop(name, None)
    else:
        _states[name] = state


def window_is_open() -> bool:
    """Return whether the loop must not be left here: gradients of the present optimizer step would be lost."""
    return any(state.window_is_open() for state in _states.values())


def batches_are_parts() -> bool:
    """Return whether a batch that the loop has in hand may be another one in each rank."""
    return any(state.batches_are_parts() for state in _states.values())


def loop_state() -> dict[str, Any]:
    """Return the state of what trains the loop, as JSON can hold it; empty if nothing of it has any."""
    return {name: state.state() for name, state in _states.items()}


def restore_loop_state(state: dict[str, Any]) -> None:
    """Go on with a state that `loop_state` returned; what has none in this process is left out."""
    for name, held in _states.items():
        if name in state:
            held.restore(state[name])


def when_beginning_anew(begin: Callable[[], None]) -> None:
    """Call `begin` at each `begin_anew`; it replaces the function that an earlier task has given."""
    _renewed[:] = [begin]


def begin_anew() -> None:
    """Start the program again, as in a new attempt after memory ran out: earlier state is not valid any more."""
    for begin in _renewed:
        begin()


def step_back() -> None:
    """Leave the loop unmodified until the next task, since the program prepares by itself.

    Cheap: any call may do it.
    """
    while _watches:
        _watches.pop()()
