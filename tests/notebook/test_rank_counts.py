"""Another number of ranks is named only where it was measured to be faster."""

from __future__ import annotations

from nbaccel.notebook.rank_counts import RankCounts


def test_the_fastest_other_number_of_ranks_is_named() -> None:
    counts = RankCounts()
    assert counts.note("train()", 2, 4.0, "Cell In[2]") == ""
    assert counts.note("train()", 1, 1.5, "Cell In[3]") == ""
    assert counts.note("train()", 1, 1.0, "Cell In[4]") == "", "of one number of ranks nothing is compared"
    assert counts.note("train()", 4, 9.0, "Cell In[5]") == "1 rank has done this cell in 1 s (Cell In[4]): -n 1"


def test_two_ranks_are_named_where_they_were_faster() -> None:
    counts = RankCounts()
    counts.note("train()", 2, 60.0, "Cell In[2]")
    assert counts.note("train()", 1, 100.0, "Cell In[3]") == "2 ranks have done this cell in 1 min (Cell In[2]): -n 2"


def test_nothing_is_said_of_other_cells_or_where_both_are_alike() -> None:
    counts = RankCounts()
    counts.note("train()", 1, 1.0, "Cell In[2]")
    assert counts.note("train(2)", 2, 4.0, "Cell In[3]") == ""
    assert counts.note("train()", 2, 1.05, "Cell In[4]") == ""
    counts.note("short()", 1, 0.1, "Cell In[5]")
    assert counts.note("short()", 2, 1.0, "Cell In[6]") == "", "nobody waits for less than a second"


def test_where_exchange_took_most_of_the_time_a_measurement_is_advised_once() -> None:
    counts = RankCounts()
    assert counts.note_exchange(None) == counts.note_exchange(0.5) == ""
    line = (
        "exchange and waiting took 64 % of the ranks' time: --speed 1min above this cell measures what is faster, one "
    )
    assert counts.note_exchange(0.64) == f"{line}rank too"
    assert counts.note_exchange(0.9) == ""
