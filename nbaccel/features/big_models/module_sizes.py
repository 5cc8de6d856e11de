"""Tensors of a model and their bytes, module by module. Runs anywhere; moves nothing, and works on meta tensors.

A tensor that several modules share counts once, at its first owner: sharing is identity, since meta tensors have no
address. The helpers have Accelerate's names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

__all__ = [
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "dtype_of",
    "every_tensor",
    "find_tied_parameters",
    "get_max_layer_size",
    "get_non_persistent_buffers",
    "named_module_tensors",
    "nbytes_as",
    "owner_of",
    "retie_parameters",
    "set_module_tensor_to_device",
]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE)
_BITS_PER_BYTE = 8


def convert_file_size_to_int(size: int | float | str) -> int:
    """Return a size in bytes: "1GB" is decimal, "1GiB" binary, "1Gb" a gigabit; a number is in bytes.

    Raises:
        ValueError: It is none.

    Example:
        >>> convert_file_size_to_int("1MiB"), convert_file_size_to_int("1.5 GB"), convert_file_size_to_int(7)
        (1048576, 1500000000, 7)
    """
    if isinstance(size, int | float) and not isinstance(size, bool) and size >= 0:
        return int(size)
    said = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if said is None:
        raise ValueError(f"a size is a number of bytes, or text such as '10GB' or '10GiB'; got {size!r}")
    number, power, binary, unit = said.groups()
    count = float(number) * (1024 if binary else 1000) ** " KMGT".index(power.upper() or " ")
    return int(count / _BITS_PER_BYTE if unit == "b" and not binary and power else count)


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a type that is given as itself or by its name, "float16" or "torch.float16".

    Raises:
        ValueError: There is none of that name.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be a type of torch or its name, such as 'bfloat16'; got {dtype!r}")
    return found


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Return the bytes that one element of this type takes.

    Example:
        >>> dtype_byte_size(torch.float32)
        4
    """
    return dtype.itemsize


def nbytes_as(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Return the bytes of `tensor` once it is loaded as `dtype`, which only changes floating-point numbers."""
    return tensor.numel() * (dtype.itemsize if dtype is not None and tensor.is_floating_point() else tensor.itemsize)


def every_tensor(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer of `module` and below, one that is shared under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def named_module_tensors(
    module: Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of `module` with their names.

    Args:
        recurse: Also those of the modules below.
        remove_non_persistent: Leave out buffers that no state dict has.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def get_non_persistent_buffers(module: Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that no state dict has.

    Args:
        recurse: Also those of the modules below.
        fqns: Names from `module` on, otherwise each module's own.
    """
    found = set()
    for prefix, part in module.named_modules() if recurse else [("", module)]:
        found |= {f"{prefix}.{name}" if fqns and prefix else name for name in part._non_persistent_buffers_set}
    return found


def compute_module_sizes(
    model: Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor of `model` and of every module, by name; "" is the model.

    Args:
        dtype: The floating-point type as which it will be loaded.
        special_dtypes: The same for tensors by their names.

    Example:
        >>> sizes = compute_module_sizes(torch.nn.Sequential(torch.nn.Linear(2, 3)), dtype="float16")
        >>> sizes[""], sizes["0"], sizes["0.weight"]
        (18, 18, 12)
    """
    general, special = dtype_of(dtype), {name: dtype_of(kind) for name, kind in (special_dtypes or {}).items()}
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = nbytes_as(tensor, special.get(name, general))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Collection[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer has no modules below it, or its class is one of `no_split_module_classes`.

    Args:
        modules: Names with modules or tensors.
        module_sizes: By these names, from `compute_module_sizes`.
    """
    largest, rest = 0, list(modules)
    names: list[str] = []
    while rest:
        name, module = rest.pop(0)
        children = list(module.named_children()) if isinstance(module, Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            rest = [(f"{name}.{child}", below) for child, below in children] + rest
            continue
        size = module_sizes[name]
        if size >= largest:
            names = [*names, name] if size == largest else [name]
            largest = size
    return largest, names


def calculate_maximum_sizes(model: Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of `model`, and those of its largest layer with its names."""
    sizes = compute_module_sizes(model)
    parts = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or [])


def find_tied_parameters(model: Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of parameters that are one tensor, a list for each such tensor. Keywords are accepted, unused.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def check_tied_parameters_in_config(model: Module) -> bool:
    """Return whether the configuration of a model of transformers says that weights of it are one tensor."""
    config = getattr(model, "config", None)
    if config is None or not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ties_words = bool(getattr(text, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None  # type: ignore[operator]
    ties_decoder = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return ties_words or bool(ties_decoder) or any(hasattr(part, "_tie_weights") for part in model.modules())


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Let the names of each list be one parameter again: the first of them that is not on the meta device."""
    for group in tied_params:
        places = [owner_of(model, name) for name in group]
        held = [owner._parameters[leaf] for owner, leaf in places]
        real = next((parameter for parameter in held if parameter is not None and not parameter.is_meta), None)
        if real is not None:
            for owner, leaf in places:
                owner._parameters[leaf] = real


def owner_of(model: Module, name: str) -> tuple[Module, str]:
    """Return the module that has the tensor of this name, and the name of the tensor there.

    Raises:
        ValueError: `model` has no such tensor.
    """
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no module {path!r}, and so no tensor {name!r}") from None
    if leaf not in owner._parameters and leaf not in owner._buffers:
        raise ValueError(f"{path or type(model).__name__} has no parameter or buffer {leaf!r}")
    return owner, leaf


def set_module_tensor_to_device(
    module: Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of `module` on `device`, with a new value if one is given.

    Args:
        tensor_name: From `module` on, "encoder.0.weight".
        value: Needed if the tensor is on the meta device.
        dtype: The type of a floating-point value; without it the value gets the type that the tensor had.
        tied_params_map, clear_cache: Accepted, unused.

    Raises:
        ValueError: There is no such tensor, a value is needed, or it has another shape.
        NotImplementedError: Fp16_statistics, of weights that bitsandbytes has quantised.
    """
    if fp16_statistics is not None:
        raise NotImplementedError(f"{tensor_name} has statistics of bitsandbytes: load it by transformers instead")
    owner, leaf = owner_of(module, tensor_name)
    old = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
    if old is None:
        raise ValueError(f"{tensor_name} is None in this {type(owner).__name__}, and stays so")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(
            f"{tensor_name} is on the meta device and has no numbers: give its value to put it on {device}"
        )
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name} has the shape {tuple(old.shape)}, and the value {tuple(value.shape)}")
    new = old.detach() if value is None else value.detach()
    kind = dtype_of(dtype) or (old.dtype if value is not None else None)
    new = new.to(device, kind if new.is_floating_point() else None, non_blocking=non_blocking)
    if leaf in owner._parameters:
        owner._parameters[leaf] = Parameter(new, requires_grad=old.requires_grad)
    else:
        owner._buffers[leaf] = new
