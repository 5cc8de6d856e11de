"""What a setup makes to keep a training together is told of every task, and what it keeps is not judged."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import launch
from nbaccel.errors import NotPrepared
from nbaccel.launching.ipc.spec import TaskWatch

pytestmark = pytest.mark.timeout(120)

SETUP = f"{__name__}:make_watch"


class Watch:
    """Notes what it is told; keeps what `kept` holds, the tensors of rank 1 and the others alike."""

    made: Watch

    def __init__(self) -> None:
        self.told: list[str] = []
        self.kept: set[int] = set()
        self.is_at_work, self.fails_on_parts = False, ""
        Watch.made = self

    def begin(self, namespace: dict[str, Any] | None) -> None:
        self.told.append("begin")
        if namespace is not None:
            namespace["told"] = self.told

    def end(self) -> None:
        self.told.append("end")

    def stop(self) -> None:
        self.told.append("stop")
        Path("stopped").touch()

    def is_of_batch(self, tensors: Sequence[Any]) -> bool:
        return False

    def keeps(self, tensors: Sequence[Any]) -> bool:
        return all(id(tensor) in self.kept for tensor in tensors)

    def explain(self) -> str:
        return "It reads its batches where nobody looks."


def make_watch(namespace: dict[str, Any] | None) -> TaskWatch:
    return Watch()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(model: nn.Module) -> list[str]:
    """Another training in each rank; what is said of it."""
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=draw)).square().mean().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if "steps" in str(warning.message)]


def kept() -> list[str]:
    model = nn.Linear(4, 1)
    Watch.made.kept, Watch.made.is_at_work = set(map(id, model.parameters())), True
    return train(model)


def kept_in_part() -> list[str]:
    model = nn.Linear(4, 1)
    Watch.made.kept = {id(model.bias)}
    return train(model)


def kept_and_updated_by_hand() -> list[str]:
    model = nn.Linear(4, 1)
    Watch.made.kept, Watch.made.is_at_work = set(map(id, model.parameters())), True
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(4):
        model(torch.randn(8, 4, generator=draw)).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
    return Watch.made.told


def test_what_is_kept_equal_trains_without_a_word() -> None:
    assert launch(kept, 2, cpu=True, setup=SETUP).values == [[], []]


def test_updates_by_hand_of_what_is_kept_equal_are_fine() -> None:
    assert launch(kept_and_updated_by_hand, 2, cpu=True, setup=SETUP).values == [["begin", "end"]] * 2


def test_what_is_not_kept_is_refused_with_the_reason() -> None:
    with pytest.raises(NotPrepared, match="nothing synchronises 1 of the 2 tensors it steps") as caught:
        launch(kept_in_part, 2, cpu=True, setup=SETUP)
    assert str(caught.value).endswith("\nIt reads its batches where nobody looks.")


def test_a_task_that_fails_is_stopped() -> None:
    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        launch(fails, 2, cpu=True, setup=SETUP)
    assert Path("stopped").exists()
