"""Switches of torch, read and set one by one; and those that torch keeps per thread. Used in the kernel and in ranks.

Even a fork has the latter only in the thread that set them. All others are a feature's: a fork has them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

__all__ = ["OF_A_THREAD", "TorchFlag", "by_functions", "read_flags", "set_flags", "unwarned"]


@dataclass(frozen=True, slots=True)
class TorchFlag:
    """One switch of torch.

    Args:
        read: Returns its value, which can be pickled; raises if there is none.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]

    def stands_at(self, torch: Any, value: Any) -> bool:
        try:
            return bool(self.read(torch) == value)
        except Exception:
            return False


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Suppress warnings about deprecated interfaces: code that used them in the notebook got the warning there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_flags(flags: Mapping[str, TorchFlag]) -> dict[str, Any]:
    """Return the values of `flags` by their names; none if torch is not loaded, and without those that it lacks."""
    values: dict[str, Any] = {}
    torch = sys.modules.get("torch")
    for name in flags if torch is not None else ():
        with contextlib.suppress(Exception):
            values[name] = flags[name].read(torch)
    return values


def set_flags(flags: Mapping[str, TorchFlag], values: Mapping[str, Any]) -> None:
    """Set those of `flags` that differ from their `values` in this process."""
    if not values:
        return
    import torch

    for name, flag in flags.items():
        if name in values and not flag.stands_at(torch, values[name]):
            with contextlib.suppress(Exception), unwarned():
                flag.write(torch, values[name])


def by_functions(getter: str, setter: str) -> TorchFlag:
    """Return the switch of a function that reads it and one that sets it, by their names in torch."""
    return TorchFlag(lambda torch: attrgetter(getter)(torch)(), lambda torch, value: attrgetter(setter)(torch)(value))


def _default_device(torch: Any) -> str | None:
    """Return the device as named: `torch.get_default_device()` starts CUDA for an index, which differs in each rank."""
    if "torch.utils._device" not in sys.modules:  # it is loaded by the first such device
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    devices = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return str(devices[-1]) if devices else None


OF_A_THREAD = {
    "default_device": TorchFlag(_default_device, lambda torch, value: torch.set_default_device(value)),
    "grad_enabled": by_functions("is_grad_enabled", "set_grad_enabled"),
}
