from __future__ import annotations

import itertools

import pytest

from nbaccel.display.history import Rows


def test_rows_are_thinned_evenly_and_the_last_one_stays() -> None:
    rows = Rows(most_rows=100)
    for step in range(10_000):
        rows.add(step, {"loss": 1 / (step + 1)})
    steps = [row["step"] for row in rows]
    assert len(steps) == len(rows) <= 102
    assert (steps[0], steps[-1], rows[-1]["step"]) == (0, 9_999, 9_999)
    assert len({after - before for before, after in itertools.pairwise(steps[:-1])}) == 1


def test_wide_rows_are_thinned_sooner() -> None:
    rows = Rows(most_values=1_000)
    for step in range(100):
        rows.add(step, {f"norm {name}": 0.0 for name in range(100)})
    assert 2 <= len(rows) <= 11


def test_rows_behave_like_a_list_of_dicts() -> None:
    rows = Rows()
    rows.add(0, {"loss": 2.0})
    rows.add(1, {"acc": 0.5, "note": "warm"})
    assert rows == [{"step": 0, "loss": 2.0}, {"step": 1, "acc": 0.5, "note": "warm"}]
    assert rows[0:1] == [{"step": 0, "loss": 2.0}]
    assert {"step": 0, "loss": 2.0} in rows
    assert rows != [{"step": 0, "loss": 2.0}]
    with pytest.raises(IndexError):
        rows[2]
    assert Rows() == []
    assert not Rows()
