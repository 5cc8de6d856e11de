"""The order of trials: what is tried, how often, and which change is advised. Trials are computed, not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbaccel.base.settings import RunSettings
from nbaccel.features.speed.candidates import Machine, candidates
from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.speed import SpeedSearch
from nbaccel.features.speed.speed_comparison import SpeedTrial
from nbaccel.launching.ipc.spec import Devices, Start
from nbaccel.launching.plan import LaunchPlan
from nbaccel.options.run_options import RunOptions

LOADER: dict[str, Any] = {
    "name": "loader",
    "num_workers": 0,
    "batch_size": 32,
    "can_grow": True,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "samples": 10_000,
}
OPTIMIZER = {"name": "optimizer", "is_of_torch": True, "can_fuse": True, "fused": False, "tensors": 40}
MODEL = {"name": "model", "has_convolutions": False, "is_random": False, "is_compiled": False}
TIMES = {"whole_s": 3.0, "first_step_s": 1.0, "loader_s": 1.0, "draws": False}
FACTS: dict[str, Any] = {**TIMES, "loader": LOADER, "optimizer": OPTIMIZER, "model": MODEL}
CPUS = Machine(ranks=2, cpus=4, threads=2)

Speed = Callable[[SpeedChange], float]


class FakeSearch(SpeedSearch):
    """A search whose trials have the speeds that a function says, and take `seconds` of a clock of its own."""

    def __init__(
        self,
        speed: Speed,
        budget_s: float = 600.0,
        facts: dict[str, Any] | None = None,
        samples_of_one_rank: int = 32,
    ) -> None:
        start = Start("fork", "the notebook has not used CUDA")
        plan = LaunchPlan(RunOptions(), Devices(2), start, RunSettings(mixed_precision="no"), 1)
        unused: Any = None
        super().__init__(unused, plan, unused, None, budget_s, CPUS)
        self._speed = speed
        self._facts = FACTS if facts is None else facts
        self.tried: list[str] = []
        self._samples_of_one_rank = samples_of_one_rank

    def _trial(self, change: SpeedChange, limit_s: float) -> SpeedTrial:
        self.tried.append(str(change))
        speed = self._speed(change)
        if not speed:
            return SpeedTrial(why_not="out of memory")
        samples = self._samples_of_one_rank if change.ranks else 32 * change.batch_factor
        return SpeedTrial(speed, samples, [[1.0]], 1.0, facts=self._facts)


def searched(speed: Speed, **options: Any) -> FakeSearch:
    search = FakeSearch(speed, **options)
    search.run()
    return search


def test_each_change_is_tried_beside_the_cell_as_it_is() -> None:
    search = searched(lambda change: 10.0)
    assert search.tried[:15] == [
        *["the cell as it is"] * 2,
        *["-n 1", "num_workers=1", "the cell as it is"],
        *["num_workers=2", "num_workers=4", "the cell as it is"],
        *["batch size x 2", "batch size x 4", "the cell as it is"],
        *["batch size x 8", "fused=True", "the cell as it is"],
        "model.compile()",
    ]


@pytest.mark.parametrize(
    ("samples", "numbers"), [(32, "yes"), (16, "changes the training: 16 samples in a step, not 32")]
)
def test_one_rank_is_advised_where_it_is_faster_and_marked_where_a_step_has_other_samples(
    samples: int, numbers: str
) -> None:
    search = searched(
        lambda change: (90.0 if change.ranks else 10.0) / change.batch_factor, samples_of_one_rank=samples
    )
    advised = search.advised()
    assert advised is not None
    assert (str(advised.change), search.found.numbers(advised)) == ("-n 1", numbers)


def test_where_nothing_is_faster_nothing_is_advised() -> None:
    assert searched(lambda change: 10.0 / change.batch_factor).advised() is None


def test_what_is_faster_is_tried_again_and_advised() -> None:
    search = searched(lambda change: (30.0 if change.optimizer else 10.0) / change.batch_factor)
    assert str(search.advised().change) == "fused=True"  # type: ignore[union-attr]
    assert search.tried.count("fused=True") == 2


def test_the_fewest_workers_that_do_are_taken() -> None:
    def speed(change: SpeedChange) -> float:
        return {0: 10.0, 1: 19.0, 2: 30.0, 4: 30.5}[change.loader.get("num_workers", 0)] / change.batch_factor

    advised = searched(speed).advised()
    assert advised is not None
    assert str(advised.change) == "num_workers=2"


def test_the_best_of_all_families_are_tried_together() -> None:
    def speed(change: SpeedChange) -> float:
        workers = 2.0 if change.loader.get("num_workers") == 2 else 1.0
        return 10.0 * workers * (1.5 if change.optimizer else 1.0) / change.batch_factor

    advised = searched(speed).advised()
    assert advised is not None
    assert str(advised.change) == "num_workers=2, fused=True"


def test_together_are_not_advised_where_one_alone_is_as_fast() -> None:
    def speed(change: SpeedChange) -> float:
        return (20.0 if change.optimizer or change.compiles else 10.0) / change.batch_factor

    advised = searched(speed).advised()
    assert advised is not None
    assert str(advised.change) in ("fused=True", "model.compile()")


@pytest.mark.parametrize(("gain", "expected"), [(1.1, "fused=True"), (1.9, "fused=True, batch size x 2")])
def test_a_change_of_the_training_has_to_be_worth_it(gain: float, expected: str) -> None:
    def speed(change: SpeedChange) -> float:
        larger = gain if change.batch_factor > 1 else 1.0
        return 10.0 * (2.0 if change.optimizer else 1.0) * larger / change.batch_factor

    advised = searched(speed).advised()
    assert advised is not None
    assert str(advised.change) == expected


def test_a_still_larger_batch_is_not_tried_where_the_last_has_not_helped() -> None:
    search = searched(lambda change: 10.0 / change.batch_factor)
    assert "batch size x 2" in search.tried
    assert "batch size x 4" not in search.tried


def test_a_change_that_fails_is_a_row_with_its_reason_and_is_not_tried_again() -> None:
    search = searched(lambda change: 0.0 if change.compiles else 10.0 / change.batch_factor)
    (row,) = [row for row in search.found.rows if row.change.compiles]
    assert row.why_not == "out of memory"
    assert search.tried.count("model.compile()") == 1


def test_a_trial_that_takes_too_long_is_a_row_that_says_so() -> None:
    def speed(change: SpeedChange) -> float:
        if change.compiles:
            raise TimeoutError
        return 10.0 / change.batch_factor

    (row,) = [row for row in searched(speed).found.rows if row.change.compiles]
    assert row.why_not == "too slow"


def test_where_no_time_is_left_nothing_more_is_tried() -> None:
    search = searched(lambda change: 10.0, budget_s=0.5)
    assert search.tried == ["the cell as it is"]
    assert {row.why_not for row in search.found.rows[:2]} == {"not tried"}


def test_workers_that_help_are_refined() -> None:
    def speed(change: SpeedChange) -> float:
        workers = 2.0 if change.loader.get("num_workers") == 2 else 1.0
        return 10.0 * workers * (1.5 if change.loader.get("persistent_workers") else 1.0) / change.batch_factor

    advised = searched(speed).advised()
    assert advised is not None
    assert str(advised.change) == "num_workers=2, persistent_workers=True"


def test_workers_that_cost_more_than_they_bring_are_left_out_with_what_belongs_to_them() -> None:
    def speed(change: SpeedChange) -> float:
        if change.loader.get("num_workers", 4) == 0:
            return 40.0
        return 30.0 if change.loader.get("persistent_workers") else 10.0

    search = searched(speed, facts={**FACTS, "loader": {**LOADER, "num_workers": 4, "can_grow": False}})
    advised = search.advised()
    assert advised is not None
    assert str(advised.change) == "num_workers=0"
    assert not [row for row in search.found.rows if row.family == "together"]


# --- candidates


def names(machine: Machine = CPUS, precision: str = "no", has_samples: bool = True, **parts: Any) -> list[str]:
    return [str(row.change) for row in candidates({**FACTS, **parts}, machine, precision, has_samples)]


def test_workers_are_not_added_where_nobody_waits_for_batches() -> None:
    assert not [name for name in names(loader_s=0.01) if "workers" in name]
    assert [name for name in names(loader_s=0.01, loader={**LOADER, "num_workers": 4}) if "num_workers" in name] == [
        "num_workers=0",
        "num_workers=2",
    ]


def test_batches_leave_an_epoch_some_steps() -> None:
    assert [name for name in names(loader={**LOADER, "samples": 1100}) if "batch" in name] == ["batch size x 2"]
    assert not [name for name in names(has_samples=False) if "batch" in name]
    assert not [name for name in names(loader={**LOADER, "can_grow": False}) if "batch" in name]


def test_what_belongs_to_gpus_is_tried_on_gpus() -> None:
    on_t4 = names(Machine(1, 4, 4, (7, 5)))
    assert {"pin_memory=True", "-p fp16"} <= set(on_t4)
    assert not [name for name in on_t4 if "thread" in name]
    assert "-p bf16" in names(Machine(1, 4, 4, (8, 0)))
    assert not [name for name in names(Machine(1, 4, 4, (8, 0)), precision="bf16") if name.startswith("-p")]
    assert not [name for name in names() if name.startswith(("-p", "pin"))]


def test_the_precision_of_a_loop_that_prepares_nothing_is_a_row_that_says_so() -> None:
    search = FakeSearch(lambda change: 10.0, facts={**FACTS, "is_prepared": False})
    search._machine = Machine(1, 4, 4, (7, 5))
    search.run()
    (row,) = [row for row in search.found.rows if row.change.precision]
    assert row.why_not == "not tried: -p is for what is prepared"
    assert "-p fp16" not in search.tried
    assert "pin_memory=True" in search.tried


def test_what_the_training_has_is_not_tried() -> None:
    assert "fused=True" not in names(optimizer={**OPTIMIZER, "fused": True})
    assert "fused=True" not in names(optimizer={**OPTIMIZER, "tensors": 2})
    assert "model.compile()" not in names(model={**MODEL, "is_compiled": True})
    assert "channels_last" in names(model={**MODEL, "has_convolutions": True})
    assert names(loader=None, optimizer=None, model=None)[:-1] == ["-n 1"]
