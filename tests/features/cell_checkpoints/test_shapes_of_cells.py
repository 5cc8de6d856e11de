"""A cell that ends in the middle of a step goes on with the same bits, in shapes that people write."""

from __future__ import annotations

import builtins
import random
from pathlib import Path
from typing import Any

import pytest

from features.cell_checkpoints import left_values
from features.cell_checkpoints.marked_programs import ABOVE, Ended, Notebook, Refused, Saved, Saver, Watched, ended_at
from features.cell_checkpoints.shapes_of_cells import (
    EXACT,
    MADE_IN_THE_LOOP,
    OWN_ORDERS,
    REFUSED,
    SETUP,
    TRAININGS_THAT_ENDED,
    WITH_WORKERS,
)
from nbaccel.errors import CannotResume, CannotSave
from nbaccel.features.cell_checkpoints.marked_loops import LOOPS
from nbaccel.features.source.users_functions import uses_name


def left(notebook: Notebook) -> dict[str, Any]:
    return left_values.left(notebook.namespace, without=frozenset({"BEST"}))


def notebook_of(above: str, folder: Path) -> Notebook:
    return Notebook(ABOVE, f"BEST = {str(folder / 'best.pt')!r}", above)


def goes_on(above: str, cell: str, step: int, folder: Path) -> None:
    """End a cell when it is about to take a step, go on in a new notebook, and compare with one that nothing ended."""
    whole = notebook_of(above, folder)
    steps = whole.run_marked(cell, Watched()).steps
    saver = Saver()
    with ended_at(step), pytest.raises(Ended):
        notebook_of(above, folder).run_marked(cell, saver)
    again, saved = notebook_of(above, folder), Saved(saver, folder / "saved")
    assert again.run_marked(cell, Watched(), saved).steps == steps
    assert saved.has_arrived  # a run from the beginning would leave the same
    expected, found = left(whole), left(again)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if found[name] != value] == []


