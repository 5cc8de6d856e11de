"""Bars of a loop that does not know ranks: rank 0 draws them, and in all ranks they count."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from nbaccel.base.world import World
from nbaccel.launching.ipc.rank_part import RankTask
from nbaccel.launching.libraries import ONE_PROGRAM, OtherLibraries
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.testing import run_ranks


def _task(knows_ranks: bool) -> RankTask:
    task = FunctionTask(print)
    task.knows_ranks = knows_ranks
    return RankTask(task)


def _meeting() -> OtherLibraries:
    """What meets bars in this rank, from now on."""
    libraries = OtherLibraries(World.from_env(), store_path="a list of writers")
    libraries.meet(ONE_PROGRAM)
    return libraries


def _in_ranks(loop: Callable[[], Any], knows_ranks: bool = False) -> list[tuple[Any, str]]:
    """What `loop` returned and what it printed, by rank."""

    def run() -> tuple[Any, str]:
        _meeting().begin(_task(knows_ranks))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return loop(), printed.getvalue()

    return run_ranks(2, run)


def _tqdm() -> tuple[Any, ...]:
    from tqdm import tqdm, trange

    with tqdm(range(4), desc="steps", file=sys.stdout) as bar:
        steps = [(step, bar.n) for step in bar]
        bar.set_postfix(loss=0.5)
        tqdm.write("a line of the program")
        ends = bar.n, bar.total, bar.postfix
    by_hand = tqdm(total=10)
    by_hand.update(3)
    by_hand.close()
    return steps[-1][0], ends, by_hand.n, len(list(trange(5)))


def test_a_bar_of_tqdm_counts_in_all_ranks_and_is_drawn_by_rank_0() -> None:
    (first, drawn), (second, printed) = _in_ranks(_tqdm)
    assert first == second == (3, (4, 4, "loss=0.5"), 3, 5)
    assert "steps: 100%" in drawn
    assert printed == "a line of the program\n"


def test_a_program_that_knows_ranks_draws_where_it_says() -> None:
    assert all("steps: 100%" in printed for _, printed in _in_ranks(_tqdm, knows_ranks=True))


def test_a_bar_in_a_file_of_the_programs_own_is_written() -> None:
    def loop() -> str:
        from tqdm import tqdm

        own = io.StringIO()
        list(tqdm(range(3), file=own))
        return own.getvalue()

    assert all("3/3" in own for own, _ in _in_ranks(loop))


def test_bars_of_a_notebook_that_are_loaded_already_are_quiet_too() -> None:
    def loop() -> list[int]:
        from tqdm.auto import tqdm

        return [bar.n for bar in [tqdm(range(3))] for _ in bar][-1:]

    import tqdm.auto
    import tqdm.notebook  # noqa: F401

    (_, drawn), (_, printed) = _in_ranks(loop)
    assert "3/3" in drawn
    assert printed == ""


def test_ranks_that_stay_draw_again_for_a_task_that_knows_ranks() -> None:
    def run() -> list[bool]:
        bars, drew = _meeting(), []
        for knows_ranks in (False, True, False):
            bars.begin(_task(knows_ranks))
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                _tqdm()
            drew.append("10" in printed.getvalue())
        return drew

    assert run_ranks(2, run) == [[True, True, True], [False, True, False]]


def test_a_progress_of_rich_is_drawn_by_rank_0() -> None:
    pytest.importorskip("rich")

    def loop() -> tuple[int, bool]:
        from rich.progress import Progress, track

        with Progress() as progress:
            task = progress.add_task("epochs", total=3)
            for _ in range(3):
                progress.advance(task)
            ends = progress.tasks[0].completed, progress.finished
        return len(list(track(range(4), "batches"))), ends == (3, True)

    (first, drawn), (second, printed) = _in_ranks(loop)
    assert first == second == (4, True)
    assert "epochs" in drawn
    assert "batches" in drawn
    assert printed == ""


def test_bars_of_fastprogress_are_drawn_by_rank_0() -> None:
    pytest.importorskip("fastprogress")

    def loop() -> list[int]:
        import IPython.display
        from fastprogress import fastprogress

        def display(*args: Any, **kwargs: Any) -> Any:
            print("displayed")
            return type("Handle", (), {"update": lambda *args: print("updated")})()

        fastprogress.display = IPython.display.display = display
        fastprogress.HTML = getattr(fastprogress, "HTML", IPython.display.HTML)
        seen = []
        for of, inside in (
            (fastprogress.NBMasterBar, fastprogress.NBProgressBar),
            (fastprogress.ConsoleMasterBar, fastprogress.ConsoleProgressBar),
        ):
            epochs = of(range(2))
            for _ in epochs:
                seen += inside(range(3), parent=epochs)
                epochs.write("of the bar")
            seen += inside(range(2))
        return seen

    (first, drawn), (second, printed) = _in_ranks(loop)
    assert first == second == [0, 1, 2, 0, 1, 2, 0, 1] * 2
    assert "displayed" in drawn
    assert "of the bar" in drawn
    assert printed == ""


def test_a_bar_that_the_notebook_has_imported_begins_a_pass_as_in_the_notebook() -> None:
    """`tqdm.auto` calls iter() on what it is given, and iter() of a DataLoader draws a number of torch's."""

    def loop() -> list[int]:
        import tqdm.auto
        import tqdm.notebook

        from nbaccel.launching.rank.jupyter import _make_textual

        _make_textual(tqdm.notebook.tqdm_notebook)
        begun: list[int] = []

        class Loader:
            def __iter__(self) -> Any:
                begun.append(1)
                return iter(range(3))

        bar = tqdm.auto.tqdm(Loader(), total=3)
        return [len(begun), *bar, len(begun)]

    assert _in_ranks(loop, knows_ranks=True)[0] == ([1, 0, 1, 2, 2], ANY)
