"""Find out whether what an optimizer steps is one training in all ranks, before it changes anything. Runs in ranks.

It is decided once for each optimizer, by evidence and never by a library's name. Parameters that DDP or FSDP
synchronises pass, and so do DTensors. For others the ranks lay a fingerprint of this step's gradients beside each
other, on the control page, without a collective. Different ones are separate trainings, and an error; equal ones were
synchronised by hand, or every rank does the same work, and one notice says which. A rank whose peers take no such step
within 5 s steps alone, and says so.

Not seen here: updates without an optimizer's step, and optimizers whose constructor does not call torch's. What comes
back from a cell is compared at its end for that, see `checksum`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from nbaccel.errors import NotPrepared
from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.launch.rank.look import is_users
from nbaccel.launch.wire.control import ControlPage
from nbaccel.world import World

__all__ = ["OneTraining", "checksum"]

_LONGEST_WAIT_S = 5.0
_POLL_S = 0.001

_SYNCHRONISE = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}
"""Modules, and their classes that synchronise the gradients of the model inside."""

_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
"""Types of torch by their bytes. Sums of integers do not depend on the order of the summands, so not on the device."""


_MOST_PARTS = 1000
"""Elements of a container that are looked at for parameters."""


class OneTraining:
    """Judges the optimizers of one rank.

    collectives: how many this rank has entered, of any kind that can be counted.
    """

    def __init__(self, page: ControlPage, world: World, collectives: Callable[[], int]) -> None:
        self._page = page
        self._world = world
        self._collectives = collectives
        self._peers: Sequence[int] = [rank for rank in range(world.world_size) if rank != world.rank]
        self._settled: dict[int, weakref.ref[Any]] = {}  # by id: the user's class may have no hash
        self._waits: dict[int, weakref.ref[Any]] = {}  # stepped once, after ranks had exchanged something
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._judged: Counter[int] = Counter()  # optimizers by their kind and shapes
        self._laid: list[int] = []  # keys of this rank, in their order
        self._begun_with = 0

    def watch(self) -> None:
        """Judge every optimizer before its step, from now on. Once per process."""
        when_loaded(
            {
                "torch.optim.optimizer": self._hook,
                **{module: functools.partial(self._note_wrappers, name) for module, name in _SYNCHRONISE.items()},
            }
        )

    def begin(self, outsiders: Sequence[int] = ()) -> None:
        """A task begins.  outsiders: ranks that take no part in it."""
        self._peers = [rank for rank in range(self._world.world_size) if rank not in (self._world.rank, *outsiders)]
        self._judged.clear()
        self._laid.clear()
        self._begun_with = self._collectives()

    def _hook(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._before_step)

    def _note_wrappers(self, name: str, module: Any) -> None:
        kind = getattr(module, name)
        makes = kind.__init__

        @functools.wraps(makes)
        def make(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            makes(wrapper, *args, **kwargs)
            self._wrappers.add(wrapper)

        kind.__init__ = make

    # -- before a step

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(optimizer) in self._settled or not self._peers:
            return None
        parameters = self._alone(optimizer)
        if not parameters:
            self._settle(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._judge(optimizer, parameters)
            return None
        judged = self._judging(closure, optimizer, parameters)  # gradients come with its first call
        return ((args[0], *args[2:]), {**kwargs, "closure": judged})

    def _judging(self, closure: Callable[[], Any], optimizer: Any, parameters: Sequence[Any]) -> Callable[[], Any]:
        def judged() -> Any:
            loss = closure()
            if id(optimizer) not in self._settled:
                self._judge(optimizer, parameters)
            return loss

        return judged

    def _judge(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """
        Raises:
            NotPrepared: another rank steps with other gradients, or steps another optimizer.
        """
        found = _fingerprint(parameter.grad for parameter in parameters)
        if found is None:  # nothing would change
            return
        if id(optimizer) not in self._waits and self._collectives() != self._begun_with:
            # Ranks have spoken with each other: they may be about to, once more. The second step shows it.
            _remember(optimizer, self._waits)
            return
        kind = _kind(optimizer)
        self._judged[kind] += 1
        key = _number(kind.to_bytes(8, "big") + self._judged[kind].to_bytes(4, "big"))
        self._page.lay(self._world.rank, len(self._laid), key, found)
        self._laid.append(key)
        apart, missing = self._compare(key, found)
        if apart:
            self._refuse(optimizer, parameters, apart)
        self._settle(optimizer)
        if missing:
            self._say_alone(optimizer, missing)
        elif self._world.is_main_process:
            self._say_equal(optimizer)

    def _compare(self, key: int, found: int) -> tuple[list[int], list[int]]:
        """The peers that step otherwise, and those that take no such step. Waits for them 5 s at most."""
        page = self._page
        until = time.monotonic() + _LONGEST_WAIT_S
        while True:
            laid = {peer: page.laid(peer) for peer in self._peers}
            apart = [peer for peer, entries in laid.items() if entries.get(key, found) != found]
            missing = [peer for peer, entries in laid.items() if key not in entries]
            waits = [peer for peer in missing if not page.has_finished(peer)]
            if apart or not waits or time.monotonic() > until:
                break
            time.sleep(_POLL_S)  # ended by the peers' entries, by their end, or by the limit
        # A peer that steps what this rank never did trains something else; one that is late, or through, does not.
        elsewhere = [peer for peer in missing if laid[peer].keys() - set(self._laid)]
        return apart + elsewhere, [peer for peer in missing if peer not in elsewhere]

    # -- what is known

    def _alone(self, optimizer: Any) -> list[Any]:
        """Parameters that nothing is known to synchronise."""
        known = {id(parameter) for wrapper in self._wrappers for parameter in _kept_together(wrapper)}
        tensors: Any = sys.modules.get("torch.distributed.tensor")
        sharded = () if tensors is None else (tensors.DTensor,)
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known and not isinstance(parameter, sharded)
        ]

    def _settle(self, optimizer: Any) -> None:
        _remember(optimizer, self._settled)

    # -- what is said

    def _refuse(self, optimizer: Any, parameters: Sequence[Any], apart: Sequence[int]) -> None:
        world = self._world
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        what = "what it steps" if len(parameters) == count else f"{len(parameters)} of the {count} tensors it steps"
        who = " and ".join(f"rank {peer}" for peer in sorted(apart))
        raise NotPrepared(
            f"{type(optimizer).__name__}.step in rank {world.rank} of {world.world_size}: nothing synchronises "
            f"{what}, and {who} would step with other gradients. Each rank would train a model of its own, and one of "
            f"{world.world_size} would come back. Prepare what is trained, before the loop:\n"
            "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
            "Separate trainings that are meant: %%accelerate --independent, or launch(..., independent=True)."
        )

    def _say_alone(self, optimizer: Any, missing: Sequence[int]) -> None:
        who = " and ".join(f"rank {peer}" for peer in missing)
        _warn(
            f"rank {self._world.rank} of {self._world.world_size} steps {type(optimizer).__name__} alone: {who} took "
            f"no such step within {_LONGEST_WAIT_S:g} s, and nothing synchronises what it steps. What it trains stays "
            "in this rank."
        )

    def _say_equal(self, optimizer: Any) -> None:
        name, ranks = type(optimizer).__name__, self._world.world_size
        if self._collectives() == self._begun_with:
            _warn(
                f"{name} steps with equal gradients in all {ranks} ranks, and they have exchanged nothing: each does "
                "the same work on the same data. model, optimizer, loader = accelerator.prepare(model, optimizer, "
                "loader) before the loop shares it out."
            )
        else:
            _warn(
                f"{name} steps what was not prepared, with equal gradients in all {ranks} ranks: it is taken for "
                "synchronised by hand, and is not checked again before the cell ends."
            )


def checksum(value: Any) -> int | None:
    """Return a number that is equal for equal parameters in `value`; None where there are none.

    Parameters are those of a model or an optimizer, tensors that want a gradient, and such in a list, a dictionary or
    the attributes of an object. Also None where ranks hold different parts of them: FSDP, DTensors.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    weights = list(_weights(value, torch))
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(isinstance(weight, tensors.DTensor) for weight in weights):
        return None
    return _fingerprint(weights)


