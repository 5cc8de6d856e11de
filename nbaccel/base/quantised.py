"""Models with quantised weights: how they are recognised, and which of their tensors a training changes.

Runs in ranks and in the kernel. A quantised base is trained by adapters beside it. The base itself does not change,
each process loads its own, and the libraries that quantise have moved and cast it already. So it is left where it is:
gradients, checkpoints and results of a run have the trained tensors alone. Imports neither torch nor these libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["TrainedTensors", "base_of", "cannot_be_sent", "is_quantised", "is_quantised_tensor", "trained_state"]

_MARKS = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit", "hf_quantizer", "quantization_method")
"""Attributes that transformers sets, to something true, on a model with quantised weights."""

_KINDS = frozenset({"Params4bit", "Int8Params"})
"""Names of bitsandbytes' classes of weights: stand-ins of other packages have the same."""

_PACKAGES = frozenset({"bitsandbytes", "gguf", "hqq", "optimum", "quanto", "torchao"})

_PACKED = ("torch.int32", "torch.int8", "torch.uint8")
"""Types of buffers that layers of GPTQ and AWQ keep their packed weights in."""

_EXTRA = "_extra_state"
"""Torch's name for what a module adds to its state by `get_extra_state`."""


def is_quantised(model: Any) -> bool:
    """Return whether `model`, a module, has quantised weights, by the marks of libraries or by its parameters."""
    inner = _unwrapped(model)
    if getattr(getattr(inner, "config", None), "quantization_config", None) is not None:
        return True
    if any(marks.get(mark) for marks in map(vars, inner.modules()) for mark in _MARKS):  # peft's wrapper has none
        return True
    return any(map(is_quantised_tensor, inner.parameters()))


def cannot_be_sent(model: Any) -> bool:
    """Return whether `model` has weights of bitsandbytes' classes: pickled, they lose their class and their numbers."""
    return any(type(parameter).__name__ in _KINDS for parameter in model.parameters())


def _unwrapped(model: Any) -> Any:
    """Return the module inside of the wrappers of DDP and `torch.compile`, whose marks count."""
    while True:
        is_replica = any(kind.__name__ == "DistributedDataParallel" for kind in type(model).__mro__)
        inner = model._modules.get("module" if is_replica else "_orig_mod")
        if inner is None:
            return model
        model = inner


def is_quantised_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a quantised weight, by its true type; such a weight is never trained.

    Tensors of these packages that are trained, or that an optimizer keeps as its state, are none.
    """
    torch: Any = sys.modules["torch"]
    kind = type(tensor)
    if kind is torch.nn.Parameter or not (_consists_of_others(kind) or any(map(_is_of_a_library, kind.__mro__))):
        return False
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def _is_of_a_library(kind: type) -> bool:
    return kind.__name__ in _KINDS or kind.__module__.partition(".")[0] in _PACKAGES


def _consists_of_others(kind: type) -> bool:
    """Return whether it is a class of another package whose tensors consist of others, such as torchao's."""
    return hasattr(kind, "__tensor_flatten__") and kind.__module__.partition(".")[0] not in ("torch", "nbaccel")


def base_of(model: Any, kept: Collection[int] = ()) -> frozenset[str]:
    """Return the names of the tensors of a quantised `model` that training does not change: its base.

    These are the parameters that need no gradient, also those that are not quantised, and the buffers of layers that
    keep packed weights. Empty for a model without quantised weights.

    Args:
        kept: Ids of parameters that count as trained although they need no gradient now.
    """
    if not is_quantised(model):
        return frozenset()
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and id(parameter) not in kept
    }
    return frozenset(frozen | set(_packed_buffers(model)))


def _packed_buffers(model: Any) -> Iterator[str]:
    """Yield the names of all buffers of layers that keep packed weights."""
    for prefix, module in model.named_modules():
        own = module._parameters.values()
        if any(parameter is not None and parameter.requires_grad for parameter in own):
            continue
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        is_packed = any(buffer.ndim > 1 and str(buffer.dtype) in _PACKED for buffer in buffers.values())
        if is_packed or any(parameter is not None and is_quantised_tensor(parameter) for parameter in own):
            yield from (f"{prefix}.{name}" if prefix else name for name in buffers)


def trained_state(model: Any, state: Mapping[str, Any], base: Collection[str]) -> dict[str, Any]:
    """Return the part of the state dict `state` of `model` without its `base`, and without what describes the base.

    Libraries add entries that belong to no parameter, such as the scales of packed weights: these are left out, too.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {
        name: value
        for name, value in state.items()
        if (name not in base if name in tensors else name.rpartition(".")[2] == _EXTRA)
    }


class TrainedTensors(dict[str, Any]):
    """The trained tensors of a quantised model, by name: what a run brings back of it. The base stays in the ranks.

    Args:
        model: The name of its class.

    Example:
        >>> import torch
        >>> TrainedTensors("PeftModel", {"adapter.weight": torch.zeros(4, 2)})
        TrainedTensors of PeftModel: 1 tensor, 32 bytes
    """

    def __init__(self, model: str, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model, dict(self))

    def __repr__(self) -> str:
        count = len(self)
        return f"TrainedTensors of {self.model}: {count} tensor{'s' * (count != 1)}, {self.nbytes:,} bytes"

    @property
    def nbytes(self) -> int:
        return sum(getattr(tensor, "nbytes", 0) for tensor in self.values())

    def load_into(self, model: Any) -> None:
        """Load the tensors into `model`, made as the one in the ranks; its base may have another precision.

        Raises:
            ValueError: A trained tensor has no place in `model`, one that `model` trains is missing, or shapes differ.
        """
        own = model.state_dict()
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        odd = sorted(name for name in self if name not in own or not _is_alike(own[name], self[name]))
        missing = sorted(trained - self.keys())
        if odd or missing:
            name = (odd or missing)[0]
            what = f"{name} of the ranks has no place in it" if odd else f"it trains {name}, which did not come"
            raise ValueError(
                f"these {len(self)} tensors of {self.model} do not fit this {type(model).__name__}: {what} "
                f"({len(odd)} without a place, {len(missing)} missing). Give it the same adapters as in the cell"
            )
        model.load_state_dict(dict(self), strict=False)


def _is_alike(one: Any, other: Any) -> bool:
    return getattr(one, "shape", None) == getattr(other, "shape", None)
