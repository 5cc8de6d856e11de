"""Precision of an unmodified loop, by a flag: bf16, or fp16 with scaled losses. Runs in ranks.

The outermost call of each module that is trained computes under autocast and returns fp32, as a prepared model does.
With fp16 the gradients at the roots of a backward are multiplied by the scale, and the new gradients of its leaves are
divided by it at once: gradients are always true ones, whatever the loop does with them. Powers of two are exact, so
this is, bit by bit, the loop with an autocast and a GradScaler by hand. What the loop brings itself is left alone, or
refused before its first step. Reasons: docs/design/one-line.md
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from nbaccel.errors import FlagConflict
from nbaccel.train.raw_loop.changes_by_flags import LoopChange, TrainedOptimizers, WatchedLoop, runs_in_trainer
from nbaccel.train.raw_loop.graph import leaves_of, runs_backwards_inside
from nbaccel.train.raw_loop.trained_tensors import KEEP_TOGETHER, is_hook_of_ours, parameters_of
from nbaccel.train.step.precision import to_fp32
from nbaccel.train.step.raw_loop_hooks import hold_loop_state

__all__ = ["LoopInBf16", "LoopInFp16", "precision_of_loop"]

_MODULE: Any = Module

_STATE = "precision"

_TRACED = ("FakeTensor", "FunctionalTensor")
"""Tensors of a compiler that follows a program: a factor would become a constant of the compiled backward."""

SKIPS_IN_A_ROW = 50
"""Steps left out in a row after which a line says so. A sound fp16 training leaves out a handful at its start."""

_INIT_SCALE, _GROWTH, _BACKOFF = 2.0**16, 2.0, 0.5
"""Those of torch's GradScaler."""

GROWTH_INTERVAL = 2000
"""Steps without an infinite gradient after which the scale doubles, as in torch's GradScaler."""


_MOST_DROPPED = 3
"""Gradients that a loop has dropped without a step between: one or two are of an attack, or of another model's loss."""


def precision_of_loop(name: str, holds: Callable[[Optimizer], bool]) -> LoopInBf16:
    """Return the change that makes a loop compute in the precision `name`.

    Args:
        holds: Returns whether gradients of an optimizer are kept while the loop drops them: an open window of batches.
    """
    return LoopInFp16(holds) if name == LoopInFp16.name else LoopInBf16()


