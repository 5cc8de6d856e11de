"""What a program logs: where it goes, on which rank, in which order, and what is said when it cannot."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.events import Event, Metric, emit, outlet
from nbaccel.testing import run_ranks
from nbaccel.tracking import BlankTracker, GeneralTracker, find_tracker, on_main_process, tracker_names
from nbaccel.train.step.readings import Reading


class Kept(GeneralTracker):
    """A tracker of one's own."""

    name = "kept"

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.rows

    def start(self) -> None:
        self.rows.append(("start",))

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.rows.append(("config", dict(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.rows.append((step, dict(values), *([options] if options else [])))

    def finish(self) -> None:
        self.rows.append(("finish",))


class CountsItself(Kept):
    name = "counts"
    numbers_steps = True


def test_a_tracker_is_started_told_the_configuration_fed_and_finished() -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5, requires_grad=True)}, step=4, log_kwargs={"kept": {"commit": False}})
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert kept.rows == [
        ("start",),
        ("config", {"lr": 0.1}),
        (4, {"loss": 0.5}, {"commit": False}),
        (0, {"loss": 1}),
        ("finish",),
    ]
    accelerator.log({"loss": 2})  # goes to the notebook only
    assert kept.rows[-1] == ("finish",)


def test_none_is_no_value_and_reaches_no_tracker() -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5, "ema_decay": None}, step=0)
    accelerator.log({"loss": torch.tensor(0.25), "ema_decay": None}, step=1)
    with outlet(kept):  # as a sink of events too
        emit(Metric({"loss": 0.5, "ema_decay": None}, step=2))
    accelerator.end_training()
    assert kept.rows[1:-1] == [(0, {"loss": 0.5}), (1, {"loss": 0.25}), (2, {"loss": 0.5})]


class WrittenForAccelerate(GeneralTracker):
    """As Accelerate's documentation shows a tracker of one's own."""

    name = "written"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.said: list[Any] = []

    @property
    def tracker(self) -> str:
        return self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.said.append((step, values))


def test_a_tracker_that_was_written_for_accelerate_works_beside_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.base.tracking.find_spec", lambda name: None)  # of the services, none is here
    mine = WrittenForAccelerate("run")
    accelerator = Accelerator(log_with=["all", mine])
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3)
    assert accelerator.get_tracker("written", unwrap=True) == "run"
    accelerator.end_training()
    assert mine.said == [{"lr": 0.1}, (3, {"loss": 1.0})]


def test_a_tracker_that_counts_its_rows_gets_only_steps_that_the_program_gave() -> None:
    tracker = CountsItself()
    accelerator = Accelerator(log_with=[tracker])
    accelerator.init_trackers("digits")
    accelerator.log({"a": 1})
    accelerator.log({"a": 2}, step=7)
    accelerator.end_training()
    assert tracker.rows[1:-1] == [(None, {"a": 1}), (7, {"a": 2})]


def test_without_trackers_a_log_is_an_event_and_nothing_else() -> None:
    events: list[Event] = []
    accelerator = Accelerator(log_with="jsonl")
    with outlet(events.append):
        accelerator.log({"loss": 0.5}, step=2)
    assert events == [Metric({"loss": 0.5}, 2)]
    assert accelerator.trackers == []


def test_the_event_is_emitted_with_trackers_too(tmp_path: Path) -> None:
    events: list[Event] = []
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits")
    with outlet(events.append):
        accelerator.log({"loss": 0.5}, step=2)
    accelerator.end_training()
    assert events == [Metric({"loss": 0.5}, 2)]
    assert json.loads((tmp_path / "digits" / "metrics.jsonl").read_text()) == {"step": 2, "loss": 0.5}


def _logs_in_ranks(folder: Path) -> tuple[list[str], str, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    kept, everywhere = Kept(), Kept()
    everywhere.name, everywhere.main_process_only = "everywhere", False
    accelerator = Accelerator(log_with=["jsonl", kept, everywhere], project_dir=folder)
    accelerator.init_trackers("digits", {"lr": 0.1})
    accelerator.log({"rank": accelerator.process_index}, step=0)
    accelerator.log({"rank": torch.tensor(float(accelerator.process_index)), "note": "x"}, step=1, average=True)
    names = [tracker.name for tracker in accelerator.trackers]
    blank = repr(accelerator.get_tracker("jsonl", unwrap=True).parent.mkdir(exist_ok=True))
    accelerator.end_training()
    return names, blank, kept.rows, everywhere.rows


def test_only_rank_0_writes_and_averages_are_of_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _logs_in_ranks, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 0, "rank": 0}, {"step": 1, "rank": 0.5, "note": "x"}]
    assert first[0] == ["jsonl", "kept", "everywhere"]
    assert second[0] == ["everywhere"]
    assert second[1] == "BlankTracker()"
    assert second[2] == []
    assert first[3][2:4] == [(0, {"rank": 0}), (1, {"rank": 0.5, "note": "x"})]
    assert second[3][2:4] == [(0, {"rank": 1}), (1, {"rank": 0.5, "note": "x"})]


