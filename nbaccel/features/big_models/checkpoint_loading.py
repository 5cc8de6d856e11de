"""Load a checkpoint into a model, each tensor straight to its place: `load_checkpoint_in_model`. Runs in ranks.

Files are mapped, so the host holds no second copy, and ranks of one machine share what they read. What belongs on the
disk is not read at all: the model remembers where it is, and `dispatch_model` reads it from there. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from nbaccel.base.quantities import listed
from nbaccel.features.big_models.device_plan import (
    DISK,
    DeviceMap,
    check_device_map,
    get_balanced_memory,
    infer_auto_device_map,
    place_of,
)
from nbaccel.features.big_models.dispatching import as_device, dispatch_model, is_dispatched
from nbaccel.features.big_models.module_sizes import dtype_of, every_tensor, owner_of
from nbaccel.features.big_models.stored_tensors import Stored, weights_in
from nbaccel.features.big_models.weight_slots import waiting
from nbaccel.features.big_models.weight_sources import SOURCE, aliases_in
from nbaccel.train.distributed.callers import warn_user

__all__ = ["automatic_map", "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_state_dict"]

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    reserve: int | str | Mapping[Any, int | str] | None = None,
) -> Module:
    """Load a checkpoint into a model and let it run on the devices of a map.

    Args:
        model: The model, which may be on the meta device.
        checkpoint: A folder of Hugging Face's layout, its index, or a file of weights.
        device_map: A map; or "auto" and "balanced": each accelerator gets about as much; "balanced_low_0": the first
            gets only what the others have no room for; "sequential": one after the other is filled. None loads only.
        max_memory, no_split_module_classes, reserve: For a map that is made here, as for `infer_auto_device_map`.
        offload_folder, offload_state_dict, full_state_dict, broadcast_from_rank0: Accepted as by Accelerate. Every rank
            reads the weights from the checkpoint itself, so nothing is written or sent.
        offload_buffers, skip_keys, preload_module_classes, force_hooks: As for `dispatch_model`.
        dtype: Convert floating-point weights to this type; those on the disk each time that they are read.
        strict: Refuse a checkpoint that lacks tensors of the model, or has tensors that the model does not have.

    Returns:
        The same `model`.

    Raises:
        FileNotFoundError: There are no weights.
        CheckpointCorrupt: A file is damaged.
        ValueError: A tensor has another shape, no value, or no place.

    Example:
        >>> with init_empty_weights():  # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> model = load_checkpoint_and_dispatch(model, "llama", device_map="auto")  # doctest: +SKIP
    """
    if isinstance(device_map, str):
        device_map = automatic_map(
            device_map, model, max_memory, no_split_module_classes, dtype, offload_buffers, reserve
        )
    load_checkpoint_in_model(model, checkpoint, device_map, dtype=dtype, strict=strict, offload_buffers=offload_buffers)
    if device_map is None:
        return model
    together = [*(preload_module_classes or ()), *_names(no_split_module_classes)]
    return dispatch_model(
        model,
        device_map,
        offload_buffers=offload_buffers,
        skip_keys=[skip_keys] if isinstance(skip_keys, str) else [*(skip_keys or ())],
        preload_module_classes=together,
        force_hooks=force_hooks,
    )


def _names(classes: Any) -> list[Any]:
    return [classes] if isinstance(classes, str | type) else [*(classes or ())]


def automatic_map(
    kind: str,
    model: Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    reserve: Any = None,
) -> dict[str, Any]:
    """Return the device map that "auto", "balanced", "balanced_low_0" or "sequential" stands for.

    Raises:
        ValueError: `kind` is none of them.
    """
    if kind not in _AUTOMATIC:
        raise ValueError(f"device_map is a map, or one of {listed([repr(name) for name in _AUTOMATIC])}; got {kind!r}")
    if kind != "sequential":
        is_low = kind == "balanced_low_0"
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, low_zero=is_low, reserve=reserve
        )
        reserve = None  # it is in these limits already
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers, reserve=reserve
    )


def load_checkpoint_in_model(
    model: Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each tensor to its place in a map.

    What a map puts on the disk stays on the meta device until `dispatch_model`, which is to be called next.

    Args:
        model: The model, which may be on the meta device.
        checkpoint: A folder of Hugging Face's layout, its index, or a file of weights.
        device_map: The place of each part, as for `dispatch_model`. None loads to the CPU.
        offload_folder, offload_state_dict, offload_buffers, full_state_dict, broadcast_from_rank0: Accepted as by
            Accelerate, without effect.
        dtype: Convert floating-point weights to this type.
        keep_in_fp32_modules: Modules that stay float32 although `dtype` is float16: parts of the names of tensors.
        offload_8bit_bnb: Refused: transformers loads 8-bit weights of bitsandbytes.
        strict: Refuse a checkpoint that lacks tensors of the model, or has tensors that the model does not have.

    Raises:
        FileNotFoundError: There are no weights.
        CheckpointCorrupt: A file is damaged.
        ValueError: A tensor has another shape, no value, or no place.

    Example:
        >>> load_checkpoint_in_model(model, "llama", device_map={"": "cpu"}, dtype="bfloat16")  # doctest: +SKIP
    """
    if offload_8bit_bnb:
        raise NotImplementedError(
            "offload_8bit_bnb: 8-bit weights of bitsandbytes are loaded by transformers, "
            "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))"
        )
    if is_dispatched(model):
        raise ValueError(f"{type(model).__name__} was dispatched already: load it first, or load another model")
    if device_map is not None:
        check_device_map(model, device_map)
    stored = weights_in(checkpoint)
    loading = _Loading(model, str(checkpoint), stored, dtype_of(dtype), keep_in_fp32_modules or ())
    loading.check(strict)
    loading.run(device_map or {"": "cpu"}, moves=device_map is not None, offload_buffers=offload_buffers)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, Tensor | None]:
    """Return the tensors of one file of weights: those that a map puts on devices there, others on the CPU.

    Of a safetensors file, what the map puts on the disk is None. Tensors on the CPU are views of the file.
    """
    found: dict[str, Tensor | None] = {}
    opened: dict[str, Any] = {}
    for name, stored in weights_in(checkpoint_file).items():
        place = "cpu" if device_map is None else place_of(name, device_map)
        found[name] = None if place == DISK else stored.read(opened).to(as_device(place or "cpu"))
    return found


