"""Models whose parts wait on the disk: they compute what they did before. Parts on cards: tests/gpu."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from features.big_models.placed_models import PlacedNet, empty, ids, outputs, plain, saved
from nbaccel import CannotSave, CheckpointCorrupt, NoSuchDevice
from nbaccel.features.big_models.checkpoint_loading import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
)
from nbaccel.features.big_models.dispatching import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    is_dispatched,
    offloaded_names,
    take_back,
)

MIXED = {
    "": "cpu",
    "blocks.1": "disk",
    "blocks.2.mlp": "disk",
    "blocks.3.scale": "disk",
    "start": "disk",
}
MAPS: dict[str, dict[str, Any]] = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "blocks on the disk": {"": "cpu", "blocks": "disk"},
    "mixed": MIXED,
    "tied apart": {"": "cpu", "head": "disk"},
    "tied apart, the other way": {"": "cpu", "embed": "disk"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MAPS)
def test_outputs_are_those_of_the_plain_model(tmp_path: Path, name: str, tied: bool) -> None:
    torch.set_num_threads(2)  # products are rounded otherwise then, by more than the numbers
    model = plain(tied)
    wanted = outputs(model)
    loaded = load_checkpoint_and_dispatch(empty(tied), saved(model, tmp_path), MAPS[name])
    for _ in range(3):
        assert torch.equal(outputs(loaded), wanted)
    in_memory = dispatch_model(copy.deepcopy(model), MAPS[name], offload_dir=tmp_path / "offloaded")
    for _ in range(2):
        assert torch.equal(outputs(in_memory), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "float64"], ids=str)
def test_weights_are_converted_when_they_are_read(tmp_path: Path, dtype: Any) -> None:
    model = plain()
    folder = saved(model, tmp_path)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    loaded = load_checkpoint_and_dispatch(empty(), folder, {"": "disk"}, dtype=dtype)
    loaded.table = loaded.table.to(kind)  # a buffer that no checkpoint has
    assert torch.equal(outputs(loaded), outputs(model.to(kind)))
    assert loaded.blocks[0].mlp[0].weight.dtype == kind


def test_between_forwards_nothing_is_in_memory(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    outputs(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(offloaded_names(model)) == len(list(model.parameters()))


def test_a_block_is_given_back_when_its_forward_fails(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.ones(1, 3))
    assert model.blocks[0].scale.is_meta
    assert torch.equal(outputs(model), outputs(plain()))


def test_nothing_is_written_for_a_model_that_a_checkpoint_has(tmp_path: Path) -> None:
    folder = saved(plain(), tmp_path / "model")
    before = _written(tmp_path)
    model = load_checkpoint_and_dispatch(empty(), folder, {"": "disk"}, offload_folder=tmp_path / "offload")
    outputs(model)
    assert _written(tmp_path) == before


def _written(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What tells a file that was written; the time of its last reading does not."""
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def test_a_checkpoint_in_shards_and_one_of_torch_are_read(tmp_path: Path) -> None:
    from nbaccel import Accelerator

    model = plain(tied=True)
    Accelerator().save_model(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    Accelerator().save_model(model, tmp_path / "torch", max_shard_size="20KB", safe_serialization=False)
    torch.save(model.state_dict(), tmp_path / "one.bin")
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    for checkpoint in (tmp_path / "shards", index, tmp_path / "torch", tmp_path / "one.bin", tmp_path / "old.bin"):
        for device_map in ({"": "disk"}, MIXED, {"": "cpu"}):
            loaded = load_checkpoint_and_dispatch(empty(tied=True), checkpoint, device_map)
            assert torch.equal(outputs(loaded), outputs(model)), (checkpoint, device_map)


def test_a_checkpoint_of_an_accelerator_is_read(tmp_path: Path) -> None:
    from nbaccel import Accelerator

    accelerator = Accelerator(project_dir=tmp_path)
    model = accelerator.prepare(plain())
    accelerator.save_state(tmp_path / "state")
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "state", {"": "disk"})
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_is_made_by_its_name(tmp_path: Path, device_map: str) -> None:
    model = plain()
    memory = {"cpu": sum(parameter.nbytes for parameter in model.parameters()) // 2}
    loaded = load_checkpoint_and_dispatch(empty(), saved(model, tmp_path), device_map, max_memory=memory)
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(outputs(loaded), outputs(model))


def test_loading_and_dispatching_may_be_two_calls(tmp_path: Path) -> None:
    model, loaded = plain(), empty()
    load_checkpoint_in_model(loaded, saved(model, tmp_path), MIXED)
    assert loaded.blocks[1].scale.is_meta
    assert not loaded.head.weight.is_meta
    dispatch_model(loaded, MIXED)
    assert torch.equal(outputs(loaded), outputs(model))


def test_a_checkpoint_is_loaded_without_a_map_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    model, other = plain(tied=True), plain(tied=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    before = dict(other.named_parameters())
    load_checkpoint_in_model(other, saved(model, tmp_path))
    assert torch.equal(outputs(other), outputs(model))
    assert all(parameter is before[name] for name, parameter in other.named_parameters())
    fresh = load_checkpoint_and_dispatch(empty(tied=True), tmp_path)
    assert torch.equal(outputs(fresh), outputs(model))
    assert fresh.head.weight is fresh.embed.weight
    assert not is_dispatched(fresh)


def test_the_state_dict_has_all_tensors(tmp_path: Path) -> None:
    model = plain(tied=True)
    loaded = load_checkpoint_and_dispatch(empty(tied=True), saved(model, tmp_path), {"": "disk"})
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    part = loaded.blocks[1].state_dict()
    assert torch.equal(part["mlp.0.weight"], model.blocks[1].mlp[0].weight)
    assert torch.equal(loaded.blocks[1].mlp[0].state_dict()["weight"], model.blocks[1].mlp[0].weight)


def test_a_dispatched_model_is_saved_whole(tmp_path: Path) -> None:
    from nbaccel import Accelerator

    model = plain(tied=True)
    loaded = load_checkpoint_and_dispatch(empty(tied=True), saved(model, tmp_path / "a"), MIXED)
    Accelerator().save_model(loaded, tmp_path / "b")
    again = load_checkpoint_and_dispatch(empty(tied=True), tmp_path / "b")
    assert torch.equal(outputs(again), outputs(model))


def test_weights_cannot_be_loaded_into_what_is_on_the_disk(tmp_path: Path) -> None:
    loaded = disk_offload(plain(), tmp_path)
    with pytest.raises(RuntimeError, match="PlacedNet waits on the host or on the disk: load the weights before"):
        loaded.load_state_dict(plain().state_dict())


def test_a_dispatched_model_is_a_plain_one_again(tmp_path: Path) -> None:
    model = plain(tied=True)
    loaded = load_checkpoint_and_dispatch(empty(tied=True), saved(model, tmp_path), {"": "disk"})
    take_back(loaded)
    os.remove(tmp_path / "model.safetensors")
    assert torch.equal(outputs(loaded), outputs(model))
    assert loaded.head.weight is loaded.embed.weight
    assert not is_dispatched(loaded)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in loaded.modules())
    assert loaded.to(torch.float64).head.weight.dtype == torch.float64


def test_a_dispatched_model_is_pickled_and_copied(tmp_path: Path) -> None:
    model = plain(tied=True)
    loaded = load_checkpoint_and_dispatch(empty(tied=True), saved(model, tmp_path), MIXED)
    for made in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(outputs(made), outputs(model))
        assert torch.equal(outputs(made), outputs(model))
    assert len(pickle.dumps(disk_offload(plain(), tmp_path / "all"))) < 100_000


def test_the_next_block_is_fetched_while_one_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbaccel.features.big_models.offloaded_block import _HostReads

    model = load_checkpoint_and_dispatch(empty(), saved(plain(), tmp_path), {"": "cpu", "blocks": "disk"})
    done: list[str] = []
    start = _HostReads.start
    monkeypatch.setattr(_HostReads, "start", lambda self, block: done.append(f"+{block.name}") or start(self, block))
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: done.append("computes"))
    outputs(model)
    assert done == ["+blocks.0", "+blocks.1", "computes", "+blocks.2", "+blocks.3"]
    outputs(model)  # from now on it is known what follows the last one
    done.clear()
    outputs(model)
    assert done == ["+blocks.1", "computes", "+blocks.2", "+blocks.3", "+blocks.0"]