def test_averages_are_exact_for_counts_and_leave_one_process_alone() -> None:
    def counts() -> list[Any]:
        kept = Kept()
        accelerator = Accelerator(log_with=kept)
        accelerator.init_trackers("digits")
        accelerator.log({"n": 2**40 + 2 * accelerator.process_index, "text": "x", "t": torch.ones(1)}, average=True)
        return kept.rows[1:]

    assert run_ranks(2, counts)[0] == [(0, {"n": 2**40 + 1, "text": "x", "t": 1.0})]
    assert run_ranks(1, counts)[0] == [(0, {"n": 2**40, "text": "x", "t": 1.0})]


def test_a_rank_that_does_not_track_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> int:
        read: list[Any] = []
        monkeypatch.setattr(
            "nbaccel.features.trackers.tracker_hub.Reading", lambda values: read.append(values) or Reading(values)
        )
        accelerator = Accelerator(log_with=Kept())
        accelerator.init_trackers("digits")
        accelerator.log({"loss": torch.ones(())})
        return len(read)

    assert run_ranks(2, counts) == [1, 0]


def test_get_tracker_gives_the_tracker_or_what_it_wraps() -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    with pytest.raises(ValueError, match="there is no tracker 'kept'; none is open: call init_trackers first"):
        accelerator.get_tracker("kept")
    accelerator.init_trackers("digits")
    assert accelerator.get_tracker("kept") is kept
    assert accelerator.get_tracker("kept", unwrap=True) is kept.rows
    with pytest.raises(ValueError, match="there is no tracker 'wandb'; open are 'kept'"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"one of 'all', 'aim', 'clearml', 'comet_ml', 'csv', .*got 'neptune'"):
        Accelerator(log_with="neptune")


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"objects on nbaccel\.tracking\.GeneralTracker, got int"):
        Accelerator(log_with=[3])  # type: ignore[list-item]

    class Nameless(Kept):
        pass

    del Kept.name
    try:
        with pytest.raises(NotImplementedError, match="Nameless has no `name`"):
            Accelerator(log_with=Nameless())
    finally:
        Kept.name = "kept"
    with pytest.raises(TypeError, match=r"abstract method '?log"):
        type("Half", (GeneralTracker,), {"name": "half", "tracker": None})()


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.base.tracking.find_spec", lambda name: None)
    accelerator = Accelerator(log_with="wandb")
    with pytest.raises(ModuleNotFoundError, match=r"(?s)needs the package wandb.*pip install 'nbaccel\[wandb\]'"):
        accelerator.init_trackers("digits")
    with pytest.raises(ModuleNotFoundError, match=r"(?s)needs the package swanlab.*pip install swanlab$"):
        Accelerator(log_with="swanlab").init_trackers("digits")


def test_a_tracker_that_writes_files_asks_for_a_folder() -> None:
    with pytest.raises(ValueError, match=r'Accelerator\(log_with=.csv., project_dir="runs"\)'):
        Accelerator(log_with="csv").init_trackers("digits")


def test_all_means_those_that_can_work_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nbaccel.base.tracking.find_spec", lambda name: None)
    with_folder = Accelerator(log_with="all", project_dir=tmp_path)
    with_folder.init_trackers("digits")
    assert [tracker.name for tracker in with_folder.trackers] == ["csv", "jsonl"]
    with_folder.end_training()
    without = Accelerator(log_with="all")
    without.init_trackers("digits")
    assert without.trackers == []


def test_a_name_that_stands_twice_is_one_tracker(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with=["csv", "csv"], project_dir=tmp_path)
    assert accelerator.log_with == ["csv"]


def test_our_trackers_are_known_without_metadata_and_those_of_other_packages_by_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        EntryPoint("csv", "no_such_module:Csv", "x"),
        EntryPoint("theirs", "nbaccel.base.tracking:BlankTracker", "x"),
    ]
    monkeypatch.setattr("nbaccel.train.named_trackers.entry_points", lambda group: entries)
    assert find_tracker("csv").__module__.startswith("nbaccel.")
    assert find_tracker("theirs") is BlankTracker
    assert {"csv", "theirs", "wandb"} <= set(tracker_names())


def test_init_kwargs_reach_the_tracker_they_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits", init_kwargs={"tensorboard": {"filename_suffix": ".mine"}})
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert type(writer).__name__ == "SummaryWriter"
    accelerator.end_training()
    assert all(name.endswith(".mine") for name in os.listdir(tmp_path / "digits"))