class LoopInBf16(LoopChange):
    """Autocast in bfloat16 around the models that a loop trains."""

    name, dtype = "bf16", torch.bfloat16

    def __init__(self) -> None:
        self._loop: WatchedLoop
        self._real_call: Any = None
        self._call: Any = None
        self._forget()

    def _forget(self) -> None:
        self._optimizers: TrainedOptimizers | None = None
        self._kinds: weakref.WeakKeyDictionary[Module, _Kind] = weakref.WeakKeyDictionary()
        self._contexts: dict[str, AbstractContextManager[Any]] = {}
        self._calling: set[int] = set()  # threads that are in a call of a trained module
        self._has_cast = self._has_met_held = self._has_met_double = self._has_spoken = False
        self._has_run = False  # a backward that adds gradients
        self._is_inside = False  # a backward

    def attach(self, loop: WatchedLoop) -> None:
        self._loop = loop

    def begin(self, optimizers: TrainedOptimizers) -> None:
        self._forget()
        self._optimizers = optimizers
        self._thread = threading.get_ident()
        self._real_call = Module.__call__
        self._call = self._called(Module.__call__)
        _MODULE.__call__ = self._call

    def end(self) -> None:
        if self._optimizers is None:
            return
        if self._has_run and not (self._has_cast or self._has_spoken):
            self._say_nothing_changed()
        if Module.__call__ is self._call:  # otherwise something was put around it, and this one changes nothing there
            _MODULE.__call__ = self._real_call
        self._forget()

    def begin_anew(self) -> None:
        self._calling.clear()
        self._is_inside = False

    def note_optimizer(self, optimizer: Optimizer) -> None:
        self._kinds.clear()

    # -- forwards

    def _called(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: Module, *args: Any, **kwargs: Any) -> Any:
            # What a compiler follows was decided by the call outside of it.
            if torch.compiler.is_compiling() or self._optimizers is None or threading.get_ident() in self._calling:
                return real(module, *args, **kwargs)
            kind = self._kinds.get(module) or self._kind_of(module)
            parameter = kind.parameter
            if parameter is None or not (kind.is_held or self._trains_by_hand(module)):
                return real(module, *args, **kwargs)
            return self._forward(real, parameter, module, args, kwargs)

        return called

    def _kind_of(self, module: Module) -> _Kind:
        optimizers = self._optimizers
        assert optimizers is not None
        optimizers.search()  # may find some, and forget what is known of modules
        parameters = [each for each in module.parameters() if each.dtype != torch.float64]
        self._has_met_double |= not parameters and any(optimizers.holders(each) for each in module.parameters())
        held = next((each for each in parameters if optimizers.holders(each)), None)
        by_hand = next((each for each in parameters if each.requires_grad), None)
        parameter = held if held is not None else by_hand
        if parameter is not None and not torch.amp.is_autocast_available(parameter.device.type):  # a meta device
            parameter = None
        kind = self._kinds[module] = _Kind(parameter, held is not None)
        if parameter is not None and _is_prepared_otherwise(module):
            self.end()
            return _Kind(None, False)
        self._has_met_held |= kind.is_held
        return kind

    def _trains_by_hand(self, module: Module) -> bool:
        """Return whether a module that no optimizer holds is trained, as far as that can be seen in a forward.

        Beside models that optimizers hold it is a metric, or the network of a loss, that was left in training mode.
        """
        return module.training and torch.is_grad_enabled() and not self._has_met_held

    def _forward(self, real: Any, parameter: Tensor, module: Module, args: Any, kwargs: Any) -> Any:
        device, thread = parameter.device.type, threading.get_ident()
        is_main = thread == self._thread
        if is_main and runs_in_trainer():
            self.end()
            return real(module, *args, **kwargs)
        self._has_cast = True
        if torch.is_autocast_enabled(device):  # the loop's own, or a checkpoint's that computes again
            theirs = torch.get_autocast_dtype(device)
            if theirs != self.dtype and is_main and not self._is_inside:
                raise FlagConflict(
                    f"-p {self.name}: the loop computes under an autocast of its own, in {str(theirs)[6:]}. Leave -p "
                    "out, or the torch.autocast."
                )
            return real(module, *args, **kwargs)
        calling = self._calling
        calling.add(thread)
        try:
            with self._autocast(device, is_main):
                output = real(module, *args, **kwargs)
        finally:
            calling.discard(thread)
        return to_fp32(output)

    def _autocast(self, device: str, is_main: bool) -> AbstractContextManager[Any]:
        """Return the autocast of a device; one for all forwards of the main thread, since making one takes a while."""
        if not is_main:
            return torch.autocast(device, dtype=self.dtype)
        if device not in self._contexts:
            self._contexts[device] = torch.autocast(device, dtype=self.dtype)
        return self._contexts[device]

    # -- backwards

    def run_backward(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._optimizers is None or self._is_inside or not _is_plain(outputs):
            return real(outputs, *args, **kwargs)
        if not (self._has_cast or self._has_spoken) and kwargs.get("accumulate_grad", False):
            self._note_nothing_cast(outputs)
            self._has_run = True
        self._is_inside = True
        try:
            return real(outputs, *args, **kwargs)
        finally:
            self._is_inside = False

    def _note_nothing_cast(self, outputs: Sequence[Tensor]) -> None:
        assert self._optimizers is not None
        self._optimizers.search()
        leaves, _ = leaves_of(outputs)
        if any(isinstance(leaf, Parameter) or self._optimizers.holders(leaf) for leaf in leaves):
            self._say_nothing_changed()

    def _say_nothing_changed(self) -> None:
        self._has_spoken = True
        why = "no module that an optimizer trains was called"
        if self._has_met_double:
            why = "the model is of float64, which torch.autocast leaves as it is"
        self._loop.say(f"-p {self.name} changed nothing: {why}")


class LoopInFp16(LoopInBf16):
    """Autocast in float16 with scaled gradients; a step whose gradients are infinite is left out.

    All ranks leave out the same steps without a word: gradients are averaged before they are divided. Those of leaves
    that are not averaged, which are of one batch alone, move no scale.

    Args:
        holds: Returns whether gradients of an optimizer are kept while the loop drops them.

    Attributes:
        skipped: Number of steps that were left out in this task.
    """

    name, dtype = "fp16", torch.float16

    def __init__(
        self, holds: Callable[[Optimizer], bool] = lambda optimizer: False, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._holds = holds
        self._growth_interval = growth_interval
        super().__init__()

    def _forget(self) -> None:
        super()._forget()
        self._scale = torch.full((), _INIT_SCALE, device="cpu")
        self._growth = torch.zeros((), dtype=torch.int32, device="cpu")
        self._found: weakref.WeakKeyDictionary[Optimizer, list[_Flag]] = weakref.WeakKeyDictionary()
        self._pending: list[Tensor] = []  # flags of steps since the scale was last moved
        self._dropped: list[Tensor] = []  # of gradients that the loop has dropped without a step
        self._now: _NewGradients | None = None
        self._before: dict[int, Tensor] = {}  # gradients that were there before the first part of a batch
        self._has_scaled = self._has_said_so = False  # a GradScaler of the loop, a loss whose backward is to come
        self._theirs: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose gradients it has scaled
        self._in_a_row = self.skipped = 0

    def begin(self, optimizers: TrainedOptimizers) -> None:
        super().begin(optimizers)
        self._real_scale = torch.amp.GradScaler.scale
        self._scaling = self._noticing(torch.amp.GradScaler.scale)
        torch.amp.GradScaler.scale = self._scaling  # type: ignore[method-assign]
        hold_loop_state(_STATE, self)

    def begin_anew(self) -> None:
        super().begin_anew()
        for kept in (self._found, self._pending, self._dropped, self._before):
            kept.clear()
        self._now = None

    def end(self) -> None:
        if self._optimizers is None:
            return
        hold_loop_state(_STATE, None)
        if torch.amp.GradScaler.scale is self._scaling:
            torch.amp.GradScaler.scale = self._real_scale  # type: ignore[method-assign]
        super().end()

    # -- its state, see `LoopState`

    def window_is_open(self) -> bool:
        return False

    def batches_are_parts(self) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        """Return the factor, and how many steps went well since it was moved."""
        return {"scale": self.scale, "growth": int(self._growth.item())}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the factor of another process."""
        self._scale.fill_(state["scale"])
        self._growth.fill_(state["growth"])

    @property
    def scale(self) -> float:
        """The factor of the next backward."""
        self._move_scale()
        return self._scale.item()

    def _noticing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled():
                self._has_scaled = True
                if not self._has_said_so:
                    self._has_said_so = True
                    self._loop.say("-p fp16: a GradScaler of this cell scales losses; what these train is left to it")
            return real(scaler, outputs)

        return scale

    # -- backwards

    def run_backward(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._now is not None:  # a backward inside of the backward, as a reentrant checkpoint's
            self._now.take(leaves_of(outputs)[0])
            return real(outputs, *args, **kwargs)
        if not self._scales(outputs) or len(args) < 4:
            return super().run_backward(real, outputs, *args, **kwargs)
        accumulates = kwargs.get("accumulate_grad", False)
        leaves, of_python = leaves_of(outputs) if accumulates else ([], [])
        asked = [] if accumulates else [each for each in args[3] or () if isinstance(each, Parameter)]
        if self._are_scaled_by_loop(leaves or asked):
            return super().run_backward(real, outputs, *args, **kwargs)
        self._refuse_what_cannot_be(leaves or asked)
        self._note_dropped_by_hand(leaves)
        self._move_scale()
        # A backward inside of this one may reach more, and so may the graph of another rank.
        if self._loop.is_averaged() or runs_backwards_inside(of_python):
            leaves += [each for optimizer in self._optimizers or () for each in parameters_of(optimizer)]
        gradients, *others = args
        scale = self._scale_on(outputs[0].device)
        scaled = tuple(None if each is None else each * scale.to(each.dtype) for each in gradients)
        self._now = new = _NewGradients()
        new.take(leaves)
        try:
            found = super().run_backward(real, outputs, scaled, *others, **kwargs)
        except BaseException:
            new.put_back()
            raise
        finally:
            self._now = None
        self._unscale(new, is_graph_made=bool(args[2]))
        if accumulates:
            return found
        inverse = _inverse(scale)
        return tuple(None if each is None else each * inverse.to(each.dtype) for each in found)

    def _scales(self, outputs: Any) -> bool:
        is_on = self._optimizers is not None and self._has_cast
        return is_on and threading.get_ident() == self._thread and _is_plain(outputs)

    def _are_scaled_by_loop(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether a scaler of the loop scales the losses of an optimizer that this backward reaches."""
        if self._has_scaled:
            self._has_scaled = False
            self._theirs.update(self._holders_of(leaves))
            return True
        return bool(self._theirs) and any(each in self._theirs for each in self._holders_of(leaves))

    def _refuse_what_cannot_be(self, leaves: Sequence[Tensor]) -> None:
        """Refuse a loop that would train wrongly with scaled gradients.

        Asked of the leaves that a backward reaches: other optimizers and models are of other cells.
        """
        optimizers = self._optimizers
        assert optimizers is not None
        held = {id(leaf) for leaf in leaves if optimizers.holders(leaf)}
        parameters = [leaf for leaf in leaves if isinstance(leaf, Parameter)]
        if parameters and not held:
            optimizers.search(again=True)
            held = {id(leaf) for leaf in leaves if optimizers.holders(leaf)}
        if any(leaf.dtype == torch.float16 for leaf in leaves if id(leaf) in held):
            raise FlagConflict(
                "-p fp16 trains parameters of float32, and the model's are float16 (model.half()?): their updates "
                "would be lost to rounding. Leave .half() out: -p fp16 computes in it anyway."
            )
        if any(_has_hook(leaf) for leaf in leaves):
            raise FlagConflict(
                "-p fp16 multiplies gradients within a backward, and the loop has a hook on a parameter's gradient "
                "(register_hook), which would see multiplied ones. -p bf16 needs no factor."
            )
        if parameters and not held:
            raise FlagConflict(
                "-p fp16 leaves out a step whose gradients are infinite, and this loop steps by hand, without an "
                "optimizer. -p bf16 has none."
            )

    def _unscale(self, new: _NewGradients, is_graph_made: bool) -> None:
        """Divide the new gradients, note which optimizers got infinite ones, and add those of before."""
        optimizers, is_partial = self._optimizers, self._loop.is_partial()
        together: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor], list[Optimizer], bool]] = {}
        for leaf, old in new.leaves.values():
            gradient = leaf.grad
            if gradient is None:
                leaf.grad = None if is_partial else old
                if is_partial and old is not None:
                    self._before[id(leaf)] = old
                continue
            holders = [] if optimizers is None else optimizers.holders(leaf)
            is_alike = optimizers is None or optimizers.is_alike(leaf)
            if gradient.requires_grad:  # it has a graph, and stays in it
                gradient = leaf.grad = gradient * _inverse(self._scale_on(gradient.device)).to(gradient.dtype)
                flag = (~torch.isfinite(gradient.detach())).any().float()
                self._note(holders, [leaf], flag, is_alike)
            else:
                key = (*map(id, holders), is_alike, gradient.device, gradient.dtype)
                values = gradient._values() if gradient.is_sparse else gradient
                values_of, of_leaves, *_ = together.setdefault(key, ([], [], holders, is_alike))
                values_of.append(values)
                of_leaves.append(leaf)
        for values_of, of_leaves, holders, is_alike in together.values():
            self._note(holders, of_leaves, self._divide(values_of), is_alike)
        with torch.set_grad_enabled(is_graph_made):
            for leaf, old in new.leaves.values():
                old = self._before.pop(id(leaf), old) if not is_partial else old
                if old is not None and leaf.grad is not None and leaf.grad is not old:
                    leaf.grad = old + leaf.grad

    def _divide(self, gradients: list[Tensor]) -> Tensor:
        """Divide gradients of one device and type by the scale; return a number that is not 0 if one is infinite."""
        found = torch.zeros((), device=gradients[0].device)
        inverse = _inverse(self._scale_on(found.device))
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return found

    def _scale_on(self, device: torch.device) -> Tensor:
        if device.type != "cpu" and self._scale.device.type == "cpu":  # as GradScaler: on the first device that is used
            self._scale, self._growth = self._scale.to(device), self._growth.to(device)
        return self._scale.to(device, non_blocking=True)

    # -- steps

    def step(self, optimizer: Optimizer, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._optimizers is None or optimizer in self._theirs:
            return real(*args, **kwargs)
        if kwargs.get("closure", args[0] if args else None) is not None:
            raise FlagConflict(f"-p fp16 cannot step with a closure ({type(optimizer).__name__}): use -p bf16.")
        if not self._has_cast:
            return real(*args, **kwargs)
        flags = self._found.pop(optimizer, None) or self._flags_of_given(optimizer)
        self._pending += [flag.value for flag in flags if flag.is_alike]
        if not any(flag.value.item() for flag in flags):
            self._in_a_row = 0
            return real(*args, **kwargs)
        self.skipped += 1
        self._in_a_row += 1
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no scheduler shall say that no step was taken
        if self._in_a_row == SKIPS_IN_A_ROW:
            self._loop.say(
                f"{SKIPS_IN_A_ROW} optimizer steps in a row were left out: their fp16 gradients were infinite or NaN, "
                f"and the loss scale is down to {self.scale:g}. The loss itself is probably infinite: lower the "
                "learning rate, clip gradients, or use -p bf16"
            )
        return None

    def _flags_of_given(self, optimizer: Optimizer) -> list[_Flag]:
        """Return flags of gradients that came from no backward, such as those of ``torch.autograd.grad``."""
        optimizers = self._optimizers
        flags = []
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                value = (~torch.isfinite(parameter.grad.to_dense())).any().float()
                flags.append(_Flag(value, optimizers is None or optimizers.is_alike(parameter), set()))
        return flags

    def note_dropped(self, owner: Optimizer | Module) -> None:
        if self._found:
            self._drop(parameters_of(owner) if isinstance(owner, Optimizer) else owner.parameters())

    def _note_dropped_by_hand(self, leaves: Sequence[Tensor]) -> None:
        """Note gradients that were set to None: an infinite step that the loop itself has left out."""
        if self._found:
            holders = [each for each in self._holders_of(leaves) if each in self._found]
            self._drop(each for holder in holders for each in parameters_of(holder) if each.grad is None)

    def _holders_of(self, tensors: Iterable[Tensor]) -> list[Optimizer]:
        optimizers = self._optimizers
        found = [] if optimizers is None else [each for tensor in tensors for each in optimizers.holders(tensor)]
        return list({id(each): each for each in found}.values())

    def _drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget flags of gradients that are gone, for each holder: another one may step them in another phase."""
        gone = set(map(id, parameters))
        dropped: dict[int, _Flag] = {}
        for optimizer, flags in list(self._found.items()):
            if not self._holds(optimizer):
                for flag in flags:
                    flag.leaves -= gone
                dropped |= {id(flag): flag for flag in flags if not flag.leaves}
                self._found[optimizer] = [flag for flag in flags if flag.leaves]
                if not self._found[optimizer]:
                    del self._found[optimizer]
        self._dropped += [flag.value for flag in dropped.values() if flag.is_alike]

    def _note(self, holders: Sequence[Optimizer], leaves: Iterable[Tensor], value: Tensor, is_alike: bool) -> None:
        flag = _Flag(value, is_alike, set(map(id, leaves)))
        for optimizer in holders:
            self._found.setdefault(optimizer, []).append(flag)

    def _move_scale(self) -> None:
        """Move the scale as `GradScaler.update` does: once for all steps since the last backward."""
        pending, self._pending = self._pending, []
        if not pending and len(self._dropped) < _MOST_DROPPED:
            return
        dropped, self._dropped = self._dropped, []
        flags = [flag.to(self._scale.device, non_blocking=True) for flag in pending or dropped]
        found = torch.stack(flags).amax()
        if pending:
            torch._amp_update_scale_(self._scale, self._growth, found, _GROWTH, _BACKOFF, self._growth_interval)
        else:  # the loop itself leaves out infinite steps; the others do not count as steps that went well
            self._scale = torch.where(found > 0, self._scale * _BACKOFF, self._scale)
            self._growth = torch.where(found > 0, torch.zeros_like(self._growth), self._growth)


class _Kind:
    """One module.  parameter: one that is trained, None if none is.  is_held: by an optimizer."""

    __slots__ = ("is_held", "parameter")

    def __init__(self, parameter: Tensor | None, is_held: bool) -> None:
        self.parameter = parameter
        self.is_held = is_held


class _Flag:
    """Infinite gradients of one optimizer, or of those that share its parameters, from one backward.

    value: not 0 if there are some.  is_alike: all ranks have the same.  leaves: identities of those whose gradients are
    there still.
    """

    __slots__ = ("is_alike", "leaves", "value")

    def __init__(self, value: Tensor, is_alike: bool, leaves: set[int]) -> None:
        self.value = value
        self.is_alike = is_alike
        self.leaves = leaves


class _NewGradients:
    """The leaves of one backward; their older gradients are set aside, so that new ones can be told from them."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}

    def take(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self.leaves:
                self.leaves[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def put_back(self) -> None:
        for leaf, old in self.leaves.values():
            leaf.grad = old


def _inverse(scale: Tensor) -> Tensor:
    return scale.double().reciprocal().float()  # as GradScaler does it


def _has_hook(leaf: Tensor) -> bool:
    after = leaf._post_accumulate_grad_hooks or {}
    return bool(leaf._backward_hooks) or not all(map(is_hook_of_ours, after.values()))


def _is_plain(outputs: Any) -> bool:
    """Return whether a backward is the program's, and not that of a transformed or compiled function."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    return all(isinstance(root, Tensor) and type(root).__name__ not in _TRACED for root in outputs)


def _is_prepared_otherwise(module: Module) -> bool:
    """Return whether a library computes in a precision of its own: a wrapper for several ranks, Fabric, Accelerate."""
    kinds = type(module).__mro__
    if not KEEP_TOGETHER.isdisjoint(kind.__name__ for kind in kinds):
        return True
    if any(kind.__module__.startswith(("lightning.fabric.", "lightning_fabric.")) for kind in kinds):
        return True
    theirs = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return theirs is not None and any(type(each) is theirs for each in gc.get_objects())
