"""The base of a quantised model: what is known of it, so that nothing has to copy it. Runs in ranks.

Each process loads the base by itself, and no checkpoint holds it. So two questions are left, and answered by sums of
bits: whether all ranks have the same base, and whether a checkpoint's adapters were trained on the one that is here.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.base.quantised import is_quantised_tensor
from nbaccel.base.quantities import gigabytes
from nbaccel.base.values import frozen
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives

__all__ = ["BaseFacts", "KnownBases"]


@frozen
class BaseFacts:
    """Numbers for the base of one model.

    Args:
        tensors, nbytes: How many they are, and their bytes.
        layout: A number for names, shapes and types.
        plain, packed: Numbers for the bits of tensors that are not quantised, and of the others. Two kinds of GPUs may
            quantise the same weights to different bits, and read the same plain ones.
    """

    tensors: int
    nbytes: int
    layout: str
    plain: str
    packed: str

    @classmethod
    def of(cls, model: Module, base: Collection[str]) -> BaseFacts:
        """Read the whole base once, where it is; it waits for the device."""
        named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        tensors = {name: named[name] for name in sorted(base)}
        parts = {name: list(_parts(tensor)) for name, tensor in tensors.items()}
        packed = {name for name, tensor in tensors.items() if is_quantised_tensor(tensor)}
        layout = [(name, [(str(part.dtype), tuple(part.shape)) for part in each]) for name, each in parts.items()]
        sums = _sums(parts)
        return cls(
            len(tensors),
            sum(part.nbytes for each in parts.values() for part in each),
            _number(layout),
            _number([(name, sums[name]) for name in tensors if name not in packed]),
            _number([(name, sums[name]) for name in tensors if name in packed]),
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tensors", "nbytes", "layout", "plain", "packed")}

    def refuse_another(self, stored: dict[str, Any], name: str) -> None:
        """Compare with the facts that a checkpoint has, on each rank.

        Args:
            name: The name of the model.

        Raises:
            ValueError: Its adapters were trained on other weights.
        """
        there = BaseFacts(**stored)
        if there.layout != self.layout:
            warn_user(
                f"the checkpoint has the trained tensors of {name} alone, whose base was {there.tensors} tensors of "
                f"{gigabytes(there.nbytes)}; here it is {self.tensors} of {gigabytes(self.nbytes)}, in another "
                "precision or form: results will differ from those of the training."
            )
        elif there.plain != self.plain:
            raise ValueError(
                f"the checkpoint has the trained tensors of {name} alone, and they were trained on another base than "
                f"this one: frozen tensors have the same names and shapes, and other numbers. Load the model from the "
                "files, and the revision, from which the training loaded it."
            )
        elif there.packed != self.packed:
            warn_user(
                f"the quantised weights of {name} are not bit for bit those of the checkpoint's training, though the "
                "plain ones are: another kind of device, or of quantisation. Losses will differ a little."
            )


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that `tensor` consists of."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_meta:
        with torch._C.DisableTorchFunctionSubclass():
            yield tensor.detach().as_subclass(Tensor)


def _sums(parts: dict[str, list[Tensor]]) -> dict[str, list[int]]:
    """Return a sum of the bits of each tensor. Every device is waited for once."""
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    owners: dict[torch.device, list[str]] = defaultdict(list)
    for name, each in parts.items():
        for part in each:
            if part.numel():
                bits = part.contiguous().reshape(-1).view(torch.uint8)
                is_aligned = bits.numel() % 8 == 0 and bits.storage_offset() % 8 == 0
                words = bits.view(torch.int64) if is_aligned else bits
                sums[part.device].append(words.sum(dtype=torch.int64))
                owners[part.device].append(name)
    found: dict[str, list[int]] = {name: [] for name in parts}
    for device, stacked in sums.items():
        for name, number in zip(owners[device], torch.stack(stacked).tolist(), strict=True):
            found[name].append(number)
    return found


def _number(values: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest() if values else ""


class KnownBases:
    """The facts of bases that were read already: a base does not change while its model lives. It holds no model."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Module, tuple[frozenset[str], BaseFacts]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # of models in another process nothing is known

    def facts(self, model: Module, base: frozenset[str]) -> BaseFacts:
        """Return the facts of `base`, the names of the base's tensors in `model`."""
        known = self._known.get(model)
        if known is None or known[0] != base:
            known = self._known[model] = (base, BaseFacts.of(model, base))
        return known[1]

    def refuse_others(self, model: Module, base: frozenset[str], collectives: Collectives) -> None:
        """Refuse a quantised model whose base differs between ranks: nothing sends it. Collective.

        Args:
            base: The names of its tensors in `model`.

        Raises:
            ValueError: On every rank, with the ranks that differ from rank 0.
        """
        mine = self.facts(model, base)
        everyones: list[BaseFacts] = collectives.gather_objects([mine], f"prepare {type(model).__name__}, its base")
        others = [rank for rank, facts in enumerate(everyones) if facts != everyones[0]]
        if others:
            raise ValueError(
                f"the frozen weights of {type(model).__name__} are not the same on all ranks: rank(s) "
                f"{', '.join(map(str, others))} of {len(everyones)} have others than rank 0. A quantised base is "
                "loaded by each rank itself and never sent: load the same files, or set one seed before random "
                "weights are made."
            )
