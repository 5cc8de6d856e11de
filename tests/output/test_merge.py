"""Lines of several ranks in one order: a line of all ranks does not overtake a notice that its rank printed before."""

from __future__ import annotations

from nbaccel.output.merge import LineMerger

NOTICE = b"nbaccel: loader: each of 8 batches split over 2 ranks"


def test_a_line_of_all_ranks_comes_after_a_notice_that_its_rank_printed_before_it() -> None:
    merger = LineMerger([0, 1], lambda count: b"hidden")
    merger.push(0, "stderr", [b"a warning, which waits for the other rank's"], 0.0)
    merger.push(0, "stdout", [NOTICE, b"epoch 0"], 0.0)
    merger.push(1, "stdout", [b"epoch 0"], 0.0)
    shown = [(line.rank, line.text) for line in merger.release(0.0, 1e6)]
    assert shown == [(0, NOTICE), (None, b"epoch 0")]
