"""Panel, picture and figure of a `Run`."""

from __future__ import annotations

from IPython.core.formatters import DisplayFormatter

from display.runs import a_run
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.launching.run import Run


def test_a_run_shows_itself_in_a_notebook() -> None:
    facts, state = RunFacts("Cell In[5]", plots=("loss", "acc")), RunState("done", "done in 50 s, 500 steps")
    run = Run([None], a_run(), None, "fork", "", "", 50.0, facts=facts, state=state)
    data, _ = DisplayFormatter().format(run)
    assert sorted(data) == ["text/html", "text/plain"]
    assert "done in 50 s, 500 steps" in data["text/html"]
    assert data["text/plain"].startswith("<Run: Cell In[5], done in 50 s, 500 steps, loss 0.")
    assert sorted(run.plot().bundle()[0]) == ["image/png", "text/plain"]
    assert [axes.get_title(loc="left").split()[0] for axes in run.figure().axes][:2] == ["loss", "acc"]
    assert [axes.get_title(loc="left").split()[0] for axes in run.figure("acc").axes][:2] == ["acc", "memory,"]
