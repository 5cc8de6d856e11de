"""The panel, its text, the picture and the last line give equal numbers for one run."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings, strategies as st

from nbaccel.base.events import Loss, Progress, Restarted
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState, line, text
from nbaccel.features.panel.figure import draw
from nbaccel.features.panel.panel import Panel

FACTS = RunFacts("Cell In[5]")
SPEED = r"[\d,.]+ steps/s"


def an_attempt(history: History, began_s: float, first: int, epochs: int, batch_s: float, evaluation_s: float) -> float:
    """One rank trains so many epochs of 8 batches, each with an evaluation; returns when it ended."""
    at, step = began_s, first
    for epoch in range(epochs):
        word = Progress(step, 0, 8, epoch, epochs, first=step, began=at)
        for batch in range(1, 9):
            at, step = at + batch_s, step + 1
            history.feed(0, at, Loss(1.0 / step, step - 1))
            history.feed(0, at, replace(word, step=step, batch=batch))
        history.feed(0, at, replace(word, step=step, batch=8, is_over=True))
        word = Progress(step, 4, 4, is_training=False, is_over=True, first=step, began=at)
        at += evaluation_s
        history.feed(0, at, word)
    return at


@settings(deadline=None, max_examples=25)
@given(
    first=st.integers(0, 100),
    attempts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    batch_s=st.floats(0.01, 3.0),
    evaluation_s=st.floats(0.0, 30.0),
)
def test_three_places_give_the_same_seconds_steps_and_speed(
    first: int, attempts: list[int], batch_s: float, evaluation_s: float
) -> None:
    history, at = History(1), 0.0
    for number, epochs in enumerate(attempts):
        if number:
            history.feed(0, at, Restarted("memory ran out"))
        at = an_attempt(history, at, first, epochs, batch_s, evaluation_s)
    steps = 8 * attempts[-1]
    assert history.steps == steps
    assert history.steps_per_s is not None
    assert abs(history.steps_per_s * batch_s - 1) < 0.01
    state = RunState.ended("done", at, history.steps, attempts=history.attempts, kept=history.kept_steps)
    panel = Panel(history, FACTS).bundle(at, state)
    last = line(history, FACTS, at, state)
    drawn = draw(history, FACTS, title=state.sentence)
    said = (*panel.values(), last, text(history, FACTS, at, state))
    speeds = {found for words in said for found in re.findall(SPEED, words)}
    speeds |= {drawn.axes[-1].get_title(loc="left").removeprefix("speed, ")}
    assert len(speeds) == 1, speeds
    assert last.startswith(state.sentence)
    assert state.sentence in panel["text/html"]
    assert f": {state.sentence}\n" in panel["text/plain"]
    assert drawn.axes[-1].get_xlim() == (0.0, history.seconds)


def test_a_run_of_several_attempts_says_how_many_and_what_its_steps_are() -> None:
    anew, resumed = History(1), History(1)
    for history, first in ((anew, 0), (resumed, 8)):
        ended = an_attempt(history, 0.0, 0, 2, 0.1, 0.0)
        history.feed(0, ended, Restarted("memory ran out"))
        assert " ".join(line(history, FACTS, ended).split()[:2]) == "attempt 2,"
        an_attempt(history, ended, first, 1, 0.1, 0.0)
    sentences = [
        RunState.ended("done", 3.0, history.steps, attempts=history.attempts, kept=history.kept_steps).sentence
        for history in (anew, resumed)
    ]
    assert sentences == ["done in 3 s, 8 steps in the last of 2 attempts", "done in 3 s, 16 steps in 2 attempts"]
