"""What a rank says of its stack and its names: enough to find the mistake, no secret, and never too much."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.events import CollectiveEntered, Event
from nbaccel.launching.ipc.reports import CollectiveCall, FrameSnapshot, StackSnapshot, ValueSummary
from nbaccel.launching.rank.stack_snapshot import CallLog, described, left_behind, scenes
from nbaccel.testing import run_ranks


def trace_of(function: Any) -> TracebackType | None:
    try:
        function()
    except Exception as error:
        return error.__traceback__
    raise AssertionError("it did not fail")


class Hostile:
    """Of the user's: looking at it must not run it."""

    def __repr__(self) -> str:
        raise AssertionError("its repr was asked for")

    __len__ = __bool__ = __eq__ = __repr__  # type: ignore[assignment]


def poisoned() -> torch.nn.Module:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.bias.fill_(float("nan"))
    return model


@pytest.mark.parametrize(
    ("name", "value", "form", "text", "flaw"),
    [
        ("labels", torch.zeros(7, dtype=torch.long), "int64 (7,) on cpu, 56 B", "", ""),
        ("loss", torch.tensor(0.25, requires_grad=True), "float32 () on cpu, 4 B", "0.25", ""),
        ("logits", torch.tensor([1.0, float("nan")]), "float32 (2,) on cpu, 8 B", "", "NaN"),
        ("logits", torch.tensor([1.0, float("-inf")]), "float32 (2,) on cpu, 8 B", "", "inf"),
        ("ghost", torch.empty(3, device="meta"), "float32 (3,) on meta, 12 B", "", ""),
        ("few", torch.eye(2).to_sparse(), None, "", ""),
        ("model", poisoned(), "Linear of 3 parameters, 12 B", "", "NaN in bias"),
        ("array", torch.ones(2, 3).numpy(), "array float32 (2, 3), 24 B", "", ""),
        ("batch", {"x": torch.ones(8, 3), "n": 1}, "dict of 2 {x: float32 (8, 3)}", "", ""),
        ("batch", [torch.tensor([float("nan")])], "list of 1 {0: float32 (1,)}", "", "NaN in 0"),
        ("config", {"lr": 0.1, "layers": [1, 2]}, "dict of 2 {layers: list of 2}", "lr: 0.1, layers: 1, 2", ""),
        ("thing", Hostile(), "Hostile", "", ""),
        ("things", [Hostile()], "list of 1 {0: Hostile}", "", ""),
    ],
)
def test_a_value_is_described_by_what_it_is(name: str, value: Any, form: str | None, text: str, flaw: str) -> None:
    seen = described(name, value)
    assert seen == ValueSummary(name, seen.form if form is None else form, text, flaw)


@pytest.mark.parametrize("name", ["token", "hf_token", "API_KEY", "apiKey", "password", "db_passwd", "client_secret"])
@pytest.mark.parametrize("value", ["abc-123", b"abc-123", ["abc-123"], {"a": "abc-123"}])
def test_secrets_are_masked_by_the_name_above_them(name: str, value: Any) -> None:
    assert described(name, value).text == "<masked>"
    assert "abc-123" not in json.dumps([described(name, value), described("config", {name: value})])


@pytest.mark.parametrize("value", ["hf_abcdefghijkl", "sk-abcdefghijkl", "ghp_abcdefghijkl"])
def test_what_looks_like_a_secret_is_masked_under_any_name(value: str) -> None:
    assert described("x", value).text == "<masked>"


@pytest.mark.parametrize(("name", "value"), [("monkey", "ape"), ("tokenizer_name", "gpt2"), ("num_tokens", 3)])
def test_names_that_only_sound_like_secrets_are_shown(name: str, value: Any) -> None:
    assert described(name, value).text == repr(value)


def test_a_value_that_cannot_be_looked_at_is_named_all_the_same() -> None:
    assert described("model", torch.nn.LazyLinear(3)).form == "LazyLinear, which cannot be looked at (ValueError)"


def test_to_look_at_a_value_runs_none_of_its_code() -> None:
    class Slow(torch.nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError("asked")

    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("asked")

        __len__ = __iter__ = __repr__ = __eq__ = __bool__ = __class__  # type: ignore[assignment]

    def fail(model: Any, proxy: Any) -> None:
        raise ValueError

    try:
        fail(Slow(2, 1), Proxy())
    except ValueError as error:
        values = {value.name: value.form for value in scenes(error.__traceback__)[-1].values}
    assert values["model"].endswith("Slow of 3 parameters, 12 B")
    assert values["proxy"].endswith("Proxy")


def test_scenes_are_the_users_frames_with_the_names_that_they_use() -> None:
    def train(labels: Any) -> None:
        _hidden = 1
        torch.nn.functional.cross_entropy(torch.ones(8, 3), labels)

    *above, innermost = [scene for scene in scenes(trace_of(lambda: train(torch.zeros(7)))) if scene.is_users]
    assert innermost.function == "train"
    assert innermost.source == "torch.nn.functional.cross_entropy(torch.ones(8, 3), labels)"
    assert [value.name for value in innermost.values] == ["labels"]
    assert [scene.function for scene in above] == ["trace_of", "<lambda>"]


def test_a_rank_that_is_through_leaves_its_names() -> None:
    (scene,) = left_behind("Cell In[3]", {"step": 2, "_": 1, "torch": torch})
    assert (scene.file, scene.values) == ("Cell In[3]", [ValueSummary("step", "int", "2")])
    assert left_behind("", {}) == []


def test_a_snapshot_survives_the_wire() -> None:
    snapshot = StackSnapshot(
        [FrameSnapshot("a.py", 3, "f", "g(x)", True, [ValueSummary("x", "int", "1")])],
        [CollectiveCall("gather", "a.py", 2)],
    )
    assert StackSnapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot


def test_a_snapshot_that_is_too_large_keeps_its_innermost_frames() -> None:
    many = [FrameSnapshot("a.py", at, "f", "", True, [ValueSummary(f"v{at}", "x" * 200)] * 40) for at in range(60)]
    data = StackSnapshot(many).to_json()
    assert len(json.dumps(data)) <= 200_000
    assert data["scenes"][-1] == many[-1]
    assert not data["scenes"][0].values
    assert len(json.dumps(StackSnapshot(many).to_json(1000))) <= 1000


def test_the_last_twenty_collectives_are_kept_with_the_line_of_the_user() -> None:
    heard: list[Event] = []
    log = CallLog(heard.append)
    for number in range(25):
        log(CollectiveEntered(f"gather {number}"))
    assert [call.operation for call in log.last()] == [f"gather {number}" for number in range(5, 25)]
    assert {call.file for call in log.last()} == {__file__}
    assert len(heard) == 25


def test_a_sharded_tensor_is_described_by_one_rank_alone() -> None:
    """By its own rows: the rank has failed, and its peers are elsewhere."""

    def describe() -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        accelerator = Accelerator(strategy="fsdp")
        accelerator.prepare(torch.nn.Linear(2, 2))  # from now on a number of a sharded tensor is that of the whole
        values = torch.tensor([1.0, 2.0, float("nan"), 4.0])
        tensor = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])
        single = distribute_tensor(torch.ones(1), init_device_mesh("cpu", (2,)), [Shard(0)])
        told = []
        if accelerator.process_index == 1:
            told = [described("x", tensor).flaw, described("x", {"a": tensor}).flaw, described("x", single).text]
        accelerator.wait_for_everyone()
        return told

    assert run_ranks(2, describe, timeout_s=30) == [[], ["NaN", "NaN in a", ""]]
