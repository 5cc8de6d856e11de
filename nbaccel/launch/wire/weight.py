"""Weight: how many bytes of a value would travel, without pickling it. Runs in the kernel, before a launch.

An estimate to decide and to warn by, not an account: storages count whole and once, as they travel; long containers
are sampled; code weighs nothing.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

__all__ = ["size_of", "sizes_on_devices"]

_SAMPLE = 1000
"""Elements of a container that are looked at; a longer one is taken for more of the same."""

_WEIGHTLESS = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, property)


def size_of(value: Any) -> int:
    """Bytes that would travel with `value`, roughly.

    >>> size_of(b"x" * 1000) >= 1000
    True
    """
    return round(_Scale().weigh(value))


def sizes_on_devices(values: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """For each device that is not the host, the bytes there by name; what several names share counts for the first.

    >>> sizes_on_devices({"x": b"on the host"})
    {}
    """
    scale = _DeviceScale()
    sizes: dict[str, Counter[str]] = {}
    for name, value in values.items():
        scale.found.clear()
        scale.weigh(value)
        for device, nbytes in scale.found.items():
            sizes.setdefault(device, Counter())[name] += nbytes
    return sizes


class _Scale:
    """Weighs objects, each memory and each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its id
        self._memory: set[tuple[str, int]] = set()

    def weigh(self, value: Any) -> float:
        """Bytes of `value` and all it is made of; `share` is how many of its like a sampled element stands for."""
        total, todo = 0.0, [(value, 1.0)]
        while todo:
            obj, share = todo.pop()
            if id(obj) in self._seen or isinstance(obj, _WEIGHTLESS):
                continue
            self._seen[id(obj)] = obj
            if (memory := _memory_of(obj)) is not None:
                total += self._weigh_memory(*memory)
                continue
            nbytes, count, parts = _anatomy(obj)
            sample = list(islice(parts, _SAMPLE))
            total += share * nbytes
            todo.extend((part, share * count / max(1, len(sample))) for part in sample)
        return total

    def _weigh_memory(self, device: str, address: int, nbytes: int) -> int:
        is_new = (device, address) not in self._memory
        self._memory.add((device, address))
        return nbytes if is_new else 0


class _DeviceScale(_Scale):
    """Notes what it weighs on devices.

    found: bytes by device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def _weigh_memory(self, device: str, address: int, nbytes: int) -> int:
        nbytes = super()._weigh_memory(device, address, nbytes)
        if nbytes and device not in ("cpu", "meta"):
            self.found[device] += nbytes
        return nbytes


def _memory_of(obj: Any) -> tuple[str, int, int] | None:
    """Device, address and bytes of the storage behind a tensor or an array; None for other objects."""
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        try:
            storage = obj.untyped_storage()
            return str(obj.device), storage.data_ptr() or id(obj), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or a subclass without memory of its own
            return str(obj.device), id(obj), obj.element_size() * obj.numel()
    if np is not None and isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
        while isinstance(obj.base, np.ndarray):
            obj = obj.base
        is_file = isinstance(obj, np.memmap)  # only its name travels
        return "cpu", obj.__array_interface__["data"][0], 0 if is_file else int(obj.nbytes)
    return None


def _anatomy(obj: Any) -> tuple[int, int, Iterable[Any]]:
    """Bytes of the object itself, how many objects it is made of, and these."""
    if isinstance(obj, (str, bytes, bytearray, int, float, complex)):
        return sys.getsizeof(obj), 0, ()
    if isinstance(obj, Mapping):
        return 0, 2 * len(obj), chain.from_iterable(obj.items())
    if isinstance(obj, (list, tuple, set, frozenset, deque)):
        return 8 * len(obj), len(obj), obj
    if isinstance(obj, types.FunctionType):
        return 0, len(obj.__closure__ or ()), map(_content, obj.__closure__ or ())
    if isinstance(obj, types.MethodType):
        return 0, 1, (obj.__self__,)
    if hasattr(type(obj), "flat") and hasattr(type(obj), "dtype"):  # an array of objects
        return 8 * obj.size, obj.size, obj.flat
    attributes = getattr(obj, "__dict__", {})
    return sys.getsizeof(obj), len(attributes), attributes.values()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
