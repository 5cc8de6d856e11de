"""One contract, all trackers: each is opened offline in a folder, fed, closed, and read back by its own format."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.events import Metric, StepsEnded, emit, outlet
from nbaccel.testing import run_ranks
from nbaccel.tracking import GeneralTracker, find_tracker, tracker_names

Rows = list[tuple[int, dict[str, float]]]
"""What a tracker kept: step and numbers."""


@dataclass(frozen=True)
class Kind:
    """A tracker under test. read: what it left below a folder."""

    name: str
    read: Callable[[Path], Rows]


def _jsonl(folder: Path) -> Rows:
    rows = [json.loads(line) for line in (folder / "digits" / "metrics.jsonl").read_text().splitlines()]
    return [(row.pop("step"), row) for row in rows]


def _csv(folder: Path) -> Rows:
    with (folder / "digits" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row.pop("step")), {name: float(value) for name, value in row.items() if value}) for row in rows]


def _tensorboard(folder: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "digits"))
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            rows.setdefault(scalar.step, {})[name] = scalar.value
    return sorted(rows.items())


def _mlflow(folder: Path) -> Rows:
    rows: dict[int, dict[str, float]] = {}
    for path in folder.glob("mlruns/*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _time, value, step = line.split()[:3]
            rows.setdefault(int(step), {})[path.name] = float(value)
    return sorted(rows.items())


def _wandb(folder: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record

    sys.modules["wandb"].teardown()  # its service process may write the last records after the run is finished
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = [record.history for record in map(Record.FromString, _log_records(path)) if record.HasField("history")]
    return [
        (
            row.step.num,
            {key: json.loads(item.value_json) for item in row.item if not (key := _key(item)).startswith("_")},
        )
        for row in rows
    ]


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _log_records(path: Path) -> Iterator[bytes]:
    """The records of an offline run: a LevelDB log in blocks of 32 KiB, after a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _checksum, length, part = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


TEXT = {"jsonl": Kind("jsonl", _jsonl), "csv": Kind("csv", _csv)}
KINDS = [
    *TEXT.values(),
    Kind("tensorboard", _tensorboard),
    pytest.param(Kind("wandb", _wandb), marks=pytest.mark.slow),
    pytest.param(Kind("mlflow", _mlflow), marks=pytest.mark.slow),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """Each tracker in turn, with its library offline and writing below `tmp_path`."""
    chosen: Kind = request.param
    if not find_tracker(chosen.name).is_available():
        pytest.skip(f"{chosen.name} is not installed; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for set_by_library in ("MLFLOW_EXPERIMENT_ID", "WANDB_SERVICE"):
        monkeypatch.setenv(set_by_library, "")  # so that monkeypatch takes it away in the end
        monkeypatch.delenv(set_by_library)
    yield chosen
    if chosen.name == "wandb":
        sys.modules["wandb"].teardown()  # its service process


def made(kind: Kind, folder: Path) -> GeneralTracker:
    build: Any = find_tracker(kind.name)
    tracker: GeneralTracker = build("digits", folder)
    return tracker


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside the libraries
def test_rows_are_kept_with_their_steps_and_are_complete_when_finished(kind: Kind, tmp_path: Path) -> None:
    tracker = made(kind, tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [8, 4], "name": "cnn", "frozen": False})
    tracker.log({"loss": 0.5}, step=2)
    with outlet(tracker):
        emit(Metric({"loss": 0.25, "accuracy": 1}, step=7))
        emit(StepsEnded())
    assert tracker.tracker is not None
    tracker.finish()
    assert kind.read(tmp_path) == [(2, {"loss": 0.5}), (7, {"loss": 0.25, "accuracy": 1})]


def test_the_trackers_that_are_named_are_those_that_are_tested() -> None:
    names = [getattr(entry, "values", (entry,))[0].name for entry in KINDS]
    assert set(names) <= set(tracker_names())
    ours = {name for name in tracker_names() if find_tracker(name).__module__.startswith("nbaccel.")}
    assert {*names, *SERVICES} == ours
    accelerate = pytest.importorskip("accelerate.tracking")
    assert set(accelerate.LOGGER_TYPE_TO_CLASS) <= ours, "names that programs for Accelerate give to log_with"


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_second_run_of_a_name_goes_on_below_the_first(name: str, tmp_path: Path) -> None:
    kind = TEXT[name]
    for step in range(2):
        tracker = made(kind, tmp_path)
        tracker.start()
        tracker.log({"loss": float(step)}, step=step)
        tracker.finish()
    assert kind.read(tmp_path) == [(0, {"loss": 0.0}), (1, {"loss": 1.0})]


@pytest.mark.parametrize("name", ["jsonl", "csv"])
def test_a_row_is_in_the_file_before_the_run_is_over(name: str, tmp_path: Path) -> None:
    kind = TEXT[name]
    tracker = made(kind, tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, step=0)
    assert kind.read(tmp_path) == [(0, {"loss": 1.0})]
    tracker.finish()


def test_text_files_keep_the_configuration_and_what_is_no_number(tmp_path: Path) -> None:
    build: Any = find_tracker("jsonl")
    tracker = build("digits", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "out": Path("model")})
    tracker.log({"weights": torch.tensor([1.0, 2.0]), "note": "first", "loss": math.nan}, step=0)
    tracker.finish()
    assert json.loads((tmp_path / "digits" / "config.json").read_text()) == {"lr": 0.1, "out": "model"}
    row = json.loads((tmp_path / "digits" / "metrics.jsonl").read_text())
    assert (row["weights"], row["note"], math.isnan(row["loss"])) == ([1.0, 2.0], "first", True)