def _weights(value: Any, torch: Any, depth: int = 1) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        if value.is_leaf and value.requires_grad:
            yield value
    elif issubclass(kind, torch.nn.Module):
        if not any(type(part).__name__ == "FullyShardedDataParallel" for part in torch.nn.Module.modules(value)):
            yield from torch.nn.Module.parameters(value)
    elif issubclass(kind, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
    elif depth:
        if issubclass(kind, (list, tuple)):
            parts = list(kind.__iter__(value))
        elif issubclass(kind, dict):
            parts = list(dict.values(value))
        else:
            parts = list(getattr(value, "__dict__", {}).values()) if kind.__module__ != "builtins" else []
        for part in parts[:_MOST_PARTS]:
            yield from _weights(part, torch, depth - 1)


def _fingerprint(tensors: Iterable[Any]) -> int | None:
    """A number by the bits of `tensors`; None where there is nothing but zeros. Waits for the devices."""
    torch = sys.modules["torch"]
    sums: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if tensor is None or tensor.device.type == "meta" or not tensor.numel():
            continue
        bits = tensor.detach()
        bits = bits.coalesce().values() if bits.is_sparse else bits
        bits = torch.view_as_real(bits) if bits.is_complex() else bits
        whole = bits.view(getattr(torch, _INTEGERS[bits.element_size()]))
        sums.setdefault(tensor.device, []).append(whole.sum(dtype=torch.int64))
    numbers = [number for each in sums.values() for number in torch.stack(each).tolist()]
    if not any(numbers):
        return None
    return _number(repr(numbers).encode())


def _kept_together(wrapper: Any) -> Iterator[Any]:
    """Parameters that `wrapper` synchronises; also the parts of them that its own optimizer steps (ZeRO)."""
    yield from wrapper.parameters()
    for group in getattr(getattr(wrapper, "optimizer", None), "param_groups", ()):
        yield from group["params"]


def _remember(value: Any, known: dict[int, weakref.ref[Any]]) -> None:
    """Keep the id of `value` while it lives."""
    key = id(value)

    def forget(_: object) -> None:
        known.pop(key, None)

    known[key] = weakref.ref(value, forget)


def _kind(optimizer: Any) -> int:
    """A number by the class of `optimizer` and the shapes that it steps."""
    shapes = [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
    return _number(repr((type(optimizer).__qualname__, shapes)).encode())


def _number(data: bytes) -> int:
    """63 bits, and never 0."""
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1) | 1


def _warn(text: str) -> None:
    """A warning at the user's line."""
    torchs = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        is_users(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith(torchs)
    ):
        frame = frame.f_back
    if frame is None:
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
