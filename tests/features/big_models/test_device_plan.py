"""Where the parts of a model go. Plans follow from sizes, so the devices here are made up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from nbaccel.features.big_models.device_plan import (
    Part,
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    place_of,
    plan,
)
from nbaccel.features.big_models.module_sizes import compute_module_sizes, find_tied_parameters

BLOCK_BYTES = 4 * (8 * 8 + 8)


class Block(nn.Module):
    """A block with a residual connection, which must not be divided."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    """Embeddings of 8 x 8 (256 bytes), four blocks of 288 bytes, and a head, which may be the embeddings'."""

    def __init__(self, tied: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_meta(**arguments: Any) -> Net:
    with torch.device("meta"):
        return Net(**arguments)


def placed_bytes(model: nn.Module, device_map: dict[str, Any]) -> dict[Any, int]:
    """Return the bytes on each place; a tensor counts once on each."""
    seen: dict[Any, dict[int, int]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(place_of(name, device_map), {})[id(tensor)] = tensor.nbytes
    return {place: sum(sizes.values()) for place, sizes in seen.items()}


# -- the plan


def test_a_model_that_fits_on_one_device_goes_there_whole() -> None:
    model = on_meta()
    assert infer_auto_device_map(model, max_memory={0: compute_module_sizes(model)[""], "cpu": "1GB"}) == {"": 0}


def test_a_model_that_fits_on_two_devices_fills_them_in_order() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={0: 256 + 2 * BLOCK_BYTES, 1: "1KB"})
    assert found == {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}


def test_nothing_stays_free_for_fetched_parts_where_none_is_fetched() -> None:
    """Accelerate keeps the largest layer's room on the first device in any case."""
    model = on_meta()
    half = compute_module_sizes(model)[""] // 2 + BLOCK_BYTES
    assert set(infer_auto_device_map(model, max_memory={0: half, 1: half}).values()) == {0, 1}


def test_room_for_the_block_that_computes_and_the_next_one_is_kept_on_the_first_device() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={0: 256 + 3 * BLOCK_BYTES, "cpu": "1GB"})
    assert found == {"embed": 0, "blocks.0": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.3": "cpu", "head": "cpu"}


def test_what_the_host_has_no_room_for_goes_to_the_disk() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={0: 2 * BLOCK_BYTES, "cpu": 256 + BLOCK_BYTES})
    assert placed_bytes(on_meta(), found) == {"cpu": 256 + BLOCK_BYTES, "disk": 3 * BLOCK_BYTES + 256}


def test_without_an_accelerator_the_host_computes_and_keeps_the_room() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={"cpu": 256 + 3 * BLOCK_BYTES})
    assert placed_bytes(on_meta(), found) == {"cpu": 256 + BLOCK_BYTES, "disk": 3 * BLOCK_BYTES + 256}