def test_trackers_of_a_kernel_are_opened_anew_in_a_forked_rank(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1})

    def logs() -> int:
        accelerator.log({"rank": accelerator.process_index}, step=accelerator.num_processes)
        count = len(accelerator.trackers)
        accelerator.end_training()
        return count

    assert run_ranks(2, logs) == [1, 0]
    accelerator.log({"rank": -1}, step=9)
    accelerator.end_training()
    rows = [json.loads(line) for line in (tmp_path / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 2, "rank": 0}, {"step": 9, "rank": -1}]


def test_an_accelerator_travels_without_its_open_files(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits")
    there = pickle.loads(pickle.dumps(accelerator))
    there.log({"loss": 1.0}, step=0)
    assert (tmp_path / "digits" / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.0}\n'
    there.end_training()
    accelerator.end_training()


def test_init_trackers_again_finishes_the_run_before(tmp_path: Path) -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=[kept, "jsonl"], project_dir=tmp_path)
    for name in ("first", "second"):
        accelerator.init_trackers(name)
        accelerator.log({"a": 1})
    accelerator.end_training()
    assert [row[0] for row in kept.rows] == ["start", 0, "finish", "start", 0, "finish"]
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


class _Late:
    """An event of a device that has not reached it."""

    def __init__(self) -> None:
        self.waited = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited += 1


def test_rows_wait_for_their_device_in_order_and_the_step_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, late = Kept(), _Late()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits")

    class Slow(Reading):
        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__(values)
            self._arrivals = {torch.device("cuda"): late} if "slow" in values else {}

    monkeypatch.setattr("nbaccel.features.trackers.tracker_hub.Reading", Slow)
    accelerator.log({"slow": torch.ones(())}, step=0)
    accelerator.log({"quick": 2}, step=1)
    assert kept.rows == [("start",)]
    assert late.waited == 0
    accelerator.end_training()
    assert kept.rows[1:] == [(0, {"slow": 1}), (1, {"quick": 2}), ("finish",)]
    assert late.waited == 1


def test_rows_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits")
    monkeypatch.setattr(Reading, "has_arrived", False)
    for step in range(100):
        accelerator.log({"a": torch.ones(())}, step=step)
    assert len(kept.rows) == 1 + 100 - 64
    accelerator.end_training()
    assert [row[0] for row in kept.rows[1:-1]] == list(range(100))


def test_plain_numbers_do_not_pass_rows_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits")
    accelerator.log({"a": 1}, step=0)
    monkeypatch.setattr(Reading, "has_arrived", False)
    accelerator.log({"a": torch.ones(())}, step=1)
    accelerator.log({"a": 2}, step=2)
    assert [row[0] for row in kept.rows] == ["start", 0]
    accelerator.end_training()
    assert [row[0] for row in kept.rows[1:-1]] == [0, 1, 2]


def test_a_logged_tensor_is_what_it_was_when_it_was_logged() -> None:
    kept = Kept()
    accelerator = Accelerator(log_with=kept)
    accelerator.init_trackers("digits")
    loss, weights = torch.zeros(()), torch.zeros(3)
    accelerator.log({"loss": loss, "weights": weights, "nested": {"loss": loss}})
    loss += 1
    weights += 1
    (_, values) = kept.rows[1]
    assert values["loss"] == 0.0
    assert values["nested"] == {"loss": 0.0}
    assert values["weights"].tolist() == [0, 0, 0]
    accelerator.end_training()


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    class Broken(Kept):
        name = "broken"

        def finish(self) -> None:
            raise OSError("disk full")

    kept = Kept()
    accelerator = Accelerator(log_with=[kept, Broken()])
    accelerator.init_trackers("digits")
    with pytest.raises(OSError, match="disk full"):
        accelerator.end_training()
    assert kept.rows[-1] == ("finish",)


@pytest.mark.slow
def test_a_program_that_ends_without_a_word_has_its_trackers_finished(tmp_path: Path) -> None:
    program = """
import sys
from nbaccel import Accelerator
accelerator = Accelerator(log_with="tensorboard", project_dir=sys.argv[1])
accelerator.init_trackers("digits")
accelerator.log({"loss": 0.5}, step=3)
tracker = accelerator.get_tracker("tensorboard")
finish = tracker.finish
tracker.finish = lambda: (finish(), print("finished"))
"""
    pytest.importorskip("tensorboard")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "finished\n"


def test_a_decorated_method_of_a_tracker_runs_on_rank_0() -> None:
    class Mine:
        @on_main_process
        def who(self) -> str:
            """Says it."""
            return os.environ["RANK"]

    assert run_ranks(2, lambda: Mine().who()) == ["0", None]
    assert Mine.who.__doc__ == "Says it."
