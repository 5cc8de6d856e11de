"""Folders with one file for each tensor: written and read as Accelerate does, and dispatched from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from features.big_models.placed_models import empty, outputs, plain
from nbaccel import CheckpointCorrupt, dispatch_model
from nbaccel.utils import load_offloaded_weight, offload_state_dict, offload_weight, save_offload_index
from nbaccel.utils.modeling import load_offloaded_weights

STATE = {
    "of.bfloat16": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
    "of.float32": torch.ones(3),
    "whole": torch.tensor([1, -2]),
    "one": torch.tensor(7.0),
    "turned": torch.arange(6.0).view(2, 3).T,
    "truth": torch.tensor([True, False]),
}


def _read(folder: Path, load: Any) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "index.json").read_text())
    return {name: load(folder / f"{name}.dat", entry) for name, entry in index.items()}


def test_a_folder_is_read_by_accelerate_and_one_of_accelerates_is_read(tmp_path: Path) -> None:
    theirs = pytest.importorskip("accelerate.utils.offload")
    offload_state_dict(tmp_path / "ours", STATE)
    theirs.offload_state_dict(str(tmp_path / "theirs"), STATE)
    indices = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("ours", "theirs")]
    assert indices[0] == indices[1]
    found = [
        _read(tmp_path / "ours", theirs.load_offloaded_weight),
        _read(tmp_path / "theirs", load_offloaded_weight),
        _read(tmp_path / "ours", load_offloaded_weight),
    ]
    for state in found:
        assert state.keys() == STATE.keys()
        assert all(torch.equal(state[name], each) and state[name].dtype == each.dtype for name, each in STATE.items())


def test_a_model_is_dispatched_from_a_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, plain().state_dict())
    model = dispatch_model(empty(), {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(outputs(model), outputs(plain()))


def test_a_model_gets_the_tensors_of_a_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, plain().state_dict())
    model = empty()
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert torch.equal(outputs(model), outputs(plain()))
    load_offloaded_weights(model, None, tmp_path)


def test_an_index_keeps_the_entries_that_were_there(tmp_path: Path) -> None:
    save_offload_index(offload_weight(torch.ones(2), "first", tmp_path, {}), tmp_path)
    save_offload_index(offload_weight(torch.ones(2), "second", tmp_path, {}), tmp_path)
    save_offload_index(None, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()).keys() == {"first", "second"}


def test_what_is_not_a_tensor_of_the_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layer is on the meta device and has no numbers"):
        offload_weight(torch.ones(2, device="meta"), "layer", tmp_path)
    offload_weight(torch.ones(2), "layer", tmp_path)
    with pytest.raises(CheckpointCorrupt, match=r"does not have the bytes of \(3,\) numbers"):
        load_offloaded_weight(tmp_path / "layer.dat", {"dtype": "float32", "shape": [3]})
    with pytest.raises(FileNotFoundError):
        load_offloaded_weight(tmp_path / "other.dat", {"dtype": "float32", "shape": [3]})