def test_a_part_that_is_too_large_for_a_device_does_not_keep_the_later_ones_from_it() -> None:
    """accelerate#3041: nothing was placed on devices when a layer exceeded the limit."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8), nn.Linear(8, 8))
    assert infer_auto_device_map(model, max_memory={0: 2 * BLOCK_BYTES, 1: "1MB"}) == {"0": 1, "1": 0, "2": 0}


def test_blocks_of_a_list_stay_whole_without_being_named() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={0: 256 + BLOCK_BYTES + 10, 1: "1GB"})
    assert found["blocks.0"] == 0
    assert found["blocks.1"] == 1


def test_a_block_that_is_too_large_for_any_device_is_divided() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.ModuleList([Net()]))
    found = infer_auto_device_map(model, max_memory={0: 3 * BLOCK_BYTES, 1: 3 * BLOCK_BYTES, "cpu": "1GB"})
    assert any(name.startswith("1.0.") for name in found)


@pytest.mark.parametrize(
    "names",
    ["Block", ["Block"], ("Block",), {"Block"}, Block, [Block]],
    ids=["text", "list", "tuple", "set", "class", "classes"],
)
def test_classes_that_stay_whole_are_named_in_any_form(names: Any) -> None:
    found = infer_auto_device_map(on_meta(), {0: 256 + BLOCK_BYTES + 280, 1: "1GB"}, no_split_module_classes=names)
    assert "blocks.1" in found
    assert not any("linear" in name for name in found)


def test_a_transformers_model_says_itself_what_stays_whole() -> None:
    model = on_meta()
    model._no_split_modules = ["Block"]
    model.blocks[0]._no_split_modules = None
    found = infer_auto_device_map(nn.Sequential(model), max_memory={0: 256 + BLOCK_BYTES + 280, 1: "1GB"})
    assert found["0.blocks.1"] == 1


def test_attention_of_torch_is_never_divided() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    found = infer_auto_device_map(layer, {0: 700, 1: "1GB"}, no_split_module_classes=["Nothing"])
    assert not any(name.startswith("self_attn.") for name in found)


# -- tied tensors


def test_a_tied_tensor_counts_once_on_the_meta_device_too() -> None:
    tied, apart = on_meta(tied=True), on_meta()
    assert compute_module_sizes(tied)[""] == compute_module_sizes(apart)[""] - 256
    assert find_tied_parameters(tied) == [["embed.weight", "head.weight"]]


def test_tied_parts_go_where_the_first_of_them_goes() -> None:
    found = infer_auto_device_map(on_meta(tied=True), max_memory={0: 256 + BLOCK_BYTES, 1: "1GB"})
    assert found["head"] == found["embed"] == 0
    assert found["blocks.3"] == 1


def test_tied_parts_with_tensors_of_their_own_find_room_together() -> None:
    model = on_meta()
    model.head = nn.Linear(8, 8, device="meta")  # with a bias of 32 bytes
    model.head.weight = model.embed.weight
    found = infer_auto_device_map(model, max_memory={0: 256 + 31, 1: "1GB"}, clean_result=False)
    assert found["head"] == found["embed"] == 1


def test_modules_that_are_one_object_go_to_one_place() -> None:
    with torch.device("meta"):
        shared = Block()
        model = nn.ModuleList([shared, Block(), shared])
    found = infer_auto_device_map(model, max_memory={0: BLOCK_BYTES, 1: "1GB"})
    assert found["0"] == found["2"] == 0


# -- sizes


@pytest.mark.parametrize(
    "memory",
    [
        {0: "1KiB", 1: "2KiB"},
        {"1": 2048, "0": 1024},
        {"cuda:1": "2KiB", "cuda": 1024},
        {torch.device("cuda", 1): "2.0 KiB", torch.device("cuda"): 1024.0},
    ],
    ids=["numbers", "texts", "names", "devices"],
)
def test_max_memory_is_read_in_every_form(memory: Any) -> None:
    assert get_max_memory(memory) == {0: 1024, 1: 2048}
    assert list(get_max_memory(memory)) == [0, 1]


def test_devices_come_before_the_host_and_the_disk() -> None:
    assert list(get_max_memory({"disk": 1, "cpu": 1, "mps": 1, 2: 1, 0: 1})) == [0, 2, "mps", "cpu", "disk"]


def test_what_is_free_is_known_without_a_device() -> None:
    found = get_max_memory()
    assert found["cpu"] > 1 << 20
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("size", ["a lot", "-1GB", -1, None, True, "10 apples"])
def test_a_size_that_cannot_be_read_is_an_error(size: Any) -> None:
    with pytest.raises(ValueError, match="a size is a number of bytes, or text such as '10GB'"):
        infer_auto_device_map(on_meta(), max_memory={0: size})


@pytest.mark.parametrize("device", ["gpu one", "cuda:x", 1.5, None])
def test_a_device_that_cannot_be_read_is_an_error(device: Any) -> None:
    with pytest.raises(
        ValueError, match="is no device: a device is a number, a name such as 'cuda:0', 'cpu', or 'disk'"
    ):
        infer_auto_device_map(on_meta(), max_memory={device: "1GB"})


def test_the_type_as_which_weights_are_loaded_counts() -> None:
    model = on_meta()
    half = compute_module_sizes(model)[""] // 2
    assert infer_auto_device_map(model, max_memory={0: half, "cpu": "1GB"}, dtype="float16") == {"": 0}
    assert infer_auto_device_map(model, max_memory={0: half, "cpu": "1GB"}, dtype=torch.float32) != {"": 0}
    special = {"embed.weight": "torch.float16"}
    assert compute_module_sizes(model, special_dtypes=special)[""] == compute_module_sizes(model)[""] - 128
    with pytest.raises(ValueError, match="dtype must be a type of torch or its name"):
        infer_auto_device_map(model, dtype="half a float")


def test_integers_keep_their_type() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert compute_module_sizes(model, dtype="float16")["0.num_batches_tracked"] == 8


def test_reserved_bytes_stay_free_on_each_accelerator() -> None:
    model = on_meta()
    whole = compute_module_sizes(model)[""]
    memory = {0: whole + 100, 1: whole, "cpu": "1GB"}
    assert infer_auto_device_map(model, memory, reserve=100) == {"": 0}
    assert set(infer_auto_device_map(model, memory, reserve="0.3KB").values()) == {0, 1}
    assert infer_auto_device_map(model, memory, reserve={0: whole}) != {"": 0}
    with pytest.raises(ValueError, match="reserve names 3, of which max_memory says nothing"):
        infer_auto_device_map(model, memory, reserve={3: 1})


def test_a_full_disk_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_memory gives it 0\.00 GB on cpu, disk.*leave 'disk' without a limit"):
        infer_auto_device_map(on_meta(), max_memory={"cpu": 700, "disk": 100})


def test_a_part_that_does_not_fit_where_it_computes_is_named() -> None:
    with pytest.warns(UserWarning, match="blocks.0 takes .* GB, so while it computes on 0 and"):
        infer_auto_device_map(on_meta(), max_memory={0: 100, "cpu": "1GB"}, no_split_module_classes=["Block"])


# -- maps


def test_a_name_stands_for_all_below_it_in_a_clean_map() -> None:
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 1}) == {"a": 0, "b.x": 0, "b.y": 1}
    assert clean_device_map({"a": 1, "b.x": 1, "b.y": 1}) == {"": 1}
    assert clean_device_map({"ab.x": 0, "a.x": 1, "a.y": 1}) == {"ab.x": 0, "a": 1}


def test_a_map_that_is_not_cleaned_names_every_part() -> None:
    found = infer_auto_device_map(on_meta(), max_memory={0: "1GB"}, clean_result=False)
    assert found == dict.fromkeys(["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"], 0)


def test_a_map_that_leaves_something_unplaced_is_an_error_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"device_map has no place for embed\.weight, head\.weight of Net: name them"):
        check_device_map(on_meta(), {"blocks": 0})
    with pytest.raises(ValueError, match=r"blocks\.3\.linear\.weight, blocks\.3\.linear\.bias"):
        check_device_map(on_meta(), {"embed": 0, "head": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 0})


def test_names_that_the_model_does_not_have_are_told() -> None:
    with pytest.warns(UserWarning, match="device_map names decoder, which Net does not have"):
        check_device_map(on_meta(), {"": 0, "decoder": 1})


def test_a_place_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="'gpu' is no device"):
        check_device_map(on_meta(), {"": "gpu"})


# -- balance


def test_balanced_memory_gives_each_device_about_as_much() -> None:
    model = on_meta(blocks=8)
    memory = get_balanced_memory(model, max_memory={0: "1GB", 1: "1GB", 2: "1GB", "cpu": "1GB"})
    found = placed_bytes(model, infer_auto_device_map(model, max_memory=memory))
    assert set(found) == {0, 1, 2}
    assert max(found.values()) - min(found.values()) <= 2 * BLOCK_BYTES


def test_device_0_is_left_to_other_uses_with_low_zero() -> None:
    model = on_meta(blocks=8)
    memory = get_balanced_memory(model, {0: "1GB", 1: "1GB", 2: "1GB"}, low_zero=True)
    assert set(infer_auto_device_map(model, max_memory=memory).values()) == {1, 2}
    memory = get_balanced_memory(model, {0: "1GB", 1: 4 * BLOCK_BYTES, 2: 4 * BLOCK_BYTES}, low_zero=True)
    found = placed_bytes(model, infer_auto_device_map(model, max_memory=memory))
    assert set(found) == {0, 1, 2}
    assert found[0] < 3 * BLOCK_BYTES


def test_devices_are_filled_where_a_model_does_not_fit_on_them() -> None:
    memory = {0: 1000, 1: 1000, "cpu": 10**9}
    found = get_balanced_memory(on_meta(blocks=20), max_memory=memory)
    assert {place: found[place] for place in memory} == memory
    assert "cpu" in get_balanced_memory(on_meta())


# -- of any sizes


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    memory=st.lists(st.integers(0, 120), min_size=0, max_size=3),
    host=st.integers(0, 200),
    tie=st.lists(st.integers(0, 11), max_size=4),
)
def test_no_device_gets_more_than_it_may_hold(sizes: list[int], memory: list[int], host: int, tie: list[int]) -> None:
    parts = [
        Part(str(number), {number: size} | ({100: 7} if number in tie else {})) for number, size in enumerate(sizes)
    ]
    limits = {**dict(enumerate(memory)), "cpu": host, "disk": 10**6}
    placed, kept = plan(parts, limits)
    assert placed.keys() == {part.name for part in parts}
    for device, limit in limits.items():
        held = {key: size for part in parts if placed[part.name] == device for key, size in part.tensors.items()}
        room = kept if device == next(iter(limits)) else 0
        assert sum(held.values()) <= max(0, limit - room)
    assert len({placed[part.name] for part in parts if 100 in part.tensors}) <= 1


def test_warnings_are_not_needed_for_a_plain_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(on_meta(), max_memory={0: "1GB"})
        check_device_map(on_meta(), {"": "disk"})
