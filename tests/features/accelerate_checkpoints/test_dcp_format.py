"""Folders that Accelerate's own functions wrote under FSDP continue here, in any number of ranks."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.features.accelerate_checkpoints import dcp_format
from nbaccel.features.accelerate_checkpoints.dcp_format import read_dcp
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint import shards
from nbaccel.train.checkpoint.directory import is_by_accelerate

accelerate = pytest.importorskip("accelerate")


class Net(torch.nn.Module):
    """11 rows, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 11)
        self.base = torch.nn.Linear(11, 11).requires_grad_(False)
        self.second = torch.nn.Linear(11, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.relu(self.base(self.first(x))))  # type: ignore[no-any-return]


class Run:
    """A training with two groups of parameters, sharded or not."""

    def __init__(self, is_sharded: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator()
        self.module = Net()
        if is_sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.module)
        groups = [
            {"params": list(self.module.second.parameters()), "lr": 0.1},
            {"params": list(self.module.first.parameters()), "weight_decay": 0.3},
        ]
        self.model, self.optimizer = self.accelerator.prepare(self.module, torch.optim.AdamW(groups, lr=0.02))

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Any]:
        """Everything that the folder should have brought. Collective."""
        state = self.optimizer.state_dict()
        found = {f"model.{name}": _whole(value) for name, value in self.module.state_dict().items()}
        for number, entries in state["state"].items():
            found |= {f"optimizer.{number}.{name}": _whole(value) for name, value in entries.items()}
        for number, group in enumerate(state["param_groups"]):
            found |= {f"group.{number}.{name}": group[name] for name in ("lr", "weight_decay", "betas", "params")}
        return found


def _whole(value: Any) -> Any:
    return (value.full_tensor() if shards.is_sharded_tensor(value) else value).tolist()


def _write(folder: Path, kind: str) -> tuple[Any, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    run = Run(is_sharded=True)
    run.step()
    run.step()
    saved = run.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["OMP_NUM_THREADS"] = "1"
        accelerate.PartialState(cpu=True)  # its functions log
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, auto_wrap_policy="no_wrap")
        save_fsdp_model(plugin, run.accelerator, run.module, str(folder), 0)
        save_fsdp_optimizer(plugin, run.accelerator, run.optimizer.optimizer, run.module, str(folder), 0)
    run.accelerator.wait_for_everyone()
    run.step()
    return saved, run.values()


def _go_on(folder: Path, is_sharded: bool) -> tuple[Any, Any]:
    run = Run(is_sharded, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*begin new random numbers")
        run.accelerator.load_state(folder)
    loaded = run.values()
    run.step()
    return loaded, run.values()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_training_continues_where_accelerate_left_it_under_fsdp(tmp_path: Path, kind: str) -> None:
    saved, expected = run_ranks(2, _write, tmp_path, kind)[0]
    assert is_by_accelerate(tmp_path)
    for world, is_sharded in ((2, True), (1, False), (4, True), (2, False)):
        for loaded, after in run_ranks(world, _go_on, tmp_path, is_sharded):
            assert loaded == saved
            assert all(torch.allclose(torch.tensor(after[name]), torch.tensor(expected[name])) for name in expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model."""
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(2, _write, folder, "SHARDED_STATE_DICT")
    return folder / "pytorch_model_fsdp_0"


def test_only_the_pieces_are_read_that_hold_wanted_rows(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = read_dcp(written)["model"]
    read: list[str] = []
    whole = dcp_format._Pieces.value

    def watched(self: Any, key: str) -> Any:
        read.append(key)
        return whole(self, key)

    monkeypatch.setattr(dcp_format._Pieces, "value", watched)
    rows = state["first.weight"].fill(torch.empty(2, 4), (7, 0))
    assert read == ["model.first.weight@(6, 0)"]
    assert torch.equal(rows, state["first.weight"].whole()[7:9])


def test_the_metadata_is_read_without_its_classes(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]:
        monkeypatch.delitem(sys.modules, name)
    assert read_dcp(written)["model"]["seen"].whole().tolist() == [2, 2]
    assert not [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]


def test_every_name_that_it_knows_is_inert() -> None:
    """A pickle may call what stands for a name, with whatever it likes."""
    for known in dcp_format._KNOWN.values():
        assert known in (OrderedDict, torch.Size, dcp_format._first, dcp_format._path, dcp_format._Record)


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    ("evil", "name"),
    [
        (Evil(os.system, "touch owned"), "posix.system"),
        (Evil(eval, "1"), "builtins.eval"),
        (Evil(getattr, "a", "join"), "builtins.getattr"),
        (Evil(torch.load, "x"), "torch.serialization.load"),
    ],
)
@pytest.mark.parametrize("protocol", range(6))
def test_a_metadata_that_asks_for_more_than_data_is_refused(
    tmp_path: Path, evil: Evil, name: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil, protocol))
    with pytest.raises(UntrustedPickle, match="could run any code"):
        read_dcp(tmp_path)
    assert not (tmp_path / "owned").exists()


def _raw(*opcodes: bytes) -> bytes:
    return b"".join(opcodes)


@pytest.mark.parametrize(
    "pickled",
    [
        _raw(b"ctorch\nload\n."),  # no dtype
        _raw(b"ctorch.serialization\nload\n."),
        _raw(b"cnbaccel.train.checkpoint.dcp_format\n_path\n."),
        _raw(b"\x80\x04\x8c\x05torch\x8c\x0bSize.append\x93."),  # a dotted name
        _raw(b"Psomewhere\n."),
    ],
)
def test_names_beside_the_known_ones_are_refused(tmp_path: Path, pickled: bytes) -> None:
    pickletools.dis(pickled, out=io.StringIO())  # it is a pickle
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(UntrustedPickle):
        read_dcp(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_a_metadata_that_is_none_is_a_damaged_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="no metadata of a distributed checkpoint"):
        read_dcp(tmp_path)


def test_a_missing_file_and_one_that_was_cut_are_named(written: Path, tmp_path: Path) -> None:
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = read_dcp(tmp_path)["model"]
    os.truncate(tmp_path / "__1_0.distcp", 100)
    with pytest.raises(CheckpointCorrupt, match=r"__1_0\.distcp cannot be read"):
        state["first.weight"].whole()
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"__1_0\.distcp cannot be read"):
        state["first.weight"].whole()


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    index = MetadataIndex("model.x")
    for path, transforms, message in (
        ("../secret", None, "points out of its folder"),
        ("x", ["zstd"], "is compressed"),
    ):
        metadata = Metadata(
            {"model.x": BytesStorageMetadata()},
            {"model.x": ("model", "x")},
            {index: _StorageInfo(path, 0, 1, transforms)},
        )
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointCorrupt, match=message):
            read_dcp(tmp_path)
