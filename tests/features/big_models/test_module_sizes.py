"""Tensors of models and their bytes, beside what Accelerate says of the same models."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate.utils import modeling as theirs
from torch import nn

from features.big_models.placed_models import empty, plain
from nbaccel.utils import modeling as ours
from nbaccel.utils.modeling import (
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [plain, empty])
def test_sizes_are_those_of_accelerate(make: Any, tied: bool) -> None:
    model = make(tied)
    assert compute_module_sizes(model) == dict(theirs.compute_module_sizes(model))
    assert compute_module_sizes(model, buffers_only=True) == dict(theirs.compute_module_sizes(model, buffers_only=True))
    assert compute_module_sizes(model, dtype="float16") == dict(theirs.compute_module_sizes(model, dtype="float16"))
    assert calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)
    assert ours.find_tied_parameters(model) == theirs.find_tied_parameters(model)
    sizes, parts = compute_module_sizes(model), list(model.named_children())
    for names in ([], ["PlacedBlock"], ["MultiheadAttention"]):
        assert get_max_layer_size(parts, sizes, names) == theirs.get_max_layer_size(parts, sizes, names)


@pytest.mark.parametrize("arguments", [{}, {"include_buffers": False}, {"remove_non_persistent": True}], ids=str)
def test_tensors_are_named_as_by_accelerate(arguments: dict[str, bool]) -> None:
    model = plain()
    for recurse in (False, True):
        found = [name for name, _ in named_module_tensors(model, recurse=recurse, **arguments)]
        assert found == [name for name, _ in theirs.named_module_tensors(model, recurse=recurse, **arguments)]
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"table"}
    assert get_non_persistent_buffers(nn.Sequential(model), recurse=True, fqns=True) == {"0.table"}


def test_a_buffer_of_the_same_name_elsewhere_is_not_left_out() -> None:
    """Accelerate leaves out every buffer whose name is that of a non-persistent one anywhere."""
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].register_buffer("mask", torch.ones(1), persistent=False)
    model[1].register_buffer("mask", torch.ones(1))
    found = named_module_tensors(nn.Sequential(model), recurse=True, remove_non_persistent=True)
    assert [name for name, _ in found] == ["0.1.mask"]


@pytest.mark.parametrize("size", [7, "1KB", "1kb", "1Kb", "2MB", "1.5GB", "1GiB", "3MiB", "5KIB", "10 GB"])
def test_sizes_in_words_are_read_as_by_accelerate(size: Any) -> None:
    assert convert_file_size_to_int(size) == theirs.convert_file_size_to_int(size)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int64], ids=str
)
def test_bytes_of_types(dtype: torch.dtype) -> None:
    assert dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype)


def test_a_tensor_is_put_on_a_device() -> None:
    model = empty()
    value = torch.randn(24)
    set_module_tensor_to_device(model, "start", "cpu", value=value, dtype="float64")
    assert torch.equal(model.start, value.double())
    assert isinstance(model.start, nn.Parameter)
    set_module_tensor_to_device(model, "norm.running_mean", "meta")
    assert model.norm.running_mean.is_meta
    set_module_tensor_to_device(model, "norm.running_mean", torch.device("cpu"), value=value)
    assert torch.equal(model.norm.running_mean, value)
    set_module_tensor_to_device(model, "blocks.0.scale", "cpu", value=torch.ones(24, dtype=torch.float16))
    assert model.blocks[0].scale.dtype == torch.float32  # the type that it had


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("start", None, "start is on the meta device and has no numbers: give its value to put it on cpu"),
        ("start", torch.ones(3), r"start has the shape \(24,\), and the value \(3,\)"),
        ("start.more", torch.ones(3), "PlacedNet has no module 'start', and so no tensor 'start.more'"),
        ("norm.mean", torch.ones(3), "norm has no parameter or buffer 'mean'"),
        ("head.bias", torch.ones(3), "head.bias is None in this Linear, and stays so"),
    ],
)
def test_a_tensor_that_cannot_be_put_there_is_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        set_module_tensor_to_device(empty(), name, "cpu", value=value)


def test_weights_of_bitsandbytes_are_left_to_transformers() -> None:
    with pytest.raises(NotImplementedError, match="start has statistics of bitsandbytes"):
        set_module_tensor_to_device(plain(), "start", "cpu", fp16_statistics=torch.ones(1))


def test_names_are_tied_again() -> None:
    model = plain(tied=True)
    groups = ours.find_tied_parameters(model)
    model.embed.weight = nn.Parameter(torch.empty(32, 24, device="meta"))
    retie_parameters(model, groups)
    assert model.embed.weight is model.head.weight
    assert not model.embed.weight.is_meta


def test_tied_parameters_in_several_places_are_warned_of() -> None:
    groups = ours.find_tied_parameters(plain(tied=True))
    with pytest.warns(UserWarning, match=r"several places, embed.weight on 0, head.weight on 1: give their modules"):
        check_tied_parameters_on_same_device(groups, {"": 0, "head": 1})
    check_tied_parameters_on_same_device(groups, {"": 0})


def test_a_configuration_says_whether_weights_are_tied() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    for ties in (False, True):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=ties)
        assert check_tied_parameters_in_config(transformers.LlamaForCausalLM(config)) is ties
    assert not check_tied_parameters_in_config(plain(tied=True))


def test_modules_show_accelerates_names() -> None:
    import nbaccel
    from nbaccel.big_modeling import dispatch_model, get_max_memory
    from nbaccel.hooks import add_hook_to_module
    from nbaccel.utils import check_device_map, get_balanced_memory, infer_auto_device_map, load_checkpoint_in_model

    assert nbaccel.dispatch_model is dispatch_model
    assert nbaccel.hooks.add_hook_to_module is add_hook_to_module
    assert nbaccel.utils.get_max_memory is get_max_memory
    assert nbaccel.infer_auto_device_map is infer_auto_device_map
    assert nbaccel.load_checkpoint_in_model is load_checkpoint_in_model
    assert nbaccel.utils.modeling.check_device_map is check_device_map
    assert nbaccel.utils.modeling.get_balanced_memory is get_balanced_memory


def test_a_program_that_needs_none_of_it_imports_none_of_it() -> None:
    code = "import sys, nbaccel, nbaccel.utils; nbaccel.Accelerator; "
    code += "print([name for name in sys.modules if 'device_maps' in name])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
