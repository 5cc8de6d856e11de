"""Checkpoints of models that torch's own ``fully_shard`` has sharded: every rank writes its rows, any number reads."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, SaveAsked, SaveDue, outlet
from nbaccel.errors import CannotSave, CheckpointCorrupt, RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint import save_agreement, shards
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.utils import load_model

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.05),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}

WIDTH, WORDS = 4, 11  # 11 rows are dealt unevenly to 2 and to 4 ranks; 3 rows leave one of 4 without any


class Net(torch.nn.Module):
    """Tied weights with an uneven number of rows, frozen weights, a buffer, and a layer of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.narrow = torch.nn.Linear(WIDTH, 3)
        self.wide = torch.nn.Linear(3, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.words(x)
        return self.head(self.wide(torch.relu(self.narrow(hidden + self.base(hidden)))))  # type: ignore[no-any-return]


class Run:
    """One rank's training of the whole of 8 samples in each step, sharded or not."""

    def __init__(self, optimizer: str, is_sharded: bool, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(**options)
        self.module = Net()
        if is_sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.module)
        made = OPTIMIZERS[optimizer](weight for weight in self.module.parameters() if weight.requires_grad)
        self.model, self.optimizer = self.accelerator.prepare(self.module, made)

    def train(self, steps: int = 2) -> None:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randint(0, WORDS, (8, 5), generator=generator)[rank * 8 // world : (rank + 1) * 8 // world]
            loss = torch.nn.functional.cross_entropy(self.model(x).flatten(0, 1), x.flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, Any]:
        """Weights and the optimizer's state, gathered. Collective."""
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}
        return {name: _whole(value).tolist() for name, value in _flat(state)}


def _flat(state: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, dict):
        return [found for key, child in state.items() for found in _flat(child, f"{name}.{key}")]
    return [(name, state)]


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if shards.is_sharded_tensor(value) else value
    return whole


def _write(folder: Path, optimizer: str, is_sharded: bool = True, blocking: bool = True) -> dict[str, Any]:
    run = Run(optimizer, is_sharded)
    run.train()
    saved = run.values()
    run.accelerator.save_state(folder, blocking=blocking)
    run.train(1)  # what is written in the background is what was there at the call
    run.accelerator.end_training()
    return saved


def _go_on(source: Path, target: Path | None, optimizer: str, is_sharded: bool) -> tuple[Any, Any, Any]:
    """Return the values that were loaded, what follows from them, and the kinds of the optimizer's state."""
    run = Run(optimizer, is_sharded, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*begin new random numbers")
        run.accelerator.load_state(source)
    loaded = run.values()
    kinds = {name: type(value).__name__ for name, value in _flat(run.optimizer.state_dict()["state"])}
    if target is not None:
        run.accelerator.save_state(target)
    run.train()
    return loaded, run.values(), kinds


def _close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(torch.tensor(one[name]), torch.tensor(other[name]), atol=1e-6) for name in one
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_save_and_one_goes_on_then_four_then_two(tmp_path: Path, optimizer: str) -> None:
    saved = run_ranks(2, _write, tmp_path / "two", optimizer)[0]
    expected = run_ranks(2, _go_on, tmp_path / "two", None, optimizer, True)[0][1]
    source = tmp_path / "two"
    for world, is_sharded in ((1, False), (4, True), (2, True), (1, True), (2, True)):
        target = source.with_name(f"{source.name}-{world}")
        for loaded, after, kinds in run_ranks(world, _go_on, source, target, optimizer, is_sharded):
            assert loaded == saved
            assert _close(after, expected)
            assert {kind for name, kind in kinds.items() if name.endswith("step")} == {"Tensor"}
            moments = {kind for name, kind in kinds.items() if not name.endswith("step")}
            assert moments == {"DTensor" if is_sharded else "Tensor"}
        source = target


@pytest.mark.slow
def test_a_checkpoint_of_replicas_loads_into_shards_and_the_other_way_round(tmp_path: Path) -> None:
    whole = run_ranks(2, _write, tmp_path / "whole", "AdamW", False)[0]
    assert run_ranks(2, _go_on, tmp_path / "whole", tmp_path / "rows", "AdamW", True)[1][0] == whole
    assert run_ranks(2, _go_on, tmp_path / "rows", None, "AdamW", False)[1][0] == whole


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_each_rank_s_rows_are_in_a_file_of_its_own(tmp_path: Path, blocking: bool) -> None:
    folder = tmp_path / "last"
    saved = run_ranks(4, _write, folder, "AdamW", True, blocking)[0]
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    rows = [load_file(folder / f"model-rank{rank:05d}-of-00004.safetensors") for rank in range(4)]
    assert [tuple(part["words.weight"].shape) for part in rows] == [(3, WIDTH), (3, WIDTH), (3, WIDTH), (2, WIDTH)]
    assert torch.cat([part["words.weight"] for part in rows]).tolist() == saved[".model.words.weight"]
    assert all("head.weight" not in part for part in rows), "tied to the words"
    assert "narrow.weight" not in rows[3], "of three rows the fourth rank has none"
    assert load_file(folder / "model.safetensors").keys() == {"seen"}
    assert manifest.shards["model"]["narrow.weight"] == {
        "shape": [3, WIDTH],
        "dtype": "torch.float32",
        "boxes": [[f"model-rank{rank:05d}-of-00004.safetensors", [rank, 0], [1, WIDTH]] for rank in range(3)],
    }
    assert (folder / "model-rank00002-of-00004.frozen.safetensors").exists()
    assert sorted(path.name for path in folder.glob("generators_*")) == [f"generators_{rank}.json" for rank in range(4)]
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"
    assert not list(folder.glob("*.pkl"))


def _save_often(folder: Path) -> list[int]:
    run = Run("AdamW", True)
    numbers = []
    for name in ("a", "b"):
        run.train(1)
        run.accelerator.save_state(folder / name)
        frozen = f"model-rank{run.accelerator.process_index:05d}-of-00002.frozen.safetensors"
        numbers.append((folder / name / frozen).stat().st_ino)
    return numbers


def test_frozen_rows_are_on_the_disk_once(tmp_path: Path) -> None:
    for first, second in run_ranks(2, _save_often, tmp_path):
        assert first == second


def _count_collectives(folder: Path) -> list[str]:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    run = Run("AdamW", True)
    run.train()
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in str(function):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather_object",
            "gather_object",
            "barrier",
            "broadcast",
            "all_reduce",
            "broadcast_object_list",
        ):
            patch.setattr(dist, name, lambda *_, name=name, **__: seen.append(name))
        with Watch():
            run.accelerator.save_state(folder / "a")
            run.accelerator.save_state(folder / "b", blocking=False)
        run.accelerator._checkpoints.writer.join()
    return seen


def test_a_save_of_shards_has_no_collective(tmp_path: Path) -> None:
    assert run_ranks(2, _count_collectives, tmp_path) == [[], []]
    assert Manifest.read(tmp_path / "b").shards


def _load_and_count(folder: Path) -> tuple[int, int]:
    """Return the elements that were read, and those that this rank holds."""
    run = Run("AdamW", True, seed=1)
    read = 0
    whole = shards.StoredFiles.read

    def counted(self: Any, file: str, name: str, index: Any) -> torch.Tensor:
        nonlocal read
        piece = whole(self, file, name, index)
        read += piece.numel()
        return piece

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.StoredFiles, "read", counted)
        patch.setattr(torch, "load", forbidden)
        patch.setattr(pickle, "Unpickler", forbidden)
        training = run.accelerator._checkpoints.training()
        from nbaccel.train.checkpoint.content import Content

        content = Content.read(folder, Manifest.read(folder), trust=False, as_stored=True)
        training.take(content, training.prepared.models, {})
    tensors = [value for _, value in _flat(run.optimizer.state_dict()["state"])]
    tensors += [value for name, value in run.module.state_dict().items()]
    held = sum(value.to_local().numel() if shards.is_sharded_tensor(value) else value.numel() for value in tensors)
    return read, held


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["from shards", "from whole tensors"])
def test_each_rank_reads_its_own_rows_only_and_no_pickle(tmp_path: Path, is_sharded: bool) -> None:
    run_ranks(2, _write, tmp_path / "last", "AdamW", is_sharded)
    for read, held in run_ranks(4, _load_and_count, tmp_path / "last"):
        assert read == held, "tied weights are read for both names"


