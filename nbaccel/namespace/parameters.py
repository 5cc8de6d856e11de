"""Numbers for values: they show whether parameters are the same elsewhere, or whether a container has changed.

Ranks compare such numbers at an optimizer's step and at the end of a cell; the notebook compares its values with those
of a rank. They are sums of bits, so nothing is sent but numbers. Runs in ranks and in the kernel, and does not import
torch.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from nbaccel.base.quantised import is_quantised, is_quantised_tensor
from nbaccel.base.values import attributes_of
from nbaccel.namespace.wrappers import plain

__all__ = [
    "checksum",
    "checksums",
    "fingerprint",
    "is_bound_to_its_process",
    "mark",
    "model_in",
    "number",
    "parameters_of",
    "parts_of",
]

_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
"""Types of torch by their bytes. Sums of integers depend neither on the order of the summands nor on the device."""

_BOUND = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Thread,
    weakref.ReferenceType,
    types.GeneratorType,
    io.IOBase,
)
_SAMPLE = 4096
_SMALL = 1 << 16  # elements
_DEPTH = 2  # a trainer has a model that has a network
_MOST_PARTS = 2000
"""Number of elements and attributes that are searched for parameters; a larger value is not judged by them."""


def checksum(value: Any) -> int | None:
    """Return a number that is equal for equal parameters in `value`; None if there are none.

    Parameters are those of a model or an optimizer, tensors that require a gradient, and such values in a list, a
    dictionary or the attributes of an object. It is also None if ranks hold different parts of them: FSDP, DTensors.
    Beside quantised weights, which nothing trains, those count that are trained.
    """
    weights = parameters_of(value)
    if _has_base(value, weights):
        weights = [weight for weight in weights if weight.requires_grad]
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(isinstance(weight, tensors.DTensor) for weight in weights):
        return None
    return fingerprint(weights)


def _has_base(value: Any, weights: Iterable[Any]) -> bool:
    """Return whether `weights`, those of `value`, are of a quantised model."""
    if _is_itself(value) and issubclass(type(value), sys.modules["torch"].nn.Module):
        return is_quantised(value)
    return any(map(is_quantised_tensor, weights))


def checksums(named: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the `checksum` of each value that has parameters, and the names that only hold parameters of other names.

    Models and tensors come first: of ``model``, ``optimizer`` and ``trainer`` the last two only hold it.
    """
    found: dict[str, int] = {}
    holders: list[str] = []
    seen: set[int] = set()
    for name in sorted(named, key=lambda name: (not _is_itself(plain(named[name])), name)):
        with suppress(Exception):  # a class of the user's that answers in a way of its own
            value = plain(named[name])
            ids = set(map(id, parameters_of(value)))
            if (own := checksum(value)) is None:
                continue
            found[name] = own
            if ids <= seen and not _is_itself(value):
                holders.append(name)
            seen |= ids
    return found, holders


