"""Saves of a program in a dry run: what is recorded of each, and what is undone."""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nbaccel.features.check.dry_run.saved_files import SavedFiles

TENSOR = torch.ones(1000)


class Recorded:
    """Saves are recorded while entered.  left: the record of files that are still there."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.left: list[Mapping[str, Any]] = []
        self.saves = SavedFiles(self._keep, lambda: [4, 7])

    def _keep(self, record: Mapping[str, Any]) -> None:
        (self.left if record["kind"] == "saves_left" else self.records).append(record)

    def __enter__(self) -> Recorded:
        self.saves.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.saves.end()


@pytest.mark.parametrize("name", ["torch.save", "numpy.save", "numpy.savez", "numpy.savez_compressed"])
def test_a_save_has_its_path_bytes_seconds_and_loops(name: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with Recorded() as run:
        module, _, function = name.rpartition(".")
        save = getattr(sys.modules[module], function)
        save(TENSOR, path) if module == "torch" else save(path, TENSOR.numpy())
    (record,) = run.records
    (file,) = tmp_path.iterdir()
    assert record["path"] == str(file)
    assert record["bytes"] == file.stat().st_size > 0
    assert record["seconds"] > 0
    assert record["loops"] == [4, 7]


def test_a_function_that_a_module_has_imported_by_name_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("a_library")
    library.__dict__["safe_save_file"] = save_file
    monkeypatch.setitem(sys.modules, "a_library", library)
    with Recorded() as run:
        library.safe_save_file({"w": TENSOR}, str(tmp_path / "model.safetensors"))
    assert [record["path"] for record in run.records] == [str(tmp_path / "model.safetensors")]
    assert library.safe_save_file is save_file


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_open_file_has_the_bytes_that_were_written(by_keyword: bool, tmp_path: Path) -> None:
    with Recorded() as run, open(tmp_path / "w.pt", "wb") as file:
        file.write(b"head")
        torch.save(TENSOR, f=file) if by_keyword else torch.save(TENSOR, file)
    (record,) = run.records
    assert record["path"] == str(tmp_path / "w.pt")
    assert record["bytes"] == os.path.getsize(tmp_path / "w.pt") - 4


def test_what_is_saved_in_memory_has_no_path() -> None:
    with Recorded() as run:
        torch.save(TENSOR, io.BytesIO())
    assert run.records[0]["path"] == ""
    assert run.records[0]["bytes"] > 4000


def test_saves_within_a_save_are_part_of_it(tmp_path: Path) -> None:
    with Recorded() as run, run.saves.saving(str(tmp_path), lambda: 5000):
        torch.save(TENSOR, tmp_path / "a")
        torch.save(TENSOR, tmp_path / "b")
    assert [(record["path"], record["bytes"]) for record in run.records] == [(str(tmp_path), 5000)]


def test_a_save_that_fails_is_no_record(tmp_path: Path) -> None:
    with Recorded() as run:
        with pytest.raises(RuntimeError):
            torch.save(TENSOR, tmp_path / "nowhere" / "w.pt")
        torch.save(TENSOR, tmp_path / "w.pt")
    assert [record["path"] for record in run.records] == [str(tmp_path / "w.pt")]


def test_at_the_end_it_is_recorded_which_files_the_program_has_left(tmp_path: Path) -> None:
    with Recorded() as run:
        for number in range(3):
            torch.save(TENSOR, tmp_path / f"model_{number}.pt")
            if number:
                (tmp_path / f"model_{number - 1}.pt").unlink()
    assert run.left == [{"kind": "saves_left", "paths": [str(tmp_path / "model_2.pt")]}]


def test_afterwards_functions_are_as_before() -> None:
    before = torch.save, torch.serialization.save, np.save, np.savez
    with Recorded():
        assert torch.serialization.save is torch.save is not before[0]
    assert (torch.save, torch.serialization.save, np.save, np.savez) == before