def test_one_rank_with_a_sharded_model_saves_alone(tmp_path: Path) -> None:
    saved = run_ranks(1, _write, tmp_path / "last", "AdamW")[0]
    assert run_ranks(1, _go_on, tmp_path / "last", None, "AdamW", True)[0][0] == saved


def test_load_model_reads_the_weights_out_of_a_checkpoint_of_shards(tmp_path: Path) -> None:
    saved = run_ranks(2, _write, tmp_path / "last", "AdamW")[0]
    model = Net()
    assert load_model(model, tmp_path / "last") == []
    assert model.head.weight.tolist() == saved[".model.words.weight"]


def _evaluate_and_save(folder: Path) -> bool:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator()
    module = Net()
    fully_shard(module)
    model = accelerator.prepare(module)  # and no optimizer
    with torch.no_grad():
        model(torch.zeros(2, 3, dtype=torch.long))
    was_whole = not any(map(shards.is_sharded_tensor, module.parameters()))
    accelerator.save_state(folder)
    return was_whole


def test_a_model_that_has_just_run_forward_is_saved_in_shards_too(tmp_path: Path) -> None:
    assert run_ranks(2, _evaluate_and_save, tmp_path / "last") == [True, True], "torch keeps it whole for a backward"
    assert len(Manifest.read(tmp_path / "last").shards["model"]["words.weight"]["boxes"]) == 2


