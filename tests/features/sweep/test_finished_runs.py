"""Runs that are found again: by what they compute, not by where their lines stand; a damaged record is no run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.base.events import Loss, Metric
from nbaccel.base.settings import RunSettings
from nbaccel.display.history import History
from nbaccel.features.sweep.finished_runs import FinishedRuns, as_key, describe_value
from nbaccel.launching.run import Run, RunOrigin

CONFIG = {"fold": 0, "lr": 0.1}


def finished_run(value: Any) -> Run:
    history = History(1)
    for step in range(5):
        history.feed(0, 0.1 * step, Loss(1.0 / (step + 1), step))
        history.feed(0, 0.1 * step, Metric({"acc": step / 5}, step))
    return Run([value], history, None, "fork", "", "", seconds=2.5, config=dict(CONFIG), origin=RunOrigin(seed=0))


@pytest.mark.parametrize(
    "value",
    [
        0.1 + 0.2,
        {"score": (1, 2.5), "names": {"a"}},
        torch.arange(6.0).reshape(2, 3),
        [torch.ones(2), None],
        float("inf"),
        [np.arange(3), np.float32(0.5), True],
        {"raw": b"\0\xff", "size": torch.Size([2, 3])},
        np.array([["a", "ü"], ["c", ""]]),
        np.array([b"a", b"bc"]),
    ],
)
def test_a_run_comes_back_with_its_value_and_its_curves(tmp_path: Path, value: Any) -> None:
    runs = FinishedRuns(tmp_path)
    runs.begin(CONFIG, "k" * 64)
    runs.keep(finished_run(value), {"model": value}, "k" * 64)
    both = FinishedRuns(tmp_path).find(CONFIG, "k" * 64)
    assert both is not None
    found, left = both
    assert repr(left) == repr({"model": value})
    assert repr(found.value) == repr(value)
    assert found.seconds == 2.5
    assert found.curves["loss"].mean == finished_run(None).curves["loss"].mean
    assert found.history.rows == finished_run(None).history.rows


def test_another_key_or_a_run_that_begins_anew_finds_nothing(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    assert runs.find(CONFIG, "a" * 64) is None
    runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(1), {}, "a" * 64)
    assert runs.find(CONFIG, "a" * 10 + "b" * 54) is None
    runs.begin(CONFIG, "a" * 64)
    assert runs.find(CONFIG, "a" * 64) is None


def test_a_damaged_record_is_none_and_runs_no_code(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    folder = runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(torch.ones(2)), {}, "a" * 64)
    record = json.loads((folder / "run.json").read_text())
    for text in ("", "[]", "{}", json.dumps({**record, "value": {"os.system": ["true"]}})):
        (folder / "run.json").write_text(text)
        assert runs.find(CONFIG, "a" * 64) is None
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "value.safetensors").write_bytes(b"\0" * 9)
    assert runs.find(CONFIG, "a" * 64) is None


def test_a_value_that_is_no_data_is_not_kept_and_said(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(object()), {}, "a" * 64)
    assert runs.find(CONFIG, "a" * 64) is None
    assert [words for words, _ in runs.unkept] == ["fold=0, lr=0.1"]


def test_a_parameter_comes_back_as_a_tensor(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(torch.nn.Parameter(torch.ones(2))), {}, "a" * 64)
    both = runs.find(CONFIG, "a" * 64)
    assert both is not None
    assert repr(both[0].value) == "tensor([1., 1.])"


class Settings(dict[str, int]):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            torch.eye(2).to_sparse(),
            "it holds a sparse tensor, which safetensors files cannot hold; a dense one is kept",
        ),
        (np.fft.fft(np.ones(2)), "it holds a tensor of torch.complex128, which safetensors files cannot hold"),
        (np.array([None, {}]), "it holds an array of object, which safetensors files cannot hold"),
        (Settings(), "it holds an object of the class Settings, which is neither data nor a tensor"),
    ],
)
def test_a_value_that_cannot_be_kept_costs_its_run_alone(tmp_path: Path, value: Any, why: str) -> None:
    runs = FinishedRuns(tmp_path)
    runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(value), {}, "a" * 64)
    assert runs.find(CONFIG, "a" * 64) is None
    assert runs.unkept == [("fold=0, lr=0.1", why)]


def test_any_error_of_keeping_a_value_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensors: Any) -> bytes:
        raise RuntimeError("no such kind")

    monkeypatch.setattr("safetensors.torch.save", fails)
    runs = FinishedRuns(tmp_path)
    runs.begin(CONFIG, "a" * 64)
    runs.keep(finished_run(torch.ones(2)), {}, "a" * 64)
    assert runs.unkept == [("fold=0, lr=0.1", "its value cannot be kept (RuntimeError: no such kind)")]


def scaled_by(factor: Any) -> Callable[[Any], Any]:
    def scale(x: Any, power: Any = 1) -> Any:
        return factor * x**power

    return scale


def test_functions_that_a_function_makes_are_told_apart_by_what_they_hold() -> None:
    def key(function: Any) -> str:
        return as_key("s", {"act": function}, 0, RunSettings(), 1)

    assert key(scaled_by(1)) == key(scaled_by(1)) != ""
    assert len({key(scaled_by(each)) for each in (1, 2, 3.0, "a", (1, 2), torch.float16, scaled_by(1))}) == 7
    assert key(scaled_by(torch.ones(2))) == "", "two tensors cannot be told apart"
    weights = torch.ones(2)
    assert key(lambda x, weight=weights: x * weight) == ""
    odd, even = calls_each_other()
    assert key(odd) == key(even) == ""
    assert key(calls_itself()) == key(calls_itself()) != ""


def calls_itself() -> Callable[[int], int]:
    def count(n: int) -> int:
        return count(n - 1) if n else 0

    return count


def calls_each_other() -> tuple[Callable[[int], bool], Callable[[int], bool]]:
    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    return odd, even


def test_a_run_without_a_seed_is_done_again_and_said(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    run = finished_run(1)
    run.origin = RunOrigin(seed=None)
    assert as_key("s", run.config, None, RunSettings(), 1) == ""
    runs.keep(run, {}, "")
    assert runs.unkept == [("fold=0, lr=0.1", "it has no seed, so that nobody knows its random numbers")]


def test_a_key_tells_functions_apart_by_what_they_compute() -> None:
    def function_of(text: str, **names: Any) -> Callable[..., Any]:
        space: dict[str, Any] = {"__name__": "__main__", **names}
        exec(compile(text, "Cell In[3]", "exec"), space)
        function: Callable[..., Any] = space["f"]
        return function

    def key(function: Callable[..., Any]) -> str:
        return as_key("s", {"loss": function}, 0, RunSettings(), 1)

    text = "def f(x):\n    return x * EPOCHS + helper(x)\ndef helper(x):\n    return x + {}\n"
    one = key(function_of(text.format(1), EPOCHS=3))
    assert one == key(function_of("\n\n# moved\n" + text.format(1), EPOCHS=3, unread=5))
    assert len({one, key(function_of(text.format(2), EPOCHS=3)), key(function_of(text.format(1), EPOCHS=4))}) == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.relu, "relu"),
        (abs, "abs"),
        (torch.nn.functional.gelu, "gelu"),
        (torch.optim.AdamW, "AdamW"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), None),
        (Path("data/a.csv"), None),
        (functools.partial(torch.clamp, min=0), None),
        ("adam", "adam"),
        ("a\nb", "a\\nb"),
        ("data/" + 9000 * "x" + "/fold-1.csv", "data/" + 15 * "x" + "…" + 8 * "x" + "/fold-1.csv"),
        (None, "None"),
        ((8, 8), "(8, 8)"),
    ],
)
def test_values_that_beginners_sweep_are_told_apart_and_named(value: Any, words: str | None) -> None:
    key = as_key("s", {"x": value}, 0, RunSettings(), 1)
    assert key
    assert key == as_key("s", {"x": value}, 0, RunSettings(), 1)
    others = [abs, max, functools.partial(torch.clamp, min=1), torch.float32, torch.tanh, Path("b"), "x", 0, (8,)]
    assert key not in [as_key("s", {"x": other}, 0, RunSettings(), 1) for other in others if other is not value]
    if words is not None:
        assert describe_value(value) == words


def test_a_value_of_several_lines_is_named_in_one() -> None:
    assert describe_value(np.eye(2)) == "array([[1., 0.], [0., 1.]])"


def test_a_run_without_a_key_is_not_kept_and_the_reason_is_said(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path)
    run = finished_run(1)
    run.config = {"lr": 0.1, "act": torch.nn.ReLU()}
    assert as_key("s", run.config, 0, RunSettings(), 1) == ""
    runs.keep(run, {}, "")
    assert runs.unkept == [
        ("lr=0.1, act=ReLU()", "act is an object of the class ReLU, which no later sweep can compare")
    ]
    run.config = {"lr": 0.1}
    runs.keep(run, {}, "")
    assert runs.unkept[1] == ("lr=0.1", "the code that runs cannot be read")


def test_a_key_tells_values_seeds_and_settings_apart() -> None:
    settings = RunSettings(mixed_precision="no")
    key = as_key("s", CONFIG, 0, settings, 1)
    assert key == as_key("s", dict(CONFIG), 0, RunSettings(mixed_precision="no", checkpoint_dir="a"), 1)
    others = [
        as_key("t", CONFIG, 0, settings, 1),
        as_key("s", {**CONFIG, "lr": 0.2}, 0, settings, 1),
        as_key("s", {**CONFIG, "fold": False}, 0, settings, 1),
        as_key("s", CONFIG, 1, settings, 1),
        as_key("s", CONFIG, 0, RunSettings(mixed_precision="bf16"), 1),
        as_key("s", CONFIG, 0, settings, 2),
    ]
    assert len({key, *others}) == 7
    assert as_key("s", {"data": object()}, 0, settings, 1) == ""
    assert as_key("s", {"sizes": [(1, 2)]}, 0, settings, 1) != as_key("s", {"sizes": [[1, 2]]}, 0, settings, 1)