def test_an_output_that_is_a_part_of_a_weight_stays_what_it_is(tmp_path: Path) -> None:
    """The memory of a block is used for the next one, unless somebody has a tensor of it."""

    class Rows(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), value))

        def forward(self, count: int) -> torch.Tensor:
            return self.weight[:count]

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(Rows(float(number)) for number in range(4))

        def forward(self, count: int) -> list[torch.Tensor]:
            return [rows(count) for rows in self.rows]

    model = disk_offload(All(), tmp_path)
    for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with context:
            found = model(2)
        assert [rows.detach().unique().tolist() for rows in found] == [[0.0], [1.0], [2.0], [3.0]]
    with torch.no_grad():
        places = {model.rows[number](1).untyped_storage().data_ptr() for number in (0, 1, 2, 3, 0, 1)}
    assert len(places) == 1


def test_blocks_run_in_any_order_and_repeatedly(tmp_path: Path) -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for number in order:
                x = self.layers[number](x).relu() + 1
            return x

    torch.manual_seed(0)
    model = Loops()
    offloaded = disk_offload(copy.deepcopy(model), tmp_path)
    x = torch.ones(2, 4)
    for order in ([2, 0, 1], [1, 1, 1], [0, 2, 2, 1, 0], [], [2], [0, 1, 2]):
        with torch.no_grad():
            assert torch.equal(offloaded(x, order), model(x, order))