def _save_on_a_mesh(folder: Path, shape: tuple[int, ...], dim: int, load: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(int(load))
    accelerator = Accelerator()
    module = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 8, bias=False))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    if load:
        accelerator.load_state(folder)
    else:
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
        accelerator.save_state(folder)
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return {name: _whole(value).tolist() for name, value in _flat(state)}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dim"), [((2, 2), 0), ((4,), 1)], ids=["replicas of shards", "split by columns"])
def test_shards_of_other_meshes_and_dimensions_load_too(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    saved = run_ranks(4, _save_on_a_mesh, tmp_path / "last", shape, dim, False)[0]
    boxes = Manifest.read(tmp_path / "last").shards["model"]["0.weight"]["boxes"]
    assert len(boxes) == (2 if len(shape) == 2 else 4), "each part is written once"
    assert run_ranks(4, _save_on_a_mesh, tmp_path / "last", (4,), 1 - dim, True)[3] == saved


def _save_a_sum(folder: Path) -> str:
    from torch.distributed.tensor import DTensor, Partial

    run = Run("AdamW", True)
    mesh = run.module.words.weight.device_mesh
    run.accelerator.register_for_checkpointing(Kept(DTensor.from_local(torch.ones(3), mesh, [Partial()])))
    with pytest.raises(CannotSave) as caught:
        run.accelerator.save_state(folder)
    return str(caught.value)


def test_a_tensor_that_is_not_rows_is_refused_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_a_sum, tmp_path / "last")
    assert "tensor is distributed as (Partial(sum),)" in first
    assert "tensor is distributed as (Partial(sum),)" in second
    assert list(tmp_path.iterdir()) == []


def _save_now_and_then(has_launcher: bool) -> str:
    due: list[int] = []

    def launcher(event: Event) -> None:
        if isinstance(event, SaveDue):
            due.append(event.step)
        elif isinstance(event, SaveAsked) and event.step in due:
            event.answer()

    with outlet(launcher if has_launcher else lambda event: None):
        try:
            Run("AdamW", True, checkpoint_every="10min")
        except ValueError as error:
            return str(error)
    return ""


def test_saves_by_the_clock_need_somebody_who_tells_all_ranks() -> None:
    for error in run_ranks(2, _save_now_and_then, False):
        assert "checkpoint_every: a time (600 s) is over on rank 0 first" in error
        assert "give a number of steps" in error
    assert run_ranks(2, _save_now_and_then, True) == ["", ""]


# -- what goes wrong