def parameters_of(value: Any) -> list[Any]:
    """Return the parameters that `checksum` adds up, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    walk = _Walk(torch)
    found = {id(parameter): parameter for parameter in walk.parameters(value, _DEPTH)}
    return [] if walk.has_given_up else list(found.values())


def model_in(value: Any) -> str | None:
    """Return the name of the first attribute that is a model; "" if `value` is a model, and None if there is none."""
    torch, attributes = sys.modules.get("torch"), attributes_of(value)
    if torch is None or attributes is None:
        return None
    if issubclass(type(value), torch.nn.Module):
        return ""
    return next((name for name, part in attributes.items() if issubclass(type(part), torch.nn.Module)), None)


def is_bound_to_its_process(value: Any, depth: int = 3) -> bool:
    """Return whether `value` holds a lock, thread, open file, weak reference or generator, as deep as is searched."""
    left = _MOST_PARTS
    values = [value]
    for _ in range(depth):
        if any(issubclass(type(each), _BOUND) for each in values):
            return True
        whole = [each for each in values if type(each).__module__.partition(".")[0] != "pandas"]  # weak references
        values = [part for each in whole for part in parts_of(each)][: max(0, left)]
        left -= len(values)
    return any(issubclass(type(each), _BOUND) for each in values)


def mark(value: Any) -> int | None:
    """Return a number that changes when a container or an array is written to, or an object gets other attributes.

    It is None for anything else. The contents of attributes are not read: a fit sets new ones. Of arrays, some 4,096
    elements are read. Objects that hold data are left out, because they cache.
    """
    kind = type(value)
    if issubclass(kind, list):
        return hash((list.__len__(value), *map(id, list.__getitem__(value, slice(_MOST_PARTS)))))
    if issubclass(kind, dict):
        return hash((dict.__len__(value), *map(id, itertools.islice(dict.values(value), _MOST_PARTS))))
    if issubclass(kind, tuple | set):
        return len(value)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _mark_of_tensor(value, torch)
    if kind.__module__ == "numpy" and hasattr(kind, "flat") and hasattr(kind, "__setitem__"):
        sample = value.flat[:: max(1, value.size // _SAMPLE)]
        return None if value.dtype.hasobject else hash((value.shape, zlib.crc32(sample.tobytes())))
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        rows = value.iloc[:: max(1, len(value) // _SAMPLE)]
        return hash((value.shape, int(sys.modules["pandas"].util.hash_pandas_object(rows).sum())))
    attributes = attributes_of(value)
    if kind.__module__ == "builtins" or attributes is None:
        return None
    if torch is not None and issubclass(kind, torch.utils.data.Dataset | torch.utils.data.Sampler):
        return None
    is_module = torch is not None and issubclass(kind, torch.nn.Module)
    if is_module and next(iter(value.parameters()), None) is not None:
        return None  # it has a `checksum`
    return hash(tuple((name, id(part)) for name, part in attributes.items() if not is_module or name != "training"))


def _mark_of_tensor(tensor: Any, torch: Any) -> int | None:
    if tensor.requires_grad or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    if not tensor.is_contiguous():  # a sample would need a copy of all
        return None
    sample = tensor.detach().view(-1)[:: max(1, tensor.numel() // _SAMPLE)]
    return hash((tuple(tensor.shape), fingerprint([sample]) or 0))


def fingerprint(tensors: Iterable[Any]) -> int | None:
    """Return a number for the bits of `tensors`; None if they hold only zeros. It waits for the devices."""
    torch = sys.modules["torch"]
    sums: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta" or not tensor.numel():
            continue
        bits = tensor.detach()
        if bits.is_sparse:
            bits = bits.coalesce()
            sums.setdefault(tensor.device, []).append((bits.indices() * bits.indices()).sum())
            bits = bits.values()
        bits = torch.view_as_real(bits) if bits.is_complex() else bits
        whole = bits.view(getattr(torch, _INTEGERS[bits.element_size()]))
        words = _words(whole) if whole.numel() > _SMALL else whole
        sums.setdefault(tensor.device, []).append(words.sum(dtype=torch.int64))
        if whole.numel() <= _SMALL:  # of two biases one often gains what the other loses: equal sums
            sums[tensor.device].append((whole * whole).sum(dtype=torch.int64))
    numbers = [each for sum_ in sums.values() for each in torch.stack(sum_).tolist()]
    if not any(numbers):
        return None
    return number(repr(numbers).encode())


def _words(integers: Any) -> Any:
    """Return contiguous integers as integers of 64 bits: these need no conversion, and are summed faster."""
    size = integers.element_size()
    if not integers.is_contiguous() or integers.nbytes % 8 or integers.storage_offset() * size % 8:
        return integers
    return integers.reshape(-1).view(sys.modules["torch"].int64)


def number(data: bytes) -> int:
    """Return a number of 63 bits that is never 0."""
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1) | 1


def _is_itself(value: Any) -> bool:
    """Return whether `value` is a model or a tensor itself, and not an object that holds one."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor | torch.nn.Module)


class _Walk:
    """Searches the parts of a value for parameters."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._left = _MOST_PARTS
        self.has_given_up = False

    def parameters(self, value: Any, depth: int) -> Iterator[Any]:
        torch, kind = self._torch, type(value)
        if issubclass(kind, torch.Tensor):
            if value.is_leaf and value.requires_grad:
                yield value
        elif issubclass(kind, torch.nn.Module):
            modules = list(torch.nn.Module.modules(value))
            if not any(type(part).__name__ == "FullyShardedDataParallel" for part in modules):
                yield from torch.nn.Module.parameters(value)
                for module in modules:  # tensors that are no `Parameter`, and that a loop steps by hand
                    for part in list(vars(module).values()):
                        if issubclass(type(part), torch.Tensor | list | tuple):
                            yield from self.parameters(part, min(depth, 1))
        elif issubclass(kind, torch.optim.Optimizer):
            for group in value.param_groups:
                yield from group["params"]
        elif depth:
            parts = parts_of(value)
            self._left -= len(parts)
            if self._left < 0:
                self.has_given_up = True
                return
            for part in parts:
                yield from self.parameters(part, depth - 1)


def parts_of(value: Any) -> list[Any]:
    """Return the elements of a container, or the attributes of an object of a class."""
    kind = type(value)
    if issubclass(kind, list | tuple):
        return list(kind.__iter__(value))
    if issubclass(kind, dict):
        return list(dict.values(value))
    attributes = None if kind.__module__ == "builtins" else attributes_of(value)
    return [] if attributes is None else list(attributes.values())
