"""Trials beside the cell as it is: what counts as faster, and whether the numbers are equal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from nbaccel.features.speed.cell_speed import SpeedReport
from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.pasted_lines import PastedLine
from nbaccel.features.speed.speed_comparison import SpeedComparison, SpeedRow, SpeedTrial

WORKERS = SpeedChange(loader={"num_workers": 2})


def compared(
    change: SpeedChange,
    speeds: list[float],
    base: list[float],
    losses: tuple[list[float], list[float]] = ([1.0, 0.5], [1.0, 0.5]),
    **facts: Any,
) -> tuple[SpeedComparison, SpeedRow]:
    """Return a comparison in which trials of the cell as it is and of `change` follow each other."""
    found, row, at = SpeedComparison(), SpeedRow(change, "workers"), itertools.count()
    for number in range(max(len(speeds), len(base))):
        if number < len(base):
            found.base.trials.append(SpeedTrial(base[number], 32, [losses[0]], 1.0, facts=facts, at=next(at)))
        if number < len(speeds):
            samples = 32 * change.batch_factor
            row.trials.append(SpeedTrial(speeds[number], samples, [losses[1]], 1.0, at=next(at)))
    found.rows.append(row)
    return found, row


def test_a_change_is_faster_that_is_so_in_each_trial_by_more_than_the_noise() -> None:
    found, row = compared(WORKERS, [20.0, 22.0], [10.0, 11.0, 10.0])
    assert found.is_faster(row)
    assert found.ratio(row) == pytest.approx(2.0, abs=0.1)
    assert found.rate(row) == 21.0 * 32


@pytest.mark.parametrize(
    ("speeds", "base"),
    [
        ([10.4, 10.4], [10.0, 10.0, 10.0]),  # less than 5 %
        ([20.0], [10.0, 10.0]),  # one trial alone
        ([20.0, 9.9], [10.0, 10.0, 10.0]),  # not in each
        ([12.0, 12.0], [10.0, 13.0, 8.0]),  # less than the noise
        ([], [10.0]),
    ],
)
def test_a_change_is_not_faster(speeds: list[float], base: list[float]) -> None:
    found, row = compared(WORKERS, speeds, base)
    assert not found.is_faster(row)


def test_a_machine_that_becomes_faster_does_not_decide() -> None:
    found, row = compared(WORKERS, [15.0, 25.0], [10.0, 20.0, 30.0])
    assert found.ratios(row) == pytest.approx([1.0, 1.0])


def test_a_larger_batch_is_compared_by_samples_and_marked() -> None:
    found, row = compared(SpeedChange(batch_factor=4), [8.0, 8.0], [10.0, 10.0, 10.0], ([1.0], [2.0]))
    assert found.ratio(row) == pytest.approx(3.2)
    assert found.numbers(row) == "changes the training: 4 times fewer steps"
    assert found.may_be_advised(row)


FAST = [20.0, 20.0]
AS_IT_IS = [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("change", "losses", "facts", "said"),
    [
        (WORKERS, ([1.0, 0.5], [1.0, 0.5001]), {}, "yes"),
        (WORKERS, ([1.0, 0.5], [1.0, 0.6]), {}, "no"),
        (WORKERS, ([1.0, 0.5], [1.004, 0.5]), {}, "no"),
        (WORKERS, ([1.0, 0.5], [1.0, 0.502]), {}, "yes"),  # steps have made more of a difference in rounding
        (WORKERS, ([1.0, 0.5], [1.0, 0.6]), {"draws": True}, "random data"),
        (SpeedChange(optimizer={"fused": True}), ([1.0, 0.5], [1.0, 0.6]), {"draws": True}, "no"),
        (SpeedChange(precision="bf16"), ([1.0, 0.5], [1.01, 0.505]), {}, "yes"),
        (SpeedChange(precision="bf16"), ([1.0, 0.5], [1.01, 0.7]), {}, "no"),
        (SpeedChange(precision="fp16"), ([1.0, 0.5], [1.01, 0.99]), {}, "yes"),  # the first step was left out
        (SpeedChange(precision="fp16"), ([1.0, 0.5], [1.1, 0.5]), {}, "no"),
        (SpeedChange(channels_last=True), ([1.0, 0.5], [1.01, 0.505]), {}, "no"),
        (SpeedChange(channels_last=True), ([1.0, 0.5], [1.003, 0.501]), {}, "yes"),
        (SpeedChange(compiles=True), ([1.0, 0.5], [1.0, 0.7]), {"model": {"is_random": True}}, "random layers"),
        (SpeedChange(channels_last=True), ([1.0, 0.5], [1.0, 0.7]), {"model": {"is_random": True}}, "random layers"),
        (SpeedChange(precision="bf16"), ([1.0, 0.5], [1.0, 0.7]), {"model": {"is_random": True}}, "random layers"),
        (SpeedChange(optimizer={"fused": True}), ([1.0, 0.5], [1.0, 0.7]), {"model": {"is_random": True}}, "no"),
        (WORKERS, ([], []), {}, "no losses seen"),
    ],
)
def test_losses_are_compared(
    change: SpeedChange, losses: tuple[list[float], list[float]], facts: dict[str, Any], said: str
) -> None:
    found, row = compared(change, FAST, AS_IT_IS, losses, **facts)
    assert found.numbers(row) == said
    assert found.may_be_advised(row) == (said != "no")


def test_losses_that_differ_from_run_to_run_are_not_compared() -> None:
    found, row = compared(WORKERS, FAST, AS_IT_IS)
    found.base.trials[1] = SpeedTrial(10.0, 32, [[1.3, 0.5]], 1.0, at=2)
    assert found.numbers(row) == "differ from run to run"


def test_ranks_that_divide_a_batch_differently_have_equal_numbers() -> None:
    found, row = compared(WORKERS, FAST, AS_IT_IS)
    found.base.trials[:] = [replace(trial, losses=[[1.0, 0.4], [1.0, 0.6]]) for trial in found.base.trials]
    row.trials[:] = [replace(trial, losses=[[1.0, 0.55], [1.0, 0.45]]) for trial in row.trials]
    assert found.numbers(row) == "yes"


# --- the report


def test_the_table_has_the_fastest_first_and_what_failed_last() -> None:
    found, row = compared(WORKERS, FAST, AS_IT_IS)
    slower = SpeedRow(SpeedChange(loader={"num_workers": 4}), "workers", [SpeedTrial(5.0, 32, [[1.0, 0.5]], 1.0, at=9)])
    failed = SpeedRow(SpeedChange(compiles=True), "compile", [SpeedTrial(why_not="no compiler")])
    found.rows = [failed, slower, row, SpeedRow(SpeedChange(channels_last=True), "memory format")]
    line = PastedLine("Cell In[3], line 5", "loader = DataLoader(data, num_workers=2)")
    assert str(SpeedReport(found, row, [line])).splitlines() == [
        "change             speed                 x     numbers equal",
        "the cell as it is  320 samples/s (+-0%)  1.00",
        "num_workers=2      640 samples/s         2.00  yes",
        "num_workers=4      160 samples/s         0.50  yes",
        "model.compile()    no compiler",
        "channels_last      not tried",
        "num_workers=2: 2.00 x as fast, by",
        "  Cell In[3], line 5: loader = DataLoader(data, num_workers=2)",
        "too few trials to decide about: channels_last",
    ]


def test_where_nothing_helps_the_report_says_so() -> None:
    found, _ = compared(WORKERS, [10.0, 10.0], AS_IT_IS)
    assert str(SpeedReport(found)).splitlines()[-1] == "nothing helps"


def test_where_the_time_was_too_short_the_report_does_not_say_that_nothing_helps() -> None:
    found, _ = compared(WORKERS, [20.0], AS_IT_IS)
    assert str(SpeedReport(found)).splitlines()[-2:] == [
        "nothing is sure to help",
        "too few trials to decide about: num_workers=2",
    ]


def test_a_report_in_between_says_what_is_tried() -> None:
    found, _ = compared(WORKERS, [], AS_IT_IS)
    lines = str(SpeedReport(found, now="num_workers=2")).splitlines()
    assert lines[1:] == ["the cell as it is  320 samples/s (+-0%)  1.00", "trying: num_workers=2"]


def test_html_has_the_same_words_and_the_advised_row_is_bold() -> None:
    found, row = compared(WORKERS, FAST, AS_IT_IS)
    page = SpeedReport(found, row, [PastedLine("Cell In[1], line 1", "x = '<b>'")]).bundle()["text/html"]
    assert "x = &#x27;&lt;b&gt;&#x27;" in page
    assert page.count('<tr style="font-weight:600">') == 1
    assert "2.00 x as fast" in page


def test_a_trial_in_which_torch_compiled_nothing_has_no_speed() -> None:
    record = {"steps": 30, "seconds": 1.0, "samples_per_step": 8.0, "losses": [1.0], "is_whole": False}
    trial = SpeedTrial.of([{**record, "compiles_nothing": True}], 5.0)
    assert (trial.steps_per_s, trial.why_not) == (0.0, "torch compiles nothing of it")
    assert SpeedTrial.of([{**record, "compiles_nothing": False}], 5.0).steps_per_s == 30.0


@pytest.mark.parametrize(
    ("steps", "is_whole", "why_not"), [(1, True, "too few steps"), (6, True, ""), (1, False, ""), (0, False, "too few")]
)
def test_a_training_of_few_steps_is_not_measured(steps: int, is_whole: bool, why_not: str) -> None:
    record = {"steps": steps, "seconds": 0.5, "samples_per_step": 8, "losses": [1.0], "is_whole": is_whole}
    trial = SpeedTrial.of([record], 3.0)
    assert trial.why_not.startswith(why_not)
    assert bool(trial.steps_per_s) is not bool(why_not)