def _fail(folder: Path, blocking: bool, victims: tuple[int, ...], on_save_error: str) -> str:
    run = Run("AdamW", True, on_save_error=on_save_error)
    run.train()
    run.accelerator.save_state(folder)
    run.train(1)
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        if run.accelerator.process_index in victims:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr("nbaccel.train.checkpoint.content.write_tensors", full)
        with (
            pytest.raises(CannotSave)
            if on_save_error == "raise"
            else pytest.warns(UserWarning, match="cannot write") as caught
        ):
            run.accelerator.save_state(folder, blocking=blocking)
            run.accelerator._checkpoints.writer.join()
        error = str(caught.value if on_save_error == "raise" else caught[0].message)
    run.train(1)
    run.accelerator.save_state(folder.with_name("next"))
    return error


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_rank_that_cannot_write_makes_all_raise_the_same_and_nothing_is_committed(
    tmp_path: Path, blocking: bool, victims: tuple[int, ...], on_save_error: str
) -> None:
    first, second = run_ranks(2, _fail, tmp_path / "last", blocking, victims, on_save_error)
    assert first == second
    assert "No space left on device" in first
    assert Manifest.read(tmp_path / "last").step == 2
    Manifest.read(tmp_path / "last").verify(tmp_path / "last")
    assert Manifest.read(tmp_path / "next").step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "next"]


def _save_on_one(folder: Path, who: int) -> str:
    run = Run("AdamW", True)
    run.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_agreement, "_ABSENT_S", 0.5)
        patch.setattr(save_agreement, "_NOTICE_S", 0.1)
        error = ""
        if run.accelerator.process_index == who:
            with pytest.raises(CannotSave) as caught:
                run.accelerator.save_state(folder)
            error = str(caught.value)
    run.accelerator.wait_for_everyone()
    return error


@pytest.mark.parametrize("who", [0, 1])
def test_a_save_on_one_rank_only_names_the_ranks_that_are_missing(
    tmp_path: Path, who: int, capfd: pytest.CaptureFixture[str]
) -> None:
    error = run_ranks(2, _save_on_one, tmp_path / "last", who)[who]
    assert f"rank(s) {1 - who} of 2 did not come to the save of" in error
    assert "outside of `if accelerator.is_main_process`" in error
    assert not (tmp_path / "last").exists()
    if who == 0:
        assert "waiting: rank(s) 1 of 2 did not come" in capfd.readouterr().out