def test_a_new_column_of_a_csv_keeps_the_rows_above(tmp_path: Path) -> None:
    build: Any = find_tracker("csv")
    tracker = build("digits", tmp_path)
    tracker.start()
    tracker.log({"note": 'said "no", twice\nthen yes'}, step=0)
    tracker.log({"loss": 2.0}, step=1)
    tracker.log({"note": "last", "loss": 1.0}, step=2)
    tracker.finish()
    with tracker.tracker.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "note", "loss"],
            ["0", 'said "no", twice\nthen yes', ""],
            ["1", "", "2.0"],
            ["2", "last", "1.0"],
        ]


def test_tensorboard_keeps_texts_charts_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    build: Any = find_tracker("tensorboard")
    tracker = build("digits", tmp_path)
    tracker.start()
    tracker.log({"note": "hello", "weights": torch.arange(10.0), "both": {"train": 1.0, "test": 2.0}}, step=1)
    with pytest.warns(UserWarning, match=r"^TensorBoard keeps .* only; not logged: picture\. "):
        tracker.log({"picture": object(), "loss": 0.5}, step=1)
    tracker.log_images({"seen": torch.zeros(1, 4, 4, 3)}, step=1, dataformats="NHWC")
    assert tracker.writer is tracker.tracker
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    assert events.Tags()["histograms"] == ["weights"]
    assert events.Tags()["images"] == ["seen"]
    assert events.Tags()["scalars"] == ["loss"]
    assert events.Tags()["tensors"] == ["note/text_summary"]
    assert {path.name for path in (tmp_path / "digits").iterdir() if path.is_dir()} == {"both_train", "both_test"}


class _Api:
    """MLflow's functions that the tracker calls, with what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> str:
            self.calls.append((name, *args, *([options] if options else [])))  # type: ignore[arg-type]
            return name

        return call


def test_mlflow_is_given_parameters_in_pieces_and_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    api = _Api()
    monkeypatch.setitem(sys.modules, "mlflow", api)  # type: ignore[arg-type]
    build: Any = find_tracker("mlflow")
    tracker = build("digits", None, run_name="first", tags={"a": "b"})
    tracker.start()
    tracker.store_init_configuration({f"p{index}": "x" * 9000 for index in range(150)})
    with pytest.warns(UserWarning, match=r"MLflow keeps numbers only; not logged: note\. For texts"):
        tracker.log({"loss": 1, "note": "text"}, step=3)
    tracker.log({"note": "text"}, step=4)  # said once
    assert api.calls[:2] == [
        ("set_experiment", "digits"),
        ("start_run", {"run_name": "first", "tags": {"a": "b"}}),
    ]
    parameters = [call[1] for call in api.calls if call[0] == "log_params"]
    assert [len(some) for some in parameters] == [100, 50]
    assert {len(value) for some in parameters for value in some.values()} == {6000}
    assert ("log_metrics", {"loss": 1.0}, {"step": 3}) in api.calls
    assert tracker.active_run is tracker.tracker
    tracker.log_figure("a figure", "figure.png")
    tracker.log_artifact("model.safetensors", "models")
    tracker.log_artifacts("models")
    assert api.calls[-3:] == [
        ("log_figure", {"figure": "a figure", "artifact_file": "figure.png"}),
        ("log_artifact", {"local_path": "model.safetensors", "artifact_path": "models"}),
        ("log_artifacts", {"local_dir": "models", "artifact_path": None}),
    ]
    tracker.finish()
    assert api.calls[-1] == ("end_run",)


class _Library:
    """Stands in for a service's library: keeps what is called and set on it, by its dotted name."""

    def __init__(self, calls: list[Any], name: str, **values: Any) -> None:
        vars(self).update(_calls=calls, _name=name, **values)

    def __getattr__(self, name: str) -> _Library:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Library(self._calls, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *args: Any, **options: Any) -> _Library:
        self._calls.append((self._name, *args, options))
        return _Library(self._calls, f"{self._name}()")

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._name}.{name} =", value))

    def __setitem__(self, key: str, value: Any) -> None:
        self._calls.append((f"{self._name}[{key}] =", value))


