"""Readings: copy the values of one `log` from the device to plain numbers, and read learning rates. Runs in ranks.

Reading a number from a GPU waits until the GPU has computed it, so values on a GPU are copied in the stream, beside
the step, and read when the copy has arrived. Each tensor is read once, however many trackers there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbaccel.train.distributed.nested import map_children

if TYPE_CHECKING:
    from nbaccel.train.distributed.process_control import ProcessControl

__all__ = ["LearningRates", "Reading", "averaged", "detached", "is_plain"]

_PLAIN = frozenset({bool, float, int, str, type(None)})
"""Types that contain no tensors, as most values are: looking for containers in them costs a microsecond each."""


def is_plain(values: Mapping[str, Any]) -> bool:
    """Return whether all `values` are numbers or strings, so that nothing has to be waited for or searched."""
    return _PLAIN.issuperset(map(type, values.values()))


def averaged(values: Mapping[str, Any], process: ProcessControl) -> dict[str, Any]:
    """Return a row with the means of all ranks of its numbers, in one exchange. Collective.

    In float64 where the device has it: counts are exact up to 2**53."""
    dtype = torch.float32 if process.device.type == "mps" else torch.float64
    numbers = {
        name: torch.as_tensor(value, dtype=dtype, device=process.device).reshape(())
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
    if not numbers:
        return dict(values)
    means = process.collectives.reduce(torch.stack(list(numbers.values())), "mean")
    return {**values, **dict(zip(numbers, means.unbind(), strict=True))}


def detached(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


class Reading:
    """Values by name: numbers, strings, tensors of any device, nested in any containers.

    Example:
        >>> Reading({"loss": torch.tensor(0.5), "epoch": 1}).values()
        {'loss': 0.5, 'epoch': 1}
    """

    __slots__ = ("_arrivals", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._arrivals: dict[torch.device, torch.cuda.Event] = {}
        self._values = {name: value if type(value) in _PLAIN else self._send(value) for name, value in values.items()}
        for device, arrival in self._arrivals.items():
            arrival.record(torch.cuda.current_stream(device))  # where a tensor is copied, whichever device is current

    @property
    def has_arrived(self) -> bool:
        return all(arrival.query() for arrival in self._arrivals.values())

    def values(self) -> dict[str, Any]:
        """Return tensors of one element as numbers, other tensors on the CPU; wait for those that have not arrived."""
        for arrival in self._arrivals.values():
            arrival.synchronize()
        return {name: value if type(value) in _PLAIN else _number(value) for name, value in self._values.items()}

    def _send(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return map_children(self._send, value)
        value = value.detach()
        if value.device.type == "cuda":
            self._arrivals.setdefault(value.device, torch.cuda.Event())
            return value.to("cpu", non_blocking=True)  # into pinned memory: torch pins what it copies without blocking
        if value.numel() == 1:
            return value.item()
        return value.to("cpu", copy=True)  # the program may change it before it is read


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return map_children(_number, value)


_MOST_RATES, _MOST_GROUPS = 4, 200


class LearningRates:
    """Reads the learning rates of optimizers, which it does not keep alive. A pickled one knows no optimizer.

    Example:
        >>> rates, optimizer = LearningRates(), torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> rates.follow(optimizer)
        >>> rates.read()
        (0.1,)
    """

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []

    def __reduce__(self) -> tuple[type[LearningRates], tuple[()]]:
        return LearningRates, ()

    def follow(self, optimizer: Any) -> None:
        """Read the rates of `optimizer`, too."""
        others = [known for known in self._optimizers if known() is not None and known() is not optimizer]
        self._optimizers = [*others, weakref.ref(optimizer)]

    def meet(self, optimizer: Any) -> None:
        """Follow `optimizer` unless that is done already. It takes 0.1 us if it was the last: each step may call it."""
        optimizers = self._optimizers
        if optimizers and optimizers[-1]() is optimizer:
            return
        if not any(known() is optimizer for known in optimizers):
            self.follow(optimizer)

    def forget(self) -> None:
        """Follow no optimizer any more."""
        self._optimizers = []

    def read(self) -> tuple[float, ...]:
        """Return each different rate once, four at most. Called from another thread than the training's.

        A rate that lies on a device is left out, since reading it would wait for the device.
        """
        optimizers = [known() for known in self._optimizers]
        groups = [group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups]
        rates = [group.get("lr") for group in groups[:_MOST_GROUPS]]
        on_host = [rate for rate in rates if not isinstance(rate, Tensor) or rate.device.type == "cpu"]
        return tuple(dict.fromkeys(float(rate) for rate in on_host if rate is not None))[:_MOST_RATES]