def _die(folder: Path, victim: int) -> None:
    run = Run("AdamW", True)
    run.train()
    run.accelerator.save_state(folder)
    run.train(1)
    if run.accelerator.process_index == victim:

        def die(*_: Any, **__: Any) -> None:
            os._exit(9)

        pytest.MonkeyPatch().setattr("nbaccel.train.checkpoint.content.write_tensors", die)
    run.accelerator.save_state(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_a_save_leaves_the_older_checkpoint(tmp_path: Path, victim: int) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(2, _die, tmp_path / "last", victim)
    assert Manifest.read(tmp_path / "last").step == 2
    run_ranks(2, _write, tmp_path / "last", "AdamW")
    assert [path.name for path in tmp_path.iterdir()] == ["last"], "the dead one's files are gone with the next save"


def _save_with_rows_missing(folder: Path) -> str:
    run = Run("AdamW", True)
    run.train()
    with pytest.MonkeyPatch.context() as patch:
        if run.accelerator.process_index == 1:
            patch.setattr("nbaccel.train.checkpoint.content.Content.ready", lambda *_, **__: iter(()))
        with pytest.raises(CannotSave) as caught:
            run.accelerator.save_state(folder)
    return str(caught.value)


def test_a_checkpoint_that_lacks_rows_is_not_committed(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_with_rows_missing, tmp_path / "last")
    assert first == second
    assert "model: words.weight has 44 elements, and the ranks that save it hold 24" in first
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_is_found(tmp_path: Path) -> None:
    run_ranks(2, _write, tmp_path / "last", "AdamW")
    with open(tmp_path / "last" / "model-rank00001-of-00002.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(RanksFailed, match=r"model-rank00001-of-00002\.safetensors is damaged"):
        run_ranks(2, _go_on, tmp_path / "last", None, "AdamW", True)


def test_rows_that_no_file_has_are_an_error_and_not_noise() -> None:
    stored = shards.StoredTensor(shards.StoredFiles(Path()), "weight", (4,), torch.float32, [])
    with pytest.raises(CheckpointCorrupt, match="weight of shape"):
        stored.whole()


def test_a_manifest_without_shards_is_one_that_an_older_nbaccel_reads(tmp_path: Path) -> None:
    _write(tmp_path / "last", "AdamW", is_sharded=False)
    content = json.loads((tmp_path / "last" / "manifest.json").read_text())
    assert content["layout"] == 2
    assert "shards" not in content


# -- whole models


def _export(folder: Path) -> Any:
    run = Run("AdamW", True)
    run.train()
    saved = {name: value for name, value in run.values().items() if name.startswith(".model")}
    run.accelerator.save_model(run.model, folder / "whole")
    state = run.accelerator.get_state_dict(run.model)
    return saved, {f".model.{name}": value.tolist() for name, value in state.items()}


def test_save_model_and_get_state_dict_gather_the_whole_model(tmp_path: Path) -> None:
    (saved, first), (_, second) = run_ranks(2, _export, tmp_path)
    assert first == saved
    assert second == {}, "rank 0 has it"
    model = Net()
    assert load_model(model, tmp_path / "whole") == []
    assert {f".model.{name}": value.tolist() for name, value in model.state_dict().items()} == saved
    assert "head.weight" not in load_file(tmp_path / "whole" / "model.safetensors"), "tied weights are written once"


def _save_partially(folder: Path) -> list[str]:
    run = Run("AdamW", True)
    run.train()
    state = run.model.state_dict()
    errors = []
    for save in (
        lambda: run.accelerator.save(state, folder / "a"),
        lambda: run.accelerator.save({"net": [state]}, folder / "b", safe_serialization=True),
        lambda: torch.save(state, folder / "c"),
        lambda: torch.save(run.optimizer.state_dict(), folder / "d"),
    ):
        with pytest.raises(CannotSave) as caught:
            save()
        errors.append(str(caught.value))
    weight = state["words.weight"]
    assert torch.equal(pickle.loads(pickle.dumps(weight)).to_local(), weight.to_local()), "pickle is as it was"
    assert type(copy.copy(weight)) is type(weight)
    torch.save(run.accelerator.get_state_dict(run.model), folder / f"whole-{run.accelerator.process_index}")
    return errors


def test_one_rank_s_rows_are_never_written_as_if_they_were_the_model(tmp_path: Path) -> None:
    for errors in run_ranks(2, _save_partially, tmp_path):
        assert ["accelerator.save" in error for error in errors] == [True] * 4
        assert "accelerator.save was given a sharded tensor (words.weight)" in errors[0]
        assert "(net.0.words.weight)" in errors[1]
        assert "torch.save was given a sharded tensor of shape" in errors[2]
        assert all("accelerator.save_model(model, folder)" in error for error in errors)
    assert torch.load(tmp_path / "whole-0")["words.weight"].shape == (WORDS, WIDTH)


# -- beside prepared models


class Kept:
    """An object of the program's own that holds a tensor of the shards."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "notes": [1, "two"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def _keep(folder: Path) -> tuple[str, Any]:
    run = Run("AdamW", True)
    run.train()
    kept = Kept(run.module.words.weight.detach().clone())
    run.accelerator.register_for_checkpointing(kept)
    expected = kept.tensor.full_tensor().tolist()
    run.accelerator.save_state(folder)
    kept.tensor = torch.zeros_like(kept.tensor)
    run.accelerator.load_state(folder)
    return type(kept.tensor).__name__, kept.tensor.full_tensor().tolist() == expected


def test_registered_objects_may_hold_sharded_tensors(tmp_path: Path) -> None:
    assert run_ranks(2, _keep, tmp_path / "last") == [("DTensor", True)] * 2


def _resume(folder: Path) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(checkpoint_every=2, checkpoint_dir=folder, resume=True)
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(3, 5)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3)), 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for _ in accelerator.epochs(1):
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    accelerator.end_training()
    return losses


def test_automatic_checkpoints_of_shards_are_written_and_resumed(tmp_path: Path) -> None:
    whole = run_ranks(2, _resume, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]
    assert Manifest.read(tmp_path / "checkpoint_2").shards
    assert run_ranks(2, _resume, tmp_path) == [losses[2:] for losses in whole]