LR, TWICE = {"lr": 0.1}, {"allow_val_change": True}
SERVICES: dict[str, list[Any]] = {
    "aim": [
        ("Run", {"repo": "runs", "mode": "x"}),
        ("Run().name =", "digits"),
        ("Run()[hparams] =", LR),
        ("Run().track", 0.5, {"name": "eval_loss", "step": 3}),
        ("Run().track", "first", {"name": "note", "step": 3}),
        ("Run().close", {}),
    ],
    "clearml": [
        ("Task.init", {"project_name": "digits", "task_name": "digits", "mode": "x"}),
        ("Task.init().connect_configuration", LR, {}),
        ("Task.init().get_logger", {}),
        ("Task.init().get_logger().report_scalar", {"title": "loss", "series": "eval", "value": 0.5, "iteration": 3}),
        ("Task.init().close", {}),
    ],
    "comet_ml": [
        ("start", {"project_name": "digits", "mode": "x"}),
        ("start().log_parameters", LR, {}),
        ("start().log_metric", "eval_loss", 0.5, {"step": 3}),
        ("start().log_other", "note", "first", {}),
        ("start().end", {}),
    ],
    "dvclive": [
        ("Live", {"mode": "x"}),
        ("Live().log_params", LR, {}),
        ("Live().step =", 3),
        ("Live().log_metric", "eval_loss", 0.5, {}),
        ("Live().next_step", {}),
        ("Live().end", {}),
    ],
    "swanlab": [
        ("init", {"project": "digits", "mode": "x"}),
        ("config.update", LR, TWICE),
        ("init().log", {"eval_loss": 0.5, "note": "first"}, {"step": 3}),
        ("init().finish", {}),
    ],
    "trackio": [
        ("init", {"project": "digits", "mode": "x"}),
        ("config.update", LR, TWICE),
        ("init().log", {"eval_loss": 0.5, "note": "first"}, {"step": 3}),
        ("init().finish", {}),
    ],
}
"""What each library is asked for when a program logs a number and a text."""

HELD = {
    "aim": "writer",
    "clearml": "task",
    "comet_ml": "writer",
    "dvclive": "live",
    "mlflow": "active_run",
    "swanlab": "run",
    "tensorboard": "writer",
    "trackio": "run",
    "wandb": "run",
}
"""What a tracker writes to, by the name that programs written for Accelerate use."""

