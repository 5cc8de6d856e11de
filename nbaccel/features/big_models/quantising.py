"""Quantise the linear layers of a model by bitsandbytes while it is loaded: `load_and_quantize_model`. Runs in ranks.

For models that are not of transformers, whose `from_pretrained` has a quantisation of its own. Weights are read from
the checkpoint one at a time and packed on their device, so the whole model is never in memory unpacked.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from nbaccel.features.big_models.checkpoint_loading import automatic_map, load_checkpoint_in_model
from nbaccel.features.big_models.device_plan import DISK, HOST, check_device_map, device_key, place_of
from nbaccel.features.big_models.dispatching import as_device, dispatch_model
from nbaccel.features.big_models.module_sizes import dtype_of, every_tensor, owner_of
from nbaccel.features.big_models.weight_sources import SOURCE

__all__ = ["BnbQuantizationConfig", "load_and_quantize_model"]

_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_USUAL_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig:
    """Choices for quantising by bitsandbytes: in 4 or in 8 bits, one of them.

    Args:
        llm_int8_threshold: The llm int8 threshold of 8 bits: columns of inputs with larger numbers are computed in half
            precision.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: Quantise the scales, too.
        bnb_4bit_compute_dtype: The type of products, "fp32", "fp16", "bf16" or torch's.
        torch_dtype: The type of what is not quantised; by default that of products, and half precision with 8 bits.
        skip_modules: Names of modules that are not quantised; by default the head of the model, and what is tied to it.
        keep_in_fp32_modules: Names of modules that are not quantised, and stay in float32.

    Raises:
        ValueError: Both or none of the two widths, or a choice that there is not.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = _USUAL_THRESHOLD
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError("one of load_in_4bit and load_in_8bit has to be True, and not both")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(f"bnb_4bit_quant_type is 'fp4' or 'nf4'; got {self.bnb_4bit_quant_type!r}")
        self.bnb_4bit_compute_dtype = _type(self.bnb_4bit_compute_dtype)
        default = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = default if self.torch_dtype is None else _type(self.torch_dtype)


def _type(dtype: str | torch.dtype) -> torch.dtype:
    known = _SHORT.get(dtype) if isinstance(dtype, str) else None
    found = known or dtype_of(dtype)
    assert found is not None
    return found


def load_and_quantize_model(
    model: Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> Module:
    """Load a checkpoint into `model` with its linear layers quantised, and return the model, on the devices of a map.

    Args:
        model: On the meta device; or with numbers, which are quantised then.
        weights_location: The checkpoint, as for `load_checkpoint_and_dispatch`; not for a model with numbers.
        device_map: A map or its name; by default everything on this process's device. Layers that it puts on the host
            or on the disk are not quantised.
        no_split_module_classes, max_memory: For a map that is made here.
        offload_folder, offload_state_dict: Accepted; weights wait in the checkpoint.

    Raises:
        ImportError: There is no bitsandbytes.
        ValueError: The model is empty and there is no checkpoint, or the checkpoint is another model's.
    """
    try:
        bnb: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ImportError("load_and_quantize_model needs bitsandbytes: pip install bitsandbytes") from error
    config, is_empty = bnb_quantization_config, any(tensor.is_meta for _, tensor in every_tensor(model))
    if is_empty and weights_location is None:
        raise ValueError(f"{type(model).__name__} is on the meta device: name its checkpoint, weights_location=...")
    kept = {*(_heads(model) if config.skip_modules is None else config.skip_modules)}
    kept |= {*(config.keep_in_fp32_modules or ())}
    if device_map is None:
        device_map = {"": _own_device()}
    elif isinstance(device_map, str):
        device_map = automatic_map(device_map, model, max_memory, no_split_module_classes, config.torch_dtype)
    check_device_map(model, device_map)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is Linear and not _is_among(name, kept) and _computes(place_of(f"{name}.weight", device_map))
    }
    if is_empty:
        waiting = dict.fromkeys((f"{name}.weight" for name in layers), DISK)  # read below, one at a time
        load_checkpoint_in_model(
            model,
            str(weights_location),
            {**device_map, **waiting},
            dtype=config.torch_dtype,
            keep_in_fp32_modules=config.keep_in_fp32_modules,
        )
    stored = vars(model).get(SOURCE, {})
    for name, layer in layers.items():
        weight = f"{name}.weight"
        values = stored.pop(weight).read({}) if weight in stored else layer.weight.detach()
        packed = _packed(bnb, config, layer, values, as_device(place_of(weight, device_map)))
        owner = model.get_submodule(name.rpartition(".")[0])
        owner._modules[name.rpartition(".")[2]] = packed
    if not is_empty:
        _cast(model, {f"{name}.weight" for name in layers}, config)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit  # type: ignore[assignment]
    return dispatch_model(model, device_map)


def _packed(bnb: Any, config: BnbQuantizationConfig, layer: Linear, weight: Tensor, device: torch.device) -> Module:
    """Return the quantised layer in place of `layer`.

    Args:
        weight: Its numbers.
    """
    sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
    with torch.device("meta"):
        if config.load_in_4bit:
            options = {
                "compress_statistics": config.bnb_4bit_use_double_quant,
                "quant_type": config.bnb_4bit_quant_type,
            }
            made = bnb.nn.Linear4bit(*sizes, bias=has_bias, compute_dtype=config.bnb_4bit_compute_dtype, **options)
        else:
            options = {"has_fp16_weights": False}
            made = bnb.nn.Linear8bitLt(*sizes, bias=has_bias, threshold=config.llm_int8_threshold, **options)
    kind = bnb.nn.Params4bit if config.load_in_4bit else bnb.nn.Int8Params
    dtype = _type(config.torch_dtype or torch.float16) if config.load_in_4bit else torch.float16
    made.weight = kind(weight.to(dtype=dtype, copy=True), requires_grad=False, **options).to(device)
    if has_bias:
        made.bias = layer.bias
    made.train(layer.training).requires_grad_(False)
    return made  # type: ignore[no-any-return]


def _cast(model: Module, packed: set[str], config: BnbQuantizationConfig) -> None:
    """Give what is not quantised its type."""
    for name, tensor in dict(every_tensor(model)).items():
        if name in packed or not tensor.is_floating_point():
            continue
        dtype = (
            torch.float32 if _is_among(name, config.keep_in_fp32_modules or ()) else _type(config.torch_dtype or "fp16")
        )
        owner, leaf = owner_of(model, name)
        if leaf in owner._parameters:
            tensor.data = tensor.data.to(dtype)
        else:
            owner._buffers[leaf] = tensor.to(dtype)


def _heads(model: Module) -> list[str]:
    """Return the last module of the model, its head, and what is tied to it: quantised, they lose the most."""
    owned = {name: {*map(id, part.parameters(recurse=False))} for name, part in model.named_modules() if name}
    last = next((tensors for tensors in reversed(owned.values()) if tensors), set())
    return [name for name, tensors in owned.items() if tensors & last]


def _is_among(name: str, kept: Sequence[str] | set[str]) -> bool:
    """Return whether one of `kept` is a part of the name of a module, from a dot to a dot."""
    return any(f".{each}." in f".{name}." for each in kept)


def _computes(place: Any) -> bool:
    """Return whether what has this place computes there; on a machine without an accelerator the host does."""
    key = device_key(place)
    return key not in (HOST, DISK) or (key == HOST and not torch.accelerator.is_available())


def _own_device() -> Any:
    from nbaccel.train.distributed.partial_state import PartialState  # of this process, which may be a rank

    return PartialState().device
