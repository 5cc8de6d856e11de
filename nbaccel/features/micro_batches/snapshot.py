"""Save the state of a training, or of one forward, and restore it bit by bit. Runs in ranks.

A `TrainingSnapshot` is for trials that change the training, a `ForwardSnapshot` for a forward that may have to run
again.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.quantised import base_of
from nbaccel.train.checkpoint import generators
from nbaccel.train.distributed.nested import children, is_container, map_children

__all__ = [
    "ForwardSnapshot",
    "TrainingSnapshot",
]

_Restore = Callable[[], Any]
"""Function that restores the value, and returns it."""


class TrainingSnapshot:
    """State of `models` and `optimizers`; `restore` as often as needed, and once more at the end of the block.

    It keeps parameters, buffers, gradients, optimizer state (also that there was none) and the random generators of
    Python, NumPy and torch. It does not know other state of a program: lists it appends to, generators of its own. The
    base of a quantised model is not copied, since no trial changes it.

    The values are stored where trials do not need the memory: those of a device in host memory, those of the CPU in a
    temporary file. Tensors keep their identity, so views into them (flat gradient buckets) stay valid.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> weight = model.weight.item()
        >>> with TrainingSnapshot([model], [], torch.device("cpu")):
        ...     torch.nn.init.zeros_(model.weight).item()
        0.0
        >>> model.weight.item() == weight
        True
    """

    def __init__(self, models: Sequence[Module], optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._device = device
        self._generators = generators.read(device)
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # until `close`
        self._kept: dict[int, _Restore] = {}  # by tensor: shared parameters are kept once
        self._restores: list[_Restore] = []
        try:
            for model in models:
                self._leave_out(model)
                self._restores += [self._module(module) for module in model.modules()]
            self._restores += [self._optimizer(optimizer) for optimizer in optimizers]
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Restore everything, in place."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        generators.restore(self._generators, self._device)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TrainingSnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore everything, and delete the temporary file."""
        try:
            self.restore()
        finally:
            self.close()

    def _leave_out(self, model: Module) -> None:
        """Copy no tensor of a quantised model's base."""
        base = base_of(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()) if base else ():
            if name in base:
                self._kept[id(tensor)] = partial(_itself, tensor)

    def _module(self, module: Module) -> _Restore:
        tables = [(table, {name: self._value(value) for name, value in table.items()}) for table in _tables(module)]
        gradients = [(parameter, self._value(parameter.grad)) for parameter in module.parameters(recurse=False)]

        def restore() -> None:
            for table, values in tables:
                table.clear()
                table.update({name: value() for name, value in values.items()})
            for parameter, gradient in gradients:
                parameter.grad = gradient()

        return restore

    def _optimizer(self, optimizer: Optimizer) -> _Restore:
        attributes = dict(vars(optimizer))  # counters that it keeps beside its state
        state = optimizer.state
        entries = [(parameter, entry, self._value(dict(entry))) for parameter, entry in state.items()]
        groups = [
            (group, self._value({name: value for name, value in group.items() if name != "params"}))
            for group in optimizer.param_groups
        ]

        def restore() -> None:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            state.clear()
            for parameter, entry, values in entries:
                entry.clear()
                entry.update(values())
                state[parameter] = entry
            for group, options in groups:
                parameters = group["params"]
                group.clear()
                group.update({"params": parameters, **options()})

        return restore

    def _value(self, value: Any) -> _Restore:
        if isinstance(value, Tensor):
            if id(value) not in self._kept:
                self._kept[id(value)] = self._tensor(value)
            return self._kept[id(value)]
        if not is_container(value):
            return lambda: value
        parts = [self._value(child) for _, child in children(value)]

        def rebuilt() -> Any:
            remaining = iter(parts)
            return map_children(lambda _: next(remaining)(), value)

        return rebuilt

    def _tensor(self, tensor: Tensor) -> _Restore:
        rows = getattr(tensor, "_local_tensor", None)
        if isinstance(rows, Tensor):  # of a sharded tensor, the part that this rank holds
            restore_rows = self._value(rows)

            def with_rows() -> Tensor:
                restore_rows()
                return tensor

            return with_rows
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
            copy = tensor.detach().to("cpu", copy=True)

            def from_host() -> Tensor:
                tensor.detach().copy_(copy)
                return tensor

            return from_host
        start = self._file.seek(0, 2)
        self._file.write(_memory(tensor))

        def from_file() -> Tensor:
            self._file.seek(start)
            self._file.readinto(_memory(tensor))  # type: ignore[attr-defined]
            return tensor

        return from_file


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _tables(module: Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers]


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the CPU, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class ForwardSnapshot:
    """State that a forward changes beside gradients: Python's, NumPy's and torch's generators, and `buffers`.

    A repeated forward must draw the same dropout and count each sample once in BatchNorm's statistics. The memory for
    the copies of buffers is allocated once, before memory is short.

    Args:
        device: Its generator is saved beside the CPU's.
    """

    def __init__(self, buffers: Sequence[Tensor], device: torch.device) -> None:
        self._buffers = list(buffers)
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._device = device
        self._generators: list[Any] = []

    def take(self) -> None:
        """Save the present state."""
        numpy = sys.modules.get("numpy")
        self._generators = [random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()]
        if self._device.type == "cuda":
            self._generators.append(torch.cuda.get_rng_state(self._device))
        if self._device.type == "mps":
            self._generators.append(torch.mps.get_rng_state())
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Restore the state of the last `take`."""
        python, cpu, numpy_state, *device = self._generators
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        for state in device:
            getattr(torch, self._device.type).set_rng_state(state)
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