@pytest.mark.sample(9)
@pytest.mark.parametrize("shape", EXACT)
def test_a_cell_that_ended_goes_on_bit_by_bit(shape: str, tmp_path: Path) -> None:
    above, cell = EXACT[shape]
    goes_on(above, cell, random.Random(shape).randint(5, 11), tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", TRAININGS_THAT_ENDED)
@pytest.mark.parametrize("step", [3, 15, 20])
def test_what_a_training_has_returned_is_there_in_the_next_one(shape: str, step: int, tmp_path: Path) -> None:
    above, cell = TRAININGS_THAT_ENDED[shape]
    goes_on(above, cell, step, tmp_path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", OWN_ORDERS)
@pytest.mark.parametrize("step", [5, 11])
def test_an_order_that_hangs_on_more_than_three_generators_is_the_same_again(
    shape: str, step: int, tmp_path: Path
) -> None:
    above, cell = OWN_ORDERS[shape]
    goes_on(above, cell, step, tmp_path)


@pytest.mark.parametrize("shape", MADE_IN_THE_LOOP)
@pytest.mark.parametrize("step", [4, 10])
def test_a_model_that_a_round_makes_is_made_again_and_filled(shape: str, step: int, tmp_path: Path) -> None:
    above, cell = MADE_IN_THE_LOOP[shape]
    goes_on(above, cell, step, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("shape", WITH_WORKERS)
def test_a_loader_with_workers_goes_on_with_their_random_numbers(shape: str, tmp_path: Path) -> None:
    above, cell = WITH_WORKERS[shape]
    goes_on(above, cell, 8, tmp_path)


@pytest.mark.parametrize("shape", REFUSED)
def test_what_cannot_go_on_is_refused_before_the_second_step(shape: str, tmp_path: Path) -> None:
    above, cell, sentence = REFUSED[shape]
    notebook = notebook_of(above, tmp_path)
    with ended_at(2), pytest.raises((CannotSave, Refused)) as refused:
        notebook.run_marked(cell, Saver())
    assert sentence in str(refused.value)


def test_a_name_that_no_file_can_hold_and_nothing_reads_is_unbound_and_said(tmp_path: Path) -> None:
    """The run that goes on has come to the end of its loop, so that no line binds the name again."""
    above, cell = "", EXACT["REINFORCE, a distribution in a name"][1].replace("range(4)", "range(1)")
    saver = Saver()
    notebook_of(above, tmp_path).run_marked(cell, saver)
    again, saved = notebook_of(above, tmp_path), Saved(saver, tmp_path / "saved")
    again.run_marked(cell, Watched(), saved)
    assert "dist" not in again.namespace
    assert "dist (a Categorical) is not in the checkpoint, and is unbound until a line binds it" in saved.notes


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", range(3, 14))
def test_a_run_that_went_on_is_saved_and_goes_on_again(step: int, tmp_path: Path) -> None:
    """The saves of a run that goes on are of the same kind: the second end may come at any step after the first."""
    above, cell = EXACT["one train() function"]
    whole = notebook_of(above, tmp_path)
    whole.run_marked(cell, Watched())
    first, second = Saver(), Saver()
    with ended_at(step), pytest.raises(Ended):
        notebook_of(above, tmp_path).run_marked(cell, first)
    with ended_at(3), pytest.raises(Ended):
        notebook_of(above, tmp_path).run_marked(cell, second, Saved(first, tmp_path / "first", second))
    again = notebook_of(above, tmp_path)
    again.run_marked(cell, Watched(), Saved(second, tmp_path / "second"))
    assert left(again) == left(whole)


def test_a_cell_that_was_edited_is_refused_with_the_line(tmp_path: Path) -> None:
    saver = Saver()
    above, cell = EXACT["flat"]
    with ended_at(3), pytest.raises(Ended):
        notebook_of(above, tmp_path).run_marked(cell, saver)
    saved = Saved(saver, tmp_path / "saved")
    with pytest.raises(CannotResume) as refused:
        notebook_of(above, tmp_path).run_marked(cell.replace("range(3)", "range(4)"), Watched(), saved)
    assert str(refused.value) == (
        "the cell is another one than when this checkpoint was written (`for epoch in range(4):`, was `for epoch in "
        "range(3):`). Leave --resume out to begin anew."
    )


def test_a_set_whose_items_come_in_another_order_is_refused(tmp_path: Path) -> None:
    """As in a process with another PYTHONHASHSEED."""
    above = "names = ['alpha', 'beta', 'gamma']\n"
    cell = SETUP + "for name in ORDER:\n    for x, y in loader: history.append(step(model, opt, x, y))\n"
    saver = Saver()
    with ended_at(9), pytest.raises(Ended):
        notebook_of(f"{above}ORDER = dict.fromkeys(names)\n", tmp_path).run_marked(cell, saver)
    again = notebook_of(f"{above}ORDER = dict.fromkeys(names[1:] + names[:1])\n", tmp_path)
    with pytest.raises(CannotResume) as refused:
        again.run_marked(cell, Watched(), Saved(saver, tmp_path / "saved"))
    assert str(refused.value) == (
        "the loop in line 2, in which the run that is continued was at 'beta', comes to 'gamma' there: its items have "
        "another order now (a set? sort it)"
    )


def test_functions_have_their_own_code_again_afterwards(tmp_path: Path) -> None:
    above, cell = EXACT["one train() function"]
    notebook = notebook_of(above, tmp_path)
    plain = notebook.namespace["train"].__code__
    made = "def made():\n    for x, y in loader: opt.step()\n"
    with pytest.raises(ZeroDivisionError):
        notebook.run_marked(f"{made}{cell}1 / 0", Watched())
    assert notebook.namespace["train"].__code__ is plain or notebook.namespace["train"].__code__ == plain
    assert not uses_name(notebook.namespace["made"].__code__, LOOPS)
    assert not hasattr(builtins, LOOPS)


@pytest.mark.parametrize("step", [5, 7, 10, 15])
def test_a_cell_of_two_stages_goes_on_in_either(step: int, tmp_path: Path) -> None:
    above, cell = EXACT["two stages by one function"]
    goes_on(above, cell, step, tmp_path)