def test_a_module_that_the_model_has_twice_is_one_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 4))
    wanted = model(torch.ones(2, 4))
    offloaded = disk_offload(copy.deepcopy(model), tmp_path)
    assert torch.equal(offloaded(torch.ones(2, 4)), wanted)
    assert offloaded[0] is offloaded[2]


def test_a_module_inside_of_a_block_is_called_by_itself(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    x = torch.ones(1, 5, 24)
    with torch.no_grad():
        assert torch.equal(model.blocks[0].mlp(x), plain().blocks[0].mlp(x))
        attention, same = model.blocks[1].attention, plain().blocks[1].attention
        assert torch.equal(attention(x, x, x)[0], same(x, x, x)[0])
    assert all(parameter.is_meta for parameter in model.parameters())


class UsesParts(nn.Module):
    """Computes with weights of modules inside, and with parts of them; torch would use what happens to be in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embed(ids))
        first, second = self.embed.weight.chunk(2)
        scale, _ = torch.stack([self.inner.bias, self.inner.bias * 2]).unbind()
        found = [
            x @ self.embed.weight.T,
            nn.functional.linear(x, torch.cat([second, first])),
            torch.einsum("td,vd->tv", x * scale, self.embed.weight[:3]),
            x + nn.functional.layer_norm(self.inner.weight[0], (4,)),
        ]
        return torch.cat(found, dim=-1)


def test_a_weight_that_is_used_outside_of_its_module_is_read_for_that(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = UsesParts(), torch.arange(3)
    wanted = model(ids)
    offloaded = disk_offload(copy.deepcopy(model), tmp_path)
    together = disk_offload(copy.deepcopy(model), tmp_path / "other", preload_module_classes=["UsesParts"])
    for each in (offloaded, copy.deepcopy(offloaded), pickle.loads(pickle.dumps(offloaded)), together):
        assert torch.equal(each(ids), wanted)
        assert all(parameter.is_meta for parameter in each.parameters())


def test_a_waiting_weight_tells_its_numbers_and_is_not_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    weight: Any = disk_offload(copy.deepcopy(model), tmp_path).weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.is_meta) == ((4, 4), torch.float32, True)
    assert weight.norm().item() == model.weight.norm().item()
    assert torch.equal(weight.cpu(), model.weight)
    assert weight[1].tolist() == model.weight[1].tolist()
    assert bool((weight == model.weight).all())
    changes: list[Callable[[], Any]] = [
        lambda: weight.copy_(torch.ones(4)),
        lambda: nn.init.zeros_(weight),
        lambda: weight.__setitem__(0, 0.0),
        lambda: weight.__iadd__(1.0),
        lambda: setattr(weight, "data", torch.ones(4, 4)),
    ]
    for change in changes:
        with pytest.raises(
            RuntimeError, match=r"^weight waits on the host or on the disk, and \w+ would change what is"
        ):
            change()
    copy_of = torch.zeros(4, 4)
    with torch.no_grad():
        copy_of.copy_(weight).add_(weight)[0] = weight[0]  # others may be changed by it
    assert torch.equal(copy_of[1:], 2 * model.weight.detach()[1:])
    assert torch.equal(copy_of[0], model.weight.detach()[0])
    assert not weight.requires_grad_(False).requires_grad
    with pytest.raises(RuntimeError, match="waits on the host or on the disk, so it cannot be trained"):
        (torch.ones(4) * weight.requires_grad_()).sum().backward()


class ListsWeights(nn.Module):
    """Modules whose weights are read by others: weights that are computed, in lists, in torch's recurrent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.by_hook = nn.utils.weight_norm(nn.Linear(4, 4))
        self.listed = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
        self.named = nn.ParameterDict({"shift": torch.ones(4)})
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.by_hook(self.normed(x)) * self.listed[1] + self.named["shift"]
        found: torch.Tensor = self.recurrent(x)[0]
        return found


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_that_other_modules_read_come_with_these(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = ListsWeights().eval(), torch.ones(1, 2, 4)
    wanted = model(x)
    model = disk_offload(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(x), wanted)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert all(parameter.is_meta for parameter in model.recurrent._flat_weights)  # else they would stay in memory


def test_a_table_that_is_frozen_makes_the_rest_of_a_model_no_adapters(tmp_path: Path) -> None:
    """As in Whisper, whose table of positions is frozen."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    assert all(parameter.is_meta for parameter in disk_offload(model, tmp_path).parameters())


def test_classes_whose_weights_come_together_are_named(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reads(x)

    model = Holder()
    wanted = model(torch.ones(2, 4))
    for name, classes in (("names", ["Reads"]), ("classes", [Reads])):
        offloaded = disk_offload(copy.deepcopy(model), tmp_path / name, preload_module_classes=classes)
        assert torch.equal(offloaded(torch.ones(2, 4)), wanted)


def test_buffers_wait_too_where_they_are_asked_to(tmp_path: Path) -> None:
    model = plain()
    folder = saved(model, tmp_path)
    loaded = load_checkpoint_and_dispatch(empty(), folder, {"": "disk"}, offload_buffers=True)
    assert loaded.norm.running_mean.is_meta
    assert loaded.positions.is_meta
    assert not loaded.table.is_meta  # no checkpoint has it
    assert torch.equal(outputs(loaded), outputs(model))
    assert not load_checkpoint_and_dispatch(empty(), folder, {"": "disk"}).positions.is_meta


def test_what_stays_on_the_host_is_trained_through_what_waits(tmp_path: Path) -> None:
    model = plain()
    model.blocks.requires_grad_(False)
    offloaded = dispatch_model(copy.deepcopy(model), {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path)
    for each in (model, offloaded):
        each(ids())["logits"].square().mean().backward()
    for name in ("start", "embed.weight", "head.weight"):
        assert torch.equal(offloaded.get_parameter(name).grad, model.get_parameter(name).grad)
    assert all(parameter.is_meta for parameter in offloaded.blocks.parameters())


def test_weights_that_wait_are_not_trained_silently(tmp_path: Path) -> None:
    offloaded = dispatch_model(plain(), {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path)
    found = offloaded(ids())["logits"]
    assert torch.equal(found, plain()(ids())["logits"])
    with pytest.raises(RuntimeError, match=r"blocks\.3\..* waits on the host or on the disk, so it cannot be"):
        found.square().mean().backward()


def test_a_recorded_forward_does_not_keep_the_weights(tmp_path: Path) -> None:
    import gc

    width = 173  # of no other tensor of this process
    model = disk_offload(nn.Sequential(*(nn.Linear(width, width) for _ in range(5))), tmp_path)
    found = model(torch.ones(2, width, requires_grad=True))
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.shape == (width, width)]
    assert all(each.is_meta or each.untyped_storage().nbytes() == 4 for each in held)
    assert found.requires_grad


def test_a_recorded_forward_is_right_whatever_its_backward_needs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 8), nn.PReLU(4), nn.GRU(8, 7, batch_first=True)),
    ).requires_grad_(False)
    x = torch.randn(2, 3, 8)
    grads = []
    for each in (copy.deepcopy(model), disk_offload(copy.deepcopy(model), tmp_path)):
        leaf = x.clone().requires_grad_()
        each(leaf)[0].square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


def test_activations_may_be_recomputed_in_the_backward(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False).relu()
            return x

    torch.manual_seed(0)
    model = Recomputes().requires_grad_(False)
    grads = []
    for each in (copy.deepcopy(model), disk_offload(copy.deepcopy(model), tmp_path)):
        leaf = torch.ones(2, 4, requires_grad=True)
        each(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("is_before", [True, False], ids=["before the map", "after the map"])
def test_activations_are_recomputed_by_an_accelerator(tmp_path: Path, is_before: bool) -> None:
    from nbaccel import Accelerator

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)))
    model.requires_grad_(False)
    accelerator = Accelerator(cpu=True)
    grads = []
    for kind in ("plain", "offloaded"):
        each = copy.deepcopy(model)
        if is_before:
            accelerator.gradient_checkpointing(each, blocks=list(each))
        if kind == "offloaded":
            disk_offload(each, tmp_path)
        if not is_before:
            accelerator.gradient_checkpointing(each, blocks=list(each))
        leaf = torch.ones(2, 4, requires_grad=True)
        each(leaf).square().sum().backward()
        grads.append(leaf.grad)
        assert kind == "plain" or all(parameter.is_meta for parameter in each.parameters())
    assert torch.equal(grads[0], grads[1])


def test_cpu_offload_on_a_cpu_leaves_the_model_where_it_is() -> None:
    model = plain()
    assert torch.equal(outputs(cpu_offload(model)), outputs(plain()))
    assert offloaded_names(model) == []


def test_a_second_model_does_not_overwrite_the_first_ones_weights(tmp_path: Path) -> None:
    first = disk_offload(plain(), tmp_path)
    small = disk_offload(nn.Linear(3, 3), tmp_path)
    outputs(first)
    assert small(torch.ones(1, 3)).shape == (1, 3)


def test_weights_in_memory_win_over_a_folder_that_is_there(tmp_path: Path) -> None:
    """Accelerate would read an index of an earlier run, and so other weights, without a word."""
    disk_offload(plain(), tmp_path)
    changed = plain()
    with torch.no_grad():
        changed.head.weight.mul_(2)
    wanted = outputs(changed)
    assert torch.equal(outputs(disk_offload(changed, tmp_path)), wanted)


def test_an_offload_folder_of_accelerate_is_read(tmp_path: Path) -> None:
    from accelerate.utils import offload_state_dict

    model = plain()
    offload_state_dict(tmp_path, model.state_dict())
    assert torch.equal(outputs(disk_offload(empty(), tmp_path)), outputs(model))
    half = plain().to(torch.bfloat16)
    offload_state_dict(tmp_path / "half", half.state_dict())
    loaded = disk_offload(empty().to(torch.bfloat16), tmp_path / "half")
    assert torch.equal(outputs(loaded), outputs(half))


def test_an_offload_index_of_transformers_is_read(tmp_path: Path) -> None:
    model = plain()
    file = saved(model, tmp_path) / "model.safetensors"
    index = {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": "float32"} for name in model.state_dict()
    }
    assert torch.equal(outputs(dispatch_model(empty(), {"": "disk"}, offload_index=index)), outputs(model))


def test_one_file_is_loaded_by_a_map(tmp_path: Path) -> None:
    model = plain()
    file = saved(model, tmp_path) / "model.safetensors"
    found = load_state_dict(file, {"": "cpu", "blocks": "disk"})
    assert torch.equal(found["head.weight"], model.head.weight)
    assert found["blocks.0.scale"] is None
    assert load_state_dict(file)["blocks.0.scale"] is not None


# -- what cannot be


def test_a_map_that_leaves_something_unplaced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no place for start, positions, table of PlacedNet: name them"):
        dispatch_model(plain(), {"embed": "cpu", "blocks": "cpu", "norm": "cpu", "head": "cpu"})


def test_a_device_that_is_not_there_is_refused() -> None:
    model = plain()
    with pytest.raises(NoSuchDevice, match=r"device_map names device 7, and this machine has .*: change the map"):
        dispatch_model(model, {"": "cpu", "blocks": 7})
    assert torch.equal(outputs(model), outputs(plain()))


def test_a_model_that_is_dispatched_already_is_refused(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    with pytest.raises(ValueError, match=r"PlacedNet was dispatched already, .* remove_hook_from_submodules\(model\)"):
        dispatch_model(model, {"": "cpu"})
    with pytest.raises(ValueError, match="was dispatched already: load it first"):
        load_checkpoint_in_model(model, tmp_path)


def test_a_model_that_accelerate_dispatched_is_refused(tmp_path: Path) -> None:
    from accelerate import disk_offload as theirs

    model = theirs(plain(), tmp_path, execution_device="cpu")
    with pytest.raises(ValueError, match="was dispatched by transformers or Accelerate already"):
        dispatch_model(model, {"": "cpu"})


def test_a_dispatched_model_cannot_be_moved(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    for move in (lambda: model.to("cpu"), model.half, model.cpu, nn.Sequential(model).double):
        with pytest.raises(RuntimeError, match=r"PlacedNet was dispatched, and .* of its tensors wait"):
            move()
    assert torch.equal(outputs(model.eval()), outputs(plain()))


def test_weights_that_are_in_memory_need_a_folder() -> None:
    with pytest.raises(ValueError, match=r"in memory and shall wait on the disk: name a folder for them"):
        dispatch_model(plain(), {"": "disk"})


def test_an_empty_model_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for device_map in ({"": "disk"}, {"": "cpu"}):
        with pytest.raises(ValueError, match="start of PlacedNet is on the meta device and has no numbers"):
            dispatch_model(empty(), device_map, offload_dir=tmp_path / "nothing")


def test_a_checkpoint_of_other_names_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = plain()
    save_file({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no value for start, .* of PlacedNet, which are on the meta"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
    with pytest.warns(UserWarning, match="left out"):
        load_checkpoint_in_model(plain(), tmp_path)  # its own numbers stay
    with pytest.raises(ValueError, match=r"and strict=True"):
        load_checkpoint_in_model(plain(), tmp_path, strict=True)


def test_a_checkpoint_with_more_is_told_of(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({**plain().state_dict(), "more": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"has more, which PlacedNet does not have; left out"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
    with pytest.raises(ValueError, match=r"has more, which PlacedNet does not have \(strict=True\)"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}, strict=True)


def test_a_wrong_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    folder = saved(plain(width=16), tmp_path)
    model = plain()
    with pytest.raises(ValueError, match=r"start has the shape \(24,\) in PlacedNet, and \(16,\) in .*"):
        load_checkpoint_in_model(model, folder)
    assert torch.equal(outputs(model), outputs(plain()))
    with pytest.raises(ValueError, match=r"start has the shape \(24,\), and \(16,\) where it is stored"):
        disk_offload(empty(), folder)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a name on a hub is first downloaded"):
        load_checkpoint_and_dispatch(empty(), "someone/some-model", {"": "disk"})
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"start": "lost.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names lost\.safetensors, which .* does not have"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"start": "../lost.safetensors"}}')
    with pytest.raises(ValueError, match="points out of its folder"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})


@pytest.mark.parametrize("damage", ["cut", "no file", "head", "offsets"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    file = saved(plain(), tmp_path) / "model.safetensors"
    contents = file.read_bytes()
    changed = {
        "cut": contents[:-100],
        "no file": b"\x05",
        "head": b"\xff" * 8 + contents[8:],
        "offsets": contents.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
    }
    file.write_bytes(changed[damage])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors is no complete safetensors file"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})


def test_a_file_that_changes_under_a_model_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    folder = saved(plain(), tmp_path)
    model = load_checkpoint_and_dispatch(empty(), folder, {"": "disk"})
    outputs(model)
    file = folder / "model.safetensors"
    contents = file.read_bytes()
    for changed in (contents[:-4] + b"\x00\x00\x80\x3f", contents[:100]):
        file.write_bytes(changed)
        os.utime(file, ns=(0, 0))  # however coarse the clock of this file system is
        with pytest.raises(CheckpointCorrupt, match=r"has changed since the model was loaded from it"):
            outputs(model)
        with pytest.raises(CheckpointCorrupt, match=r"has changed since the model was loaded from it"):
            model.state_dict()
    file.unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be opened: No such file"):
        outputs(model)


def test_a_full_disk_is_an_error_before_the_model_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbaccel.features.big_models import weight_sources

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = plain()
    monkeypatch.setattr(weight_sources, "save_file", full)
    with pytest.raises(CannotSave, match="offloaded"):
        disk_offload(model, tmp_path / "offloaded")
    assert torch.equal(outputs(model), outputs(plain()))
    assert not is_dispatched(model)


def test_quantised_weights_cannot_wait(tmp_path: Path) -> None:
    class Params4bit(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Params4bit(torch.ones(2, 2), requires_grad=False)
    with pytest.raises(ValueError, match="weight is a Params4bit, which is quantised or of a kind of its own"):
        disk_offload(model, tmp_path)


def test_the_main_device_computes() -> None:
    with pytest.raises(ValueError, match="main_device is where parts compute: a device or 'cpu', not 'disk'"):
        dispatch_model(plain(), {"": "cpu"}, main_device="disk")


def test_an_unknown_kind_of_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device_map is a map, or one of 'auto', 'balanced', .*; got 'automatic'"):
        load_checkpoint_and_dispatch(empty(), tmp_path, "automatic")


def test_eight_bit_weights_of_bitsandbytes_are_left_to_transformers(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="offload_8bit_bnb: 8-bit weights of bitsandbytes are loaded by tr"):
        load_checkpoint_in_model(PlacedNet(), tmp_path, offload_8bit_bnb=True)
