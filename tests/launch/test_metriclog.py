from __future__ import annotations

import itertools

from nbaccel.events import Metric, RecordsLost
from nbaccel.launch.metriclog import MetricLog


def test_rows_are_thinned_evenly_and_the_last_one_stays() -> None:
    log = MetricLog(most_rows=100)
    for step in range(10_000):
        log.extend([(step, {"loss": 1 / (step + 1)})])
    steps = [row["step"] for row in log]
    assert len(steps) <= 102
    assert steps[0] == 0
    assert steps[-1] == 9_999
    gaps = {after - before for before, after in itertools.pairwise(steps[:-1])}
    assert len(gaps) == 1


def test_few_rows_are_all_kept() -> None:
    log = MetricLog()
    log.extend([(0, {"loss": 2.0}), (1, {"loss": 1.0})])
    assert list(log) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}]


def test_only_rank_0_is_heard_with_what_was_lost_of_it() -> None:
    log = MetricLog()
    for rank in (0, 1):
        log.feed(rank, 0.0, Metric({"loss": 2.0 + rank}, 5))
        log.feed(rank, 0.0, RecordsLost(3 + rank))
    assert list(log) == [{"step": 5, "loss": 2.0}]
    assert log.lost == 3