PICTURES: dict[str, list[Any]] = {
    "aim": [("Image", 1, {"caption": ""}), ("Run().track", {"name": "eval_seen", "step": 3})],
    "clearml": [
        ("Task.init().get_logger", {}),
        (
            "Task.init().get_logger().report_image",
            {"title": "seen", "series": "eval", "iteration": 3, "image": 1},
        ),
    ],
    "swanlab": [("Image", 1, {}), ("init().log", {"step": 3})],
    "trackio": [("Image", 1, {}), ("init().log", {"step": 3})],
    "wandb": [("Image", 1, {}), ("init().log", {"step": 3})],
}
"""What each library is asked for when a program logs a picture, without the picture in its own class."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    def stand_in(name: str) -> list[Any]:
        calls: list[Any] = []
        task = _Library(calls, "Task", current_task=lambda: None)
        monkeypatch.setitem(sys.modules, name, _Library(calls, "", Task=task))  # type: ignore[arg-type]
        plots = _Library([], "", Metric=_Library([], "", could_log=lambda value: isinstance(value, float)))
        monkeypatch.setitem(sys.modules, f"{name}.plots", plots)  # type: ignore[arg-type]
        for variable in ("CLEARML_PROJECT", "CLEARML_TASK"):
            monkeypatch.delenv(variable, raising=False)
        return calls

    return stand_in


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.filterwarnings("ignore:(ClearML|DVCLive) keeps:UserWarning")
def test_a_service_is_asked_for_what_a_program_logs(library: Callable[[str], list[Any]], name: str) -> None:
    calls = library(name)
    build: Any = find_tracker(name)
    tracker = build("digits", "runs", mode="x")
    assert tracker.name == name == tracker.package
    tracker.start()
    tracker.store_init_configuration(LR)
    tracker.log({"eval_loss": 0.5, "note": "first"}, step=3)
    assert tracker.tracker is getattr(tracker, HELD[name])
    tracker.finish()
    assert calls == SERVICES[name]


@pytest.mark.parametrize("name", PICTURES)
def test_a_service_is_asked_to_keep_pictures(library: Callable[[str], list[Any]], name: str) -> None:
    calls = library(name)
    build: Any = find_tracker(name)
    tracker = build("digits", "runs")
    tracker.start()
    before = len(calls)
    tracker.log_images({"eval_seen": 1 if name in ("aim", "clearml") else [1]}, step=3)
    plain = [tuple(part for part in call if type(part) is not dict or not _has_pictures(part)) for call in calls]
    plain = [tuple(part for part in call if not isinstance(part, _Library)) for call in plain]
    assert plain[before:] == PICTURES[name]


def _has_pictures(values: dict[str, Any]) -> bool:
    return any(isinstance(value, list) for value in values.values())


@pytest.mark.parametrize("name", ["clearml", "wandb"])
def test_a_service_is_asked_to_keep_tables(library: Callable[[str], list[Any]], name: str) -> None:
    calls = library(name)
    build: Any = find_tracker(name)
    tracker = build("digits", "runs")
    tracker.start()
    tracker.log_table("answers", columns=["of"], data=[[1]], step=3)
    if name == "wandb":
        assert calls[-2] == ("Table", {"columns": ["of"], "data": [[1]], "dataframe": None})
        assert calls[-1][0] == "init().log"
    else:
        place = {"title": "answers", "series": "train", "iteration": 3}
        assert calls[-1] == ("Task.init().get_logger().report_table", {"table_plot": [["of"], [1]], **place})
        with pytest.raises(ValueError, match=r"^log_table\(\) needs data="):
            tracker.log_table("answers")


def test_a_task_of_clearml_that_the_program_made_is_used_and_left_open(
    library: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = library("clearml")
    task = _Library(calls, "mine")
    monkeypatch.setitem(vars(sys.modules["clearml"]), "Task", _Library(calls, "Task", current_task=lambda: task))
    build: Any = find_tracker("clearml")
    tracker = build("digits")
    tracker.start()
    with pytest.warns(UserWarning, match=r"ClearML keeps numbers only; not logged: note\. .*get_tracker\(.clearml.\)"):
        tracker.log({"loss": 0.5, "note": "x"})
    tracker.log({"note": "y"})  # said once
    tracker.finish()
    assert tracker.tracker is task
    assert calls == [
        ("mine.get_logger", {}),
        ("mine.get_logger().report_single_value", {"name": "loss", "value": 0.5}),
        ("mine.get_logger", {}),
    ]


def test_a_tracker_knows_whether_its_package_is_there_without_importing_it() -> None:
    class Absent(GeneralTracker):
        name = "absent"
        package = "no_such_package"

        @property
        def tracker(self) -> None: ...

        def log(self, values: Any, step: int | None = None, **options: Any) -> None: ...

    assert not Absent.is_available()
    assert find_tracker("jsonl").is_available()
    assert find_tracker("wandb").is_available() == (importlib.util.find_spec("wandb") is not None)


@pytest.mark.timeout(120)
def test_what_two_ranks_log_is_kept_once_by_every_library(kind: Kind, tmp_path: Path) -> None:
    def program() -> int:
        warnings.simplefilter("ignore")  # inside the libraries
        accelerator = Accelerator(log_with=kind.name, project_dir=tmp_path)
        accelerator.init_trackers("digits", config={"lr": 0.1})
        for step in range(3):
            accelerator.log({"loss": torch.tensor(float(step + accelerator.process_index))}, step=step, average=True)
        count = len(accelerator.trackers)
        accelerator.end_training()
        if kind.name == "wandb" and accelerator.is_main_process:
            sys.modules["wandb"].teardown()  # its service process
        return count

    assert run_ranks(2, program) == [1, 0]
    assert kind.read(tmp_path) == [(step, {"loss": step + 0.5}) for step in range(3)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("AimTracker", "aim"),
        ("ClearMLTracker", "clearml"),
        ("CometMLTracker", "comet_ml"),
        ("DVCLiveTracker", "dvclive"),
        ("MLflowTracker", "mlflow"),
        ("SwanLabTracker", "swanlab"),
        ("TensorBoardTracker", "tensorboard"),
        ("TrackioTracker", "trackio"),
        ("WandBTracker", "wandb"),
    ],
)
def test_accelerates_name_of_a_tracker_is_the_class_that_log_with_takes(theirs: str, ours: str) -> None:
    tracking = importlib.import_module("nbaccel.tracking")
    kind = getattr(tracking, theirs)
    assert kind is find_tracker(ours)
    assert issubclass(kind, tracking.GeneralTracker)
    assert theirs in dir(tracking)
    accelerates = getattr(importlib.import_module("accelerate.tracking"), theirs)
    assert [name for name in dir(accelerates) if not name.startswith("_") and not hasattr(kind, name)] == []
