"""Sizes that earlier searches found, and the names they are kept by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.features.batch_size.size_cache import FoundInFolder, Size, signature

CPU = torch.device("cpu")


def test_a_folder_remembers_from_run_to_run(tmp_path: Path) -> None:
    FoundInFolder(tmp_path / "new").put("one", Size(8, 0.9))
    FoundInFolder(tmp_path / "new").put("two", Size(16, None))
    again = FoundInFolder(tmp_path / "new")
    assert (again.get("one"), again.get("two"), again.get("three")) == (Size(8, 0.9), Size(16, None), None)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["batch_sizes.json"]


def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "batch_sizes.json").write_text("{ no json")
    found = FoundInFolder(tmp_path)
    assert found.get("one") is None
    found.put("one", Size(8, 0.9))
    assert found.get("one") == Size(8, 0.9)


def test_only_one_rank_writes(tmp_path: Path) -> None:
    FoundInFolder(tmp_path, is_writer=False).put("one", Size(8, 0.9))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="batch size 8 is not kept for the next run: .*Not a directory"):
        FoundInFolder(tmp_path / "file" / "below").put("one", Size(8, 0.9))


def _signed(width: int = 3, optimizer: Any = torch.optim.SGD, shape: str = "float32[3]", keeps: bool = False) -> str:
    model = torch.nn.Linear(width, 1)
    return signature([model], [optimizer(model.parameters(), lr=0.1)], [shape], CPU, [keeps])


def test_the_same_training_has_the_same_signature() -> None:
    assert _signed() == _signed()


@pytest.mark.parametrize(
    "change", [{"width": 4}, {"optimizer": torch.optim.Adam}, {"shape": "float32[5]"}, {"keeps": True}], ids=str
)
def test_what_memory_depends_on_changes_the_signature(change: dict[str, Any]) -> None:
    assert _signed(**change) != _signed()


def test_a_learning_rate_does_not_change_the_signature() -> None:
    model = torch.nn.Linear(1, 1)
    one, two = (signature([model], [torch.optim.SGD(model.parameters(), lr=lr)], [], CPU, []) for lr in (0.1, 0.2))
    assert one == two


def test_frozen_layers_and_evaluation_change_the_signature() -> None:
    model = torch.nn.Linear(1, 1)
    names = {signature([model], [], [], CPU, [])}
    names.add(signature([model.eval()], [], [], CPU, []))
    names.add(signature([model.requires_grad_(False)], [], [], CPU, []))
    assert len(names) == 3