class _Loading:
    """The work of one `load_checkpoint_in_model`."""

    def __init__(
        self,
        model: Module,
        checkpoint: str,
        stored: Mapping[str, Stored],
        dtype: torch.dtype | None,
        fp32: Collection[str],
    ) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._stored = stored
        self._dtype = dtype
        self._fp32 = fp32
        self._tensors = dict(every_tensor(model))  # all are kept, since they are known by their identity meanwhile
        self._aliases = aliases_in(model)
        self._made: dict[int, Tensor] = {}

    def find(self, name: str) -> Stored | None:
        return next((self._stored[each] for each in self._aliases[name] if each in self._stored), None)

    def check(self, strict: bool) -> None:
        """Refuse shapes that differ, and names that are missing; before anything of the model is changed."""
        kind = type(self._model).__name__
        saved = self._model.state_dict(keep_vars=True).keys()
        missing = [name for name in saved if name in self._tensors and self.find(name) is None]
        empty = [name for name in missing if self._tensors[name].is_meta]
        if empty or (strict and missing):
            raise ValueError(
                f"{self._checkpoint} has no value for {listed(empty or missing, 3)} of {kind}, "
                f"{'which are on the meta device' if empty else 'and strict=True'}: it is another model's, or saved "
                f"under other names; it begins with {listed([*self._stored], 3)}{self._instead()}"
            )
        for name, tensor in self._tensors.items():
            stored = self.find(name)
            if stored is not None and stored.shape != tensor.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)} in {kind}, and {tuple(stored.shape)} in "
                    f"{self._checkpoint}: the checkpoint is of another configuration of the model"
                )
        if unused := [name for name in self._stored if name not in self._tensors]:
            if strict:
                raise ValueError(
                    f"{self._checkpoint} has {listed(unused, 3)}, which {kind} does not have (strict=True)"
                )
            warn_user(f"{self._checkpoint} has {listed(unused, 3)}, which {kind} does not have; left out.")

    def _instead(self) -> str:
        """Return what loads files with the names of older versions of a library."""
        if not hasattr(type(self._model), "from_pretrained"):
            return ""
        kind = type(self._model).__name__
        return f". {kind}.from_pretrained(..., device_map=...) knows the names under which its library saves weights"

    def run(self, device_map: DeviceMap, moves: bool, offload_buffers: bool) -> None:
        """Give each tensor its numbers at its place.

        Args:
            moves: Put tensors that have numbers already where the map says, too.
        """
        buffers = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        left: dict[str, Stored] = {}
        opened: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            stored = self.find(name)
            place = place_of(name, device_map)
            if stored is None:
                continue
            if place == DISK and (offload_buffers or name not in buffers):
                left[name] = stored
                empty = torch.empty_like(tensor, dtype=self._type(name, tensor), device="meta")
                if isinstance(tensor, Parameter):
                    empty = Parameter(empty, tensor.requires_grad)
                self._set(name, tensor, waiting(empty, name, stored))
                continue
            device = tensor.device if not moves and not tensor.is_meta else as_device("cpu" if place == DISK else place)
            with torch.no_grad():
                self._fill(name, tensor, stored, device, opened)
        if left:
            setattr(self._model, SOURCE, left)

    def _fill(self, name: str, tensor: Tensor, stored: Stored, device: torch.device, opened: dict[str, Any]) -> None:
        """Copy the stored numbers into a tensor that has its place and type already, or make it there."""
        dtype = self._type(name, tensor)
        if not tensor.is_meta and tensor.device == device and tensor.dtype == dtype:
            if id(tensor) not in self._made:
                self._made[id(tensor)] = tensor.copy_(stored.read(opened))
            return
        if id(tensor) in self._made:
            self._set(name, tensor, self._made[id(tensor)])
            return
        new = stored.read(opened).to(device, dtype, copy=True)
        self._set(name, tensor, Parameter(new, tensor.requires_grad) if isinstance(tensor, Parameter) else new)

    def _set(self, name: str, tensor: Tensor, new: Tensor) -> None:
        """Put `new` in place of `tensor` under one of its names; what was put there first, under the others."""
        key = id(tensor)
        self._made.setdefault(key, new)
        owner, leaf = owner_of(self._model, name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = self._made[key]  # type: ignore[assignment]
        else:
            owner._buffers[leaf] = self._made[key]

    def _type(self, name: str, tensor: Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        stays = self._dtype == torch.float16 and any(f"{part}." in f"{name}." for part in self._fp32)
        return torch.float32 if stays else self._dtype
