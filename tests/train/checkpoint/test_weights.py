"""`save_model` writes what Hugging Face libraries read, and `load_model` reads what they write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model as load_by_safetensors

from nbaccel import Accelerator
from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.model_weights import load_model, parse_size
from trainings import Tied


def weights_of(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", 40])
def test_a_saved_model_loads_into_another_one(tmp_path: Path, safe: bool, limit: Any) -> None:
    model, copy = Tied(), Tied()
    Accelerator().save_model(model, tmp_path, max_shard_size=limit, safe_serialization=safe)
    assert (len(os.listdir(tmp_path)) > 1) is (limit == 40)
    assert load_model(copy, tmp_path) == []
    assert weights_of(copy) == weights_of(model)
    assert copy.second.weight is copy.first.weight


class Phases(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex128))


def test_a_model_of_complex_numbers_in_double_precision_is_saved(tmp_path: Path) -> None:
    """Safetensors has no type for them: checkpoints take a pickle of tensors, and save_model says what to write."""
    accelerator = Accelerator()
    plain = Phases()
    model, optimizer = accelerator.prepare(plain, torch.optim.Adam(plain.parameters()))
    accelerator.backward(model.phase.abs().sum())
    optimizer.step()
    before = model.phase.detach().clone()
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.warns(UserWarning, match=r"is torch.complex128, .*It is saved as a pickle"):
        accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        model.phase.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.phase, before)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
    with pytest.raises(TypeError, match=r"phase is torch.complex128, .*safe_serialization=False"):
        accelerator.save_model(model, tmp_path / "safe")
    accelerator.save_model(model, tmp_path / "model", safe_serialization=False)
    again = Phases()
    assert load_model(again, tmp_path / "model") == []
    assert torch.equal(again.phase, before)


def test_shards_hold_at_most_the_limit_and_the_index_knows_every_name(tmp_path: Path) -> None:
    model = Tied()
    Accelerator().save_model(model, tmp_path, max_shard_size=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["weight_map"]["second.weight"] == index["weight_map"]["first.weight"]
    stored = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in stored.values() for t in file.values())
    assert all(sum(t.nbytes for t in file.values()) <= 40 or len(file) == 1 for file in stored.values())
    assert sorted(stored) == [f"model-{n:05d}-of-{len(stored):05d}.safetensors" for n in range(1, len(stored) + 1)]


def test_safetensors_itself_loads_a_model_with_tied_weights(tmp_path: Path) -> None:
    model, copy = Tied(), Tied()
    Accelerator().save_model(model, tmp_path)
    assert load_by_safetensors(copy, tmp_path / "model.safetensors") == (set(), [])
    assert weights_of(copy) == weights_of(model)


@pytest.mark.slow
def test_transformers_loads_our_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.BertModel(config)
    config.save_pretrained(tmp_path)
    Accelerator().save_model(model, tmp_path, max_shard_size="5KB")
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert weights_of(again) == weights_of(model)


@pytest.mark.parametrize("shards", ["10GB", "1KB"])
def test_what_accelerate_saves_loads_here_and_ours_loads_there(tmp_path: Path, shards: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import load_checkpoint_in_model

    model, copy = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]), None
    accelerate.Accelerator().save_model(model, tmp_path / "theirs", max_shard_size=shards)
    Accelerator().save_model(model, tmp_path / "ours", max_shard_size=shards)
    assert sorted(os.listdir(tmp_path / "theirs")) == sorted(os.listdir(tmp_path / "ours"))
    for folder, load in (("theirs", load_model), ("ours", load_checkpoint_in_model)):
        copy = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        load(copy, tmp_path / folder)
        assert weights_of(copy) == weights_of(model)


def test_a_smaller_model_saved_later_leaves_no_shard_of_the_larger_one(tmp_path: Path) -> None:
    (tmp_path / "model_card.md").write_text("mine")
    for limit in (40, "10GB"):
        Accelerator().save_model(Tied(), tmp_path, max_shard_size=limit)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "model_card.md"]


def _saved_in_ranks(folder: str) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, folder)
    accelerator.save({"rank": accelerator.process_index}, f"{folder}/who.pt")
    accelerator.wait_for_everyone()
    copy = Tied()
    load_model(copy, folder)
    return sorted(accelerator.get_state_dict(model)), weights_of(copy) == weights_of(model)


def test_in_ranks_the_main_process_writes_names_without_prefix(tmp_path: Path) -> None:
    for names, is_equal in run_ranks(2, _saved_in_ranks, str(tmp_path)):
        assert names == sorted(Tied().state_dict())
        assert is_equal
    assert torch.load(tmp_path / "who.pt") == {"rank": 0}


def test_get_state_dict_can_leave_the_wrapper_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    compiled = torch.compile(model, backend="eager")
    accelerator = Accelerator()
    assert list(accelerator.get_state_dict(compiled)) == ["0.weight", "0.bias"]
    assert list(accelerator.get_state_dict(compiled, unwrap=False)) == ["_orig_mod.0.weight", "_orig_mod.0.bias"]


def test_missing_names_are_returned_and_with_strict_an_error(tmp_path: Path) -> None:
    Accelerator().save_model(torch.nn.Linear(2, 2, bias=False), tmp_path)
    assert load_model(torch.nn.Linear(2, 2), tmp_path, strict=False) == ["bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        load_model(torch.nn.Linear(2, 2), tmp_path)


def test_a_file_is_no_folder_and_an_empty_folder_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"save_model writes into a folder, and .*file is a file"):
        Accelerator().save_model(Tied(), tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"there are no weights in .*: neither model.safetensors nor pytorch"):
        load_model(Tied(), tmp_path)


def test_damaged_and_malicious_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointCorrupt, match=r"model.safetensors cannot be read"):
        load_model(Tied(), tmp_path)
    torch.save({"weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UntrustedPickle, match=r"asks for \S*print, and loading it could run any code"):
        load_model(Tied(), tmp_path / "pytorch_model.bin")


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match="points out of its folder"):
        load_model(Tied(), tmp_path)


@pytest.mark.parametrize(("text", "size"), [("1KB", 1000), ("2MiB", 2 * 2**20), ("3 GB", 3 * 10**9), ("100", 100)])
def test_sizes_are_read_as_hugging_face_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "ten", "5XB", "-1GB", "K"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size must be bytes, or text such as '10GB'"):
        parse_size(text)


def test_save_writes_safetensors_and_open_files_too(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]
    with open(tmp_path / "b.pt", "wb") as file:
        accelerator.save([1, 2], file)
    assert torch.load(tmp_path / "b.pt") == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.pt"]
