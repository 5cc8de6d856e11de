"""The second part of a check: two runs that differ, and gradients that are not those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.base.hardware import Gpu
from nbaccel.base.settings import RunSettings
from nbaccel.features.check.findings import DryRunResult, FoundError
from nbaccel.features.check.full_check import FullCheck, StepGradients, compared
from nbaccel.launching.ipc.spec import Devices, Start
from nbaccel.launching.plan import LaunchPlan
from nbaccel.options.run_options import RunOptions

VALUES = [1.0, 2.0, 3.0]
COUNTS = itertools.count()


def plan(**options: Any) -> LaunchPlan:
    return LaunchPlan(
        RunOptions(**options), Devices(2), Start("fork", "a test"), RunSettings(mixed_precision="bf16"), 1
    )


def found(**facts: Any) -> DryRunResult:
    return DryRunResult([[], []], [facts, {}], None, 2.0, 0.0, lambda path: 0, incomparable={"took"})


def gradients(values: list[float] = VALUES, **record: Any) -> StepGradients:
    whole = {
        "why_not": "",
        "step": 1,
        "kinds": ["prepared"],
        "parameters": "a",
        "samples": ["0", "1"],
        "names": ["weight", "bias"],
        "sizes": [2, 1],
        **record,
    }
    return StepGradients(whole, torch.tensor(values))


def line(*of_ranks: StepGradients, one: StepGradients | None = None, is_own: bool = True) -> str:
    return str(compared(of_ranks, one or gradients(samples=["0", "1", "2", "3"]), is_own))


def test_equal_gradients_are_ok() -> None:
    first = gradients([1.0, 2.0, 3.00001])
    assert line(first, gradients(samples=["2", "3"])).startswith("ok: gradients of 2 ranks are those of one process")
    assert line(gradients(), gradients()).endswith("at step 1 in fp32, bit by bit")


def test_others_are_red_with_the_parameter_and_the_causes() -> None:
    twice = gradients([2.0, 4.0, 6.0])
    assert line(twice, twice).startswith(
        "red: gradients of 2 ranks differ from those of one process by 100 % at step 1 (most in bias): a model that is "
        "called around what prepare returned"
    )
    assert "gradients of rank 1 differ" in line(gradients(), twice)
    assert "a loss that depends on the batch as a whole" in line(twice, twice, is_own=False)
    assert line(gradients([1.0, 2.0, 3.002])).startswith("red: gradients")
    assert line(gradients([1.0, 2.0], sizes=[1, 1])).startswith("red: the ranks train other parameters")


@pytest.mark.parametrize(
    ("alone", "sentence"),
    [
        ({"parameters": "b"}, "the model begins with other weights there"),
        ({"samples": ["0", "7"]}, "its samples are others there: the data set draws random numbers"),
        ({"kinds": ["draws", "prepared"]}, "the cell draws random numbers between its batches"),
        ({"kinds": ["batch norm"]}, "the model has batch statistics"),
        ({"why_not": "the parameters are sharded"}, "the parameters are sharded"),
    ],
)
def test_what_cannot_be_compared_is_yellow(alone: Mapping[str, Any], sentence: str) -> None:
    said = line(gradients([9.0, 9.0, 9.0]), one=gradients(**alone))
    assert said.startswith(f"yellow: gradients cannot be compared with those of one process: {sentence}")


def test_samples_that_were_read_ahead_do_not_matter() -> None:
    ahead = gradients(samples=["0", "2", "4"]), gradients(samples=["1", "3", "5"])
    assert line(*ahead, one=gradients(samples=["0", "1", "2"])).startswith("ok")


def test_batches_whose_size_depends_on_the_number_of_processes_are_yellow() -> None:
    ranks = gradients(rows=8), gradients(samples=["2", "3"], rows=8)
    said = line(*ranks, one=gradients([9.0, 9.0, 9.0], samples=["0", "1", "2", "3", "4"], rows=32))
    assert said == (
        "yellow: gradients cannot be compared with those of one process: there are 32 samples in 2 batches, and 16 "
        "in those of the ranks: the size of a batch depends on the number of processes"
    )
    assert line(*ranks, one=gradients(samples=["0", "1", "2", "3"], rows=16)).startswith("ok")
    whole = gradients(rows=48), gradients(rows=48)  # a first batch that is whole in each rank, and a part of the second
    assert line(*whole, one=gradients(rows=64), is_own=False).startswith("ok")


# --- two runs


class Runs:
    """The further runs of a cell, with what they give.

    planned: the plans of those for gradients.  is_late: these are ended by their time limit.
    """

    is_late = False

    def __init__(self, folder: Path, second: DryRunResult, *attempts: list[StepGradients]) -> None:
        self._folder, self._second, self._attempts = folder, second, list(attempts)
        self.planned: list[tuple[LaunchPlan, int, int | None]] = []

    def again(self) -> DryRunResult:
        return self._second

    def attempt(
        self, plan: LaunchPlan, turns: int, steps: int | None
    ) -> tuple[DryRunResult, list[StepGradients | None]]:
        self.planned.append((plan, turns, steps))
        records: list[list[dict[str, Any]]] = [[] for _ in range(plan.devices.num_processes)]
        for rank, each in enumerate(self._attempts.pop(0)):
            each.values.numpy().tofile(self._folder / f"gradients-{rank}.f32")
            records[rank] = [{"kind": "gradients", **each.record}]
        result = replace(found(), records=records, is_late=self.is_late)
        return result, [StepGradients.read(result, self._folder, rank) for rank in range(len(records))]

    def lines(self, first: DryRunResult, **options: Any) -> list[str]:
        check = FullCheck(plan(**options), self.again, self.attempt)
        return [str(each) for each in check.lines(first)]


def with_loss(value: str, model: int = 1) -> DryRunResult:
    """Return what a dry run found; `took` differs in each."""
    return found(seen={"loss": (value, value), "took": (str(next(COUNTS)), "1 s")}, checksums={"model": model})


def test_equal_runs_are_ok_and_gradients_are_compared(tmp_path: Path) -> None:
    runs = Runs(tmp_path, with_loss("1"), [gradients(), gradients()], [gradients()])
    lines = runs.lines(with_loss("1"))
    assert lines[0] == "ok: two runs gave the same results"
    assert lines[1].startswith("ok: gradients of 2 ranks")
    (several, turns, steps), (alone, its_turns, its_steps) = runs.planned
    assert (several.devices.num_processes, turns, steps) == (2, 1, None)
    assert (alone.devices.num_processes, its_turns, its_steps) == (1, 2, None)
    assert several.settings.mixed_precision == alone.settings.mixed_precision == "no"


def test_a_loop_that_prepares_nothing_is_run_to_the_same_step(tmp_path: Path) -> None:
    raw = gradients(kinds=[], step=2)
    runs = Runs(tmp_path, with_loss("1"), [raw, raw], [raw])
    assert runs.lines(with_loss("1"))[1].startswith("ok: gradients of 2 ranks are those of one process at step 2")
    assert runs.planned[1][1:] == (1, 2)


def test_batches_of_each_rank_in_a_loop_that_prepares_nothing_are_not_compared(tmp_path: Path) -> None:
    raw = gradients(kinds=[], step=2)
    runs = Runs(tmp_path, with_loss("1"), [raw, raw])
    each = replace(plan(), settings=RunSettings(batches="each"))
    check = FullCheck(each, runs.again, runs.attempt)
    assert "yellow: gradients cannot be compared" in str(list(check.lines(with_loss("1")))[1])


def test_runs_that_differ_are_red_with_a_seed_and_yellow_without(tmp_path: Path) -> None:
    runs = Runs(tmp_path, with_loss("2", model=3))
    lines = runs.lines(with_loss("1"), seed=7)
    assert lines[0].startswith(
        "red: two runs with seed 7 differ in model, loss: random numbers come from outside of the"
    )
    assert lines[1].endswith("two runs of the ranks differ already")
    assert runs.lines(with_loss("1"))[0].startswith("yellow: two runs differ in model, loss")


CARD = Gpu(0, "GPU-0", "Tesla T4", 15 * 10**9, 0, (7, 5))


def test_on_gpus_sums_may_vary_from_run_to_run_and_gradients_are_compared_all_the_same(tmp_path: Path) -> None:
    def lines(values: list[float]) -> list[str]:
        runs = Runs(tmp_path, with_loss("2", model=3), [gradients(values), gradients(values)], [gradients()])
        on_gpus = replace(plan(seed=7), devices=Devices(2, (CARD, replace(CARD, index=1, uuid="GPU-1"))))
        check = FullCheck(on_gpus, runs.again, runs.attempt)
        return [str(each) for each in check.lines(with_loss("1"))]

    first, second, *_ = lines(VALUES)
    assert first.startswith("yellow: two runs with seed 7 differ in model, loss: random numbers come from outside")
    assert "; or a kernel of the GPU adds in another order each time, as torch.use_deterministic_algorithms" in first
    assert second.startswith("ok: gradients of 2 ranks are those of one process")
    assert lines([9.0, 9.0, 9.0])[1].endswith("two runs of the ranks differ already")


def test_what_differs_where_the_training_does_not_may_be_a_measurement(tmp_path: Path) -> None:
    def lines(**options: Any) -> list[str]:
        runs = Runs(tmp_path, with_loss("2"), [gradients(), gradients()], [gradients()])
        return runs.lines(with_loss("1"), seed=7, **options)

    assert lines()[0] == "yellow: two runs with seed 7 differ in loss, though not in what they trained"
    assert lines()[1].startswith("ok: gradients of 2 ranks")
    assert lines(out=("loss",))[0].startswith("red: two runs with seed 7 differ in loss")


def test_a_cell_that_fails_is_not_run_again(tmp_path: Path) -> None:
    failed = replace(with_loss("1"), error=FoundError("NameError: x", "all 2 ranks"))
    assert Runs(tmp_path, with_loss("1")).lines(failed) == [
        "yellow: seeds and gradients were not checked: the cell did not come to its end"
    ]


def test_a_run_that_fails_where_the_first_one_did_not_is_yellow(tmp_path: Path) -> None:
    failed = replace(with_loss("1"), error=FoundError("KeyError: 7", "rank 1"))
    lines = Runs(tmp_path, failed).lines(with_loss("1"))
    assert lines[0] == "yellow: a second run of the cell failed, and the first one did not: KeyError: 7"


def test_no_step_is_nothing_to_compare(tmp_path: Path) -> None:
    runs = Runs(tmp_path, with_loss("1"), [])
    assert runs.lines(with_loss("1"))[1] == "ok: no optimizer steps, so there are no gradients to compare"


def test_a_first_step_that_does_not_come_in_time_is_no_lack_of_steps(tmp_path: Path) -> None:
    runs = Runs(tmp_path, with_loss("1"), [])
    runs.is_late = True
    assert runs.lines(with_loss("1"))[1] == (
        "yellow: gradients cannot be compared with those of one process: the cell takes too long to its first step: "
        "load data and models in a cell before"
    )
