from __future__ import annotations

import itertools

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
    log.extend([(0, {"loss": 2.0}), (1, {"loss": 1.0})], lost=3)
    assert list(log) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}]
    assert log.lost == 3
