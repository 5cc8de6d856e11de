"""ProgramChanges: what a program does to a model and an optimizer while DeepSpeed has them in parts. Runs in ranks.

A program that was written for one process reads and changes both at any time. Here such a change reaches the parts, or
is refused by a sentence with the next move: DeepSpeed by itself would train on without it, and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

__all__ = ["LoadedNames", "NotAtTheEnd", "ProgramChanges", "guarded_engine"]

_BACKWARD = (
    "{call}: with DeepSpeed the Accelerator runs the backwards of a prepared model and its steps, which it counts, "
    "divides and clips. Write\n    accelerator.backward(loss)\n    optimizer.step()\n    optimizer.zero_grad()\n"
    "A gradient with respect to inputs (torch.autograd.grad through the model) needs strategy='ddp' or 'fsdp'"
)
_FROZEN = (
    "requires_grad of {names} was changed after prepare, and DeepSpeed has cut the parameters that are trained, with "
    "their states. Change it before, or end this training and prepare again:\n    accelerator.end_training()"
)
_GROUP = (
    "optimizer.add_param_group after prepare: DeepSpeed has cut the parameters that are trained, with their states, "
    "and would never train these. Add the group before, or end this training and prepare again:\n"
    "    accelerator.end_training()"
)
_CLIP = (
    "torch.nn.utils.clip_grad_norm_: DeepSpeed has the gradients of this model, so it would clip nothing. Write\n"
    "    accelerator.clip_grad_norm_(model.parameters(), max_norm)"
)
_EMPTY = (
    "{call}: with ZeRO stage 3 the parameters of this model are in parts on all ranks, and what is here is empty. "
    "Call, on every rank,\n    accelerator.get_state_dict(model)"
)
_STATES = (
    "optimizer.state_dict(): DeepSpeed has the states of this optimizer in parts on all ranks. "
    "accelerator.save_state(folder) saves them whole, and every rank has to call it"
)
_WRITTEN = (
    "{names} was written by the program between two steps, and with ZeRO stage 3 a rank has only a part of it: load it "
    "by load_state_dict, on every rank, or use zero_stage=2 or strategy='fsdp'"
)
_SHOWN = 3


class LoadedNames(NamedTuple):
    """The answer of ``load_state_dict``, as torch's."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ProgramChanges:
    """Watches one engine's model and optimizer, until `end`.

    Args:
        engine: DeepSpeed's, of a class that `guarded_engine` has made.
        optimizer: The program's own.
        in_place: The engine steps the weights of the model themselves, so what is written into them holds.
        write: Enters the present values of parameters into the parts that the engine steps.
        load_weights: Loads a state dict into the engine's model.
        load_states: Loads a state dict into its optimizer.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: Optimizer,
        in_place: bool,
        write: Callable[[Iterable[Tensor]], None],
        load_weights: Callable[[Mapping[str, Any], bool], None],
        load_states: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._engine, self._write = engine, write
        self._named = dict(engine.module.named_parameters())
        self._parameters = list(self._named.values())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._in_place = in_place
        self._undo = ExitStack()
        module: Module = engine.module
        # A bound method, so that a copy of the model (an average of its weights) loads into itself.
        self._replace(module, "load_state_dict", MethodType(_loading(engine, load_weights), module))
        self._replace(optimizer, "add_param_group", partial(_refuse, _GROUP))
        self._replace(optimizer, "load_state_dict", load_states)
        self._replace(optimizer, "state_dict", partial(self._state_dict, optimizer.state_dict))
        is_in_pieces = any(hasattr(parameter, "ds_id") for parameter in self._parameters)
        for each in module.modules() if is_in_pieces else ():
            self._undo.callback(each.register_state_dict_pre_hook(_refuse_empty).remove)
        self._undo.callback(_refuse_clipping({id(parameter) for parameter in self._parameters}))
        self.note()

    def note(self) -> None:
        """Take the weights as they are for those that the engine knows."""
        self._versions = [parameter._version for parameter in self._parameters]

    def before_backward(self) -> None:
        """Refuse a backward of other parameters than the engine was made for.

        Raises:
            NotImplementedError: The names of the parameters.
        """
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            now = zip(self._named.items(), self._trained, strict=True)
            changed = [name for (name, parameter), before in now if parameter.requires_grad != before]
            raise NotImplementedError(_FROZEN.format(names=_listed(changed)))

    def before_step(self) -> None:
        """Let the step begin with the weights that the program has written since the last one.

        Raises:
            NotImplementedError: This rank has only parts of them.
        """
        if self._in_place:
            return
        versions = [parameter._version for parameter in self._parameters]
        if versions == self._versions:
            return
        names = [name for name, old, new in zip(self._named, self._versions, versions, strict=True) if old != new]
        if any(hasattr(self._named[name], "ds_id") for name in names):
            raise NotImplementedError(_WRITTEN.format(names=_listed(names)))
        self._write(self._named[name] for name in names if self._named[name].requires_grad)
        self._versions = versions

    def end(self) -> None:
        """Let model and optimizer be as they were."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        self._undo.callback(vars(owner).pop, name, None)

    def _state_dict(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return own() if _of_deepspeed.is_saving else _refuse(_STATES)


def _loading(engine: Any, load_weights: Callable[[Mapping[str, Any], bool], None]) -> Callable[..., Any]:
    """Return ``load_state_dict`` of the model of an engine, by which the parts get the weights too."""

    def load_state_dict(self: Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self is not engine.module:
            return type(self).load_state_dict(self, state_dict, strict, assign)
        load_weights(state_dict, strict)
        names = self.state_dict(keep_vars=True).keys()
        return LoadedNames(sorted(names - state_dict.keys()), sorted(state_dict.keys() - names))

    return load_state_dict


def _refuse_empty(module: Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars or _of_deepspeed.is_saving:
        return
    # A copy of the model has the empty parameters, and not DeepSpeed's word on them.
    if any(own.numel() == 0 and getattr(own, "ds_numel", 1) for own in module.parameters(recurse=False)):
        raise NotImplementedError(_EMPTY.format(call=f"{type(module).__name__}.state_dict()"))


class _OfDeepSpeed:
    """A save in DeepSpeed's own format is under way, which has the parts of each rank."""

    is_saving = False


_of_deepspeed = _OfDeepSpeed()


def guarded_engine(engine: Any) -> Any:
    """Let an engine be driven by its strategy alone, and leave as the program's own model; return it.

    The strategy calls `run_backward` and `take_step`.
    """
    kind = type(engine)

    class Guarded(kind):  # type: ignore[misc, valid-type]
        trained = frozenset(id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad)

        def __nbaccel_unwrap__(self) -> Module:
            return self.module  # type: ignore[no-any-return]

        def run_backward(self, loss: Tensor, **kwargs: Any) -> None:
            super().backward(loss, **kwargs)

        def take_step(self) -> None:
            super().step()

        def no_sync(self) -> NotAtTheEnd:
            return NotAtTheEnd(self)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            _refuse(_BACKWARD.format(call="model.backward"))

        def step(self, *args: Any, **kwargs: Any) -> Any:
            _refuse(_BACKWARD.format(call="model.step"))

        def _backward_prologue(self) -> None:
            if not self._running_engine_backward:
                _refuse(_BACKWARD.format(call="a backward of the program's own (loss.backward)"))
            super()._backward_prologue()

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            _of_deepspeed.is_saving = True
            try:
                return super().save_checkpoint(*args, **kwargs)
            finally:
                _of_deepspeed.is_saving = False

        def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
            own = {name.removeprefix("module."): value for name, value in state_dict.items()}
            return self.module.load_state_dict(own, strict)

    Guarded.__name__ = Guarded.__qualname__ = kind.__name__
    Guarded.__module__ = kind.__module__
    engine.__class__ = Guarded
    return engine


class NotAtTheEnd:
    """A block in which a backward does not end the accumulation window of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._before = self._engine.is_gradient_accumulation_boundary()
        self._engine.set_gradient_accumulation_boundary(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.set_gradient_accumulation_boundary(self._before)


def _refuse_clipping(ids: set[int]) -> Callable[[], None]:
    """Refuse torch's clipping of these parameters, which have no gradients of their own; return what undoes it.

    A program may have imported the function by its name, so a part of it is replaced.
    """
    others: Any = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not ids.isdisjoint(map(id, parameters)):
            raise NotImplementedError(_CLIP)
        return others(parameters, *args, **kwargs)

    def undo() -> None:
        ids.clear()
        if clip_grad._clip_grads_with_norm_ is clip:
            clip_grad._clip_grads_with_norm_ = others

    clip_grad._clip_grads_with_norm_ = clip
    return undo


def _refuse(sentence: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(sentence)


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
