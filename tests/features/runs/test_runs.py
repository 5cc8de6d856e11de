"""`nbaccel.runs`: the runs of a notebook that are over, their table, and their curves in one axis."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

import nbaccel
from display.runs import a_run
from nbaccel.base.events import Checkpoint, Loss, Metric, Progress, Resumed, emit
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts
from nbaccel.features.runs.runs import Runs
from nbaccel.launching.api import launch
from nbaccel.launching.run import Run, RunOrigin


def a_finished(
    title: str = "Cell In[5]",
    flags: str = "-n 2 --seed 1",
    choices: dict[str, str] | None = None,
    history: History | None = None,
    error: BaseException | None = None,
    value: Any = None,
) -> Run:
    """A run that is over, as the launcher remembers it."""
    run = Run([value], history or a_run(2, 20), error, "fork", "", "/tmp/run.log", 41.0, facts=RunFacts(title))
    run.origin = RunOrigin(flags, choices or {"num-processes": "2"}, seed=1, began=1e9)
    return run.light()


def remembered(*runs: Run) -> Runs:
    found = Runs()
    for run in runs:
        found.add(run)
    return found


def losses(first: int, last: int, scale: float = 1.0) -> History:
    """A loss of every step from `first` on."""
    history = History(1)
    history.feed(0, 0.0, Progress(step=first, first=first))
    for step in range(first, last):
        history.feed(0, 0.1 * step, Loss(scale / (step + 1), step))
    history.feed(0, 0.1 * last, Progress(step=last, first=first))
    return history


# --- the sequence


def test_runs_are_numbered_from_one_and_the_last_run_is_the_last_of_them() -> None:
    before = len(nbaccel.runs)
    launch(pow, 1, (2, 5), cpu=True, start_method="fork", seed=3)
    run = launch(pow, 1, (2, 6), cpu=True, start_method="inline", check=False)
    runs = nbaccel.runs
    assert len(runs) == before + 2
    assert runs[-1] is nbaccel.last_run
    assert (runs[-2].value, runs[-1].value) == (32, 64) == (32, run.value)
    assert runs[-1].number == runs[-2].number + 1 == runs.newest.number
    assert runs[-2].origin.flags == "num_processes=1, cpu=True, start_method='fork', seed=3"
    assert (runs[-2].origin.seed, runs[-1].origin.seed) == (3, None)
    assert runs[-2].origin.began <= runs[-1].origin.began
    assert [part.value for part in runs[-2:]] == [32, 64]
    assert type(runs[-2:]) is Runs


def test_a_thousand_runs_are_kept_and_their_numbers_go_on() -> None:
    run = a_finished(history=a_run(1, 3))
    runs = remembered(*(replace(run) for _ in range(1_003)))
    assert (len(runs), runs[0].number, runs[-1].number) == (1_000, 4, 1_003)


def test_runs_before_the_last_four_are_thinned_and_keep_their_numbers_and_words() -> None:
    long, short = a_run(2, 1_000), 7
    whole = a_finished(history=long, value=["x" * 20_000])
    runs = remembered(whole, *(a_finished(value=short) for _ in range(4)))
    thin = runs[0]
    assert thin is not whole
    assert (thin.values, runs[1].values) == ([None], [7])
    assert len(whole.curves["loss"]) > 256 >= len(thin.curves["loss"]) > 64
    assert thin.curves["loss"].mean[-1] == pytest.approx(whole.curves["loss"].mean[-1], rel=0.05)
    assert thin.text == whole.text
    assert (thin.history.steps, thin.history.seconds) == (1_000, whole.history.seconds)
    assert runs[1].history is not thin.history
    assert len(thin.history.rows) <= 129


def test_a_thousand_remembered_runs_take_little_memory() -> None:
    run = a_finished(history=a_run(2, 1_000))
    thin = run.thinned()
    seen: set[int] = set()
    todo: list[Any] = [thin.history]
    nbytes = 0
    while todo:
        part = todo.pop()
        if id(part) not in seen and not isinstance(part, type) and not callable(part):
            seen.add(id(part))
            nbytes += sys.getsizeof(part)
            todo += gc.get_referents(part)
    assert nbytes < 250_000


# --- the table


def test_the_table_has_a_line_for_each_run() -> None:
    runs = remembered(
        a_finished(),
        a_finished("train(2.0)", "seed=3", error=ValueError("11 classes, and " + "much more " * 20)),
        a_finished(error=KeyboardInterrupt()),
    )
    heads, first, second, third = repr(runs).splitlines()
    assert heads.split() == ["run", "began", "cell", "flags", "seed", "last", "numbers", "time", "how", "it", "ended"]
    assert first.split()[0] == "1"
    assert "Cell In[5]  -n 2 --seed 1     1  loss 2.0" in first
    assert first.endswith("41 s  done, 20 steps")
    assert "failed, 20 steps: ValueError: 11 classes" in second
    assert second.endswith("…")
    assert third.endswith("stopped, 20 steps")
    assert max(map(len, repr(runs).splitlines())) < 220


def test_a_long_table_shows_the_latest_forty() -> None:
    runs = remembered(*(a_finished(history=a_run(1, 3)) for _ in range(50)))
    lines = repr(runs).splitlines()
    assert (len(lines), lines[1]) == (42, "… 10 earlier runs")
    assert lines[-1].split()[0] == "50"


def test_a_notebook_shows_a_table_without_script_in_which_texts_are_escaped() -> None:
    runs = remembered(a_finished("<script>alert(1)</script>", "--plot '<b>'"))
    data, _ = DisplayFormatter().format(runs)
    assert sorted(data) == ["text/html", "text/plain"]
    html = data["text/html"]
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert 'role="region"' in html
    assert html.count('scope="col"') == 9


def test_the_table_is_also_numbers() -> None:
    runs = remembered(a_finished(choices={"num-processes": "2", "seed": "1"}))
    (row,) = runs.table()
    assert (row["run"], row["cell"], row["seed"], row["num-processes"]) == (1, "Cell In[5]", 1, "2")
    assert (row["ended"], row["steps"], row["log_path"], row["goes_on_from"]) == ("done", 20, "/tmp/run.log", None)
    assert row["loss"] == runs[0].history.phase.series["loss"].latest
    pandas = pytest.importorskip("pandas")
    assert list(runs.to_pandas()["loss"]) == [row["loss"]]
    assert isinstance(runs.to_pandas(), pandas.DataFrame)


def test_before_the_first_run_there_is_an_empty_table() -> None:
    assert (len(Runs()), repr(Runs()), Runs().table()) == (0, "no run yet", [])
    assert "no run yet" in Runs()._repr_html_()


# --- beside each other


def test_compared_runs_share_an_axis_and_their_differences_are_named() -> None:
    runs = remembered(
        a_finished(choices={"seed": "1", "cpu": "true"}),
        a_finished(choices={"seed": "9"}),
        a_finished(choices={"seed": "2", "cpu": "true"}),
    )
    shown = runs.compare(1, 3)
    assert shown.text.splitlines()[-1] == "different: seed (run 1: 1, run 3: 2)"
    assert shown.png.startswith(b"\x89PNG")
    assert len(shown.png) < 60_000
    assert runs[:1].plot("acc").text.splitlines()[-1] == "the same flags"


def figure_of(monkeypatch: pytest.MonkeyPatch, show: Callable[[], Any]) -> Any:
    """The figure that `show` makes a picture of."""
    drawn: list[Any] = []
    monkeypatch.setattr("nbaccel.features.runs.runs.picture", lambda figure, text: drawn.append(figure))
    show()
    return drawn[0]


def with_validation() -> Run:
    history = a_run(1, 20)
    for step in range(0, 20, 5):
        history.feed(0, 2.0, Metric({"val_loss": 1 / (step + 1)}, step))
    return a_finished(history=history)


def test_the_loss_on_held_out_data_is_in_the_axis_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = remembered(with_validation(), with_validation(), a_finished())
    curves = figure_of(monkeypatch, runs.compare).axes[0]
    assert curves.get_title(loc="left") == "loss; with dots: val_loss"
    dotted = [line for line in curves.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dotted] == [[0, 5, 10, 15]] * 2
    assert len({line.get_color() for line in curves.lines}) == 3
    many = remembered(*(with_validation() for _ in range(9)))
    assert figure_of(monkeypatch, many.compare).axes[0].get_title(loc="left") == "loss"


def test_several_metrics_are_pictures_one_below_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = remembered(a_finished(), a_finished(history=losses(0, 9)), a_finished())
    figure = figure_of(monkeypatch, lambda: runs.compare(2, 3, metric=["acc", "loss"]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["acc", "", "loss", ""]
    assert [len(axes.lines) for axes in (figure.axes[0], figure.axes[2])] == [1, 2]
    tops = [axes.get_subplotspec().rowspan.start for axes in figure.axes]
    assert tops == [0, 0, 1, 1]
    one = figure_of(monkeypatch, lambda: runs.compare(metric="acc"))
    assert [axes.get_title(loc="left") for axes in one.axes] == ["acc", ""]
    assert len(figure_of(monkeypatch, lambda: runs.plot("acc", "loss")).axes) == 4
    monkeypatch.undo()
    assert len(runs.compare(metric=["acc", "loss"]).png) < 60_000


def test_a_number_or_a_curve_that_does_not_exist_is_named() -> None:
    runs = remembered(a_finished())
    with pytest.raises(KeyError, match="no curve of these runs is called 'f1'; there is: loss, acc"):
        runs.compare(1, metric=["loss", "f1"])
    with pytest.raises(KeyError, match="no run has number 7: there are runs 1 to 1"):
        runs.compare(7)
    with pytest.raises(KeyError, match="no curve of these runs is called 'f1'; there is: loss, acc"):
        runs.plot("f1")
    with pytest.raises(KeyError, match="there was no run yet"):
        Runs().numbered(1)


def test_a_resumed_run_is_joined_to_the_run_whose_checkpoint_it_loaded() -> None:
    first = losses(0, 30)
    first.feed(0, 2.0, Checkpoint("saves/step_20", 20, 0.1))
    first.feed(0, 3.0, Checkpoint("saves/step_25", 25, 0.1))
    second = losses(20, 60, scale=2.0)
    second.feed(0, 0.0, Resumed("saves/step_20", 20))
    third = losses(60, 70, scale=3.0)
    third.feed(0, 0.0, Resumed("elsewhere/step_60", 60))
    runs = remembered(a_finished(history=first), a_finished(), a_finished(history=second), a_finished(history=third))
    assert [run.goes_on_from for run in runs] == [0, 0, 1, 0]
    assert repr(runs).splitlines()[3].endswith("done, 40 steps, goes on from run 1")
    joined = runs[2:]._whole_curve(runs[2], "loss")
    assert joined.step == tuple(range(60))
    assert joined.mean[19:21] == pytest.approx((1 / 20, 2 / 21))
    assert runs.table()[2]["goes_on_from"] == 1
    runs[2].history.resumed = replace(second.resumed, step=20)
    assert runs.compare(3).png


def test_a_restart_within_a_run_is_no_resume() -> None:
    from nbaccel.base.events import Restarted

    history = losses(0, 5)
    history.feed(0, 1.0, Restarted("again"))
    history.feed(0, 1.0, Resumed("saves/step_3", 3))
    assert history.resumed is None


@pytest.mark.slow
def test_a_failed_run_of_ranks_is_in_the_table() -> None:
    def fails() -> None:
        emit(Metric({"acc": 0.5}, 0))
        raise ValueError("11 classes")

    launch(fails, 2, cpu=True, start_method="fork", check=False)
    assert "ValueError: 11 classes" in repr(nbaccel.runs[-1:])
    assert nbaccel.runs[-1:].table()[0]["ended"] == "failed"


def test_a_sweep_is_one_entry_and_its_runs_are_compared_by_their_values() -> None:
    parts = [a_finished(f"lr={lr}", flags="", choices={}) for lr in (0.1, 0.01)]
    for part, lr in zip(parts, (0.1, 0.01), strict=True):
        part.config = {"lr": lr}
    whole = a_finished("sweep of train", history=History(1))
    whole.runs = parts
    runs = remembered(a_finished(), whole)
    assert repr(runs).splitlines()[-1].endswith("done, 2 runs")
    words = runs.compare(2).text.splitlines()[-1]
    assert words == "different: lr (run 2.1: 0.1, run 2.2: 0.01)"
    words = runs.compare().text.splitlines()[-1]
    assert words == "different: lr (run 1: default, run 2.1: 0.1, run 2.2: 0.01)"
    assert [row["lr"] for row in Runs(whole.runs).table()] == [0.1, 0.01]
    assert [part.config for part in whole.thinned().runs] == [{"lr": 0.1}, {"lr": 0.01}]
