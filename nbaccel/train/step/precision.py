"""Precision: the number format in which a step computes. Runs in ranks; knows tensors and optimizers, no processes.

`Precision` itself is "no": full precision, nothing to do. `Bf16` adds autocast, `Fp16` a gradient scaler too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.settings import wrong_precision
from nbaccel.train.distributed.nested import map_children
from nbaccel.train.step.kwargs_handlers import AutocastKwargs, Handlers
from nbaccel.train.step.readings import Reading

__all__ = [
    "Bf16",
    "Fp16",
    "Precision",
    "Taken",
    "make_precision",
    "restore_forward",
    "to_fp32",
]

Taken = bool | Callable[[], bool]
"""Result of a step, whether it was taken: a bool, or a function that reads this from the device and waits for it."""

_HALF = (torch.float16, torch.bfloat16)


class Precision:
    """Full precision: every method does nothing beyond plain torch."""

    name = "no"

    scales = False
    """True if `scale` changes a loss, so that it is called."""

    expects_scaled = False
    """True if gradients of a loss that was not scaled would train wrongly, and the program itself scales none."""

    skips_infinite = False
    """True if `step` itself leaves out a step whose gradients are not finite."""

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        self.device = device
        self.handlers = handlers or Handlers()

    def move_to(self, device: torch.device) -> None:
        self.device = device

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context that chooses number formats; by the handler that the run was given, or by `options`."""
        return nullcontext()

    def wrap_forward(self, model: torch.nn.Module) -> None:
        """Make `model` compute under autocast and return fp32."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor] | None = None) -> None:
        """Divide the gradients of `optimizers` by the loss scale, once per step.

        Args:
            parameters: Only of the optimizers that own one of these.
        """

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, Taken]:
        """Step `optimizer`; return its result, and whether it took the step."""
        return (optimizer.step() if closure is None else optimizer.step(closure)), True

    def forget(self) -> None:
        """Give up the current step; its gradients are dropped."""

    def take_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses by the program's own `scaler` from now on; without fp16 only a disabled one is taken.

        Raises:
            ValueError: `scaler` is enabled, and losses need no scaling.
        """
        if scaler is not None and scaler.is_enabled():
            raise ValueError(
                f"accelerator.scaler: losses are scaled with mixed_precision='fp16' only; this is {self.name!r}. "
                "Leave the scaler out, or give it enabled=False."
            )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state to restore."""

    def explain_skips(self) -> str:
        """Return why steps were skipped, and what to do: the end of a warning's sentence."""
        return "their gradients were not finite. Lower the learning rate, clip gradients, or look at the data."


class Bf16(Precision):
    """bfloat16 autocast: fp32's range, so no scaling of gradients."""

    name = "bf16"
    dtype = torch.bfloat16

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self._casting = _Casting(device, self.dtype, self.handlers.autocast)

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._casting.move_to(device)

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        return self._casting.context(options)

    def wrap_forward(self, model: torch.nn.Module) -> None:
        if not isinstance(model.forward, _AutocastForward):
            model.forward = _AutocastForward(model.forward, self._casting)


class Fp16(Bf16):
    """float16 autocast with a gradient scaler; a step with infinite gradients is skipped on every rank alike.

    The ranks agree on nothing for it: gradients are averaged before the step, so all of them see the same infinities.
    Of a sharded model each rank has its own rows, and torch takes the maximum of the ranks' findings.

    One scaler serves all optimizers and is updated before the first loss after a step, not after each
    optimizer's step: the scale may not change between two optimizers whose gradients share it.
    The scale halves with every skipped step, but not below `GradScalerKwargs.min_scale`.
    """

    name = "fp16"
    dtype = torch.float16
    scales = True
    skips_infinite = True

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        self.scaler = self._make_scaler()
        self._unscaled: dict[int, weakref.ref[Optimizer]] = {}
        self._stepped: set[int] = set()
        self._has_skipped = False  # since the last update of the scale
        self._found: list[Tensor] = []  # not 0 where the device has skipped; since then too
        self._is_scaled_by_hand = False

    def _make_scaler(self) -> torch.amp.GradScaler:
        scaling = self.handlers.scaler
        return _Scaler(
            self,
            self.device.type,
            init_scale=scaling.init_scale,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
            enabled=scaling.enabled,
        )

    def move_to(self, device: torch.device) -> None:
        is_other = device.type != self.device.type
        super().move_to(device)
        if is_other:
            state = self.scaler.state_dict()
            self.scaler = self._make_scaler()
            self.scaler.load_state_dict(state)

    def scale(self, loss: Tensor) -> Tensor:
        if not self._unscaled.keys() <= self._stepped:
            self._begin_step()
        elif self._stepped:
            self._update()
        return torch.amp.GradScaler.scale(self.scaler, loss)

    def _begin_step(self) -> None:
        """Scale gradients that no step has used yet like those that are about to be added to them."""
        left = [reference() for key, reference in self._unscaled.items() if key not in self._stepped]
        if self._stepped:
            self._update()
        else:  # an error came between, or the program continued with another loss
            self.forget()
        gradients = [
            parameter.grad
            for optimizer in left
            if optimizer is not None
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        ]
        if gradients:
            scale = self.scaler.get_scale()
            for gradient in gradients:
                gradient.mul_(scale)

    def scale_by_hand(self, losses: Any) -> Any:
        """Scale `losses` for a program that calls `Accelerator.scaler` and then ``backward`` of the result."""
        self._is_scaled_by_hand = True
        return self.scale(losses)

    @property
    def expects_scaled(self) -> bool:  # type: ignore[override]
        return self.scaler.is_enabled() and not self._is_scaled_by_hand

    def unscale(self, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor] | None = None) -> None:
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            is_meant = wanted is None or any(id(parameter) in wanted for parameter in _parameters(optimizer))
            if is_meant and _has_gradients(optimizer) and id(optimizer) not in self._unscaled:
                try:
                    self.scaler.unscale_(optimizer)
                except ValueError as error:
                    if (explained := _explained(optimizer)) is None:
                        raise
                    raise explained from error
                self._unscaled[id(optimizer)] = weakref.ref(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, Taken]:
        if closure is not None:
            raise ValueError("fp16 cannot step with a closure (LBFGS): use mixed_precision='bf16' or 'no'")
        if not _has_gradients(optimizer):  # torch's scaler refuses what plain torch accepts as a step that does nothing
            return optimizer.step(), True
        if id(optimizer) in self._stepped:
            self._update()
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not is_fused and id(optimizer) not in self._unscaled:  # a fused one unscales in its kernel
            try:
                self.scaler.unscale_(optimizer)  # as its `step` would; after an error there nothing would record it
            except ValueError as error:
                if (explained := _explained(optimizer)) is None:
                    raise
                raise explained from error
            self._unscaled[id(optimizer)] = weakref.ref(optimizer)
        taken: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        try:
            value = self.scaler.step(optimizer)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # with which torch's scaler would scale the next step again
                vars(optimizer).pop(name, None)
            raise
        finally:
            hook.remove()
        self._stepped.add(id(optimizer))
        if taken and is_fused:
            # Fused optimizers are always called and skip inside their kernel; only the scaler knows.
            found = list(self.scaler._found_inf_per_device(optimizer).values())
            if any(map(_waits, found)):
                return value, self._read_later(found)
            taken = [] if any(flag.item() for flag in found) else taken
        self._has_skipped |= not taken
        return value, bool(taken)

    def _read_later(self, found: list[Tensor]) -> Callable[[], bool]:
        self._found += found
        reading = Reading({"found": found})  # a copy: the scaler's update adds them up in place
        return lambda: not any(reading.values()["found"])

    def _update(self) -> None:
        found, self._found = self._found, []
        self.scaler.update()
        min_scale = self.handlers.scaler.min_scale
        if found:  # on the device, without waiting for it
            scale = torch.amp.GradScaler.scale(self.scaler, torch.ones((), device=self.device))
            flags = [flag.to(scale.device, non_blocking=True).reshape(()) for flag in found]
            has_skipped = torch.stack(flags).any() | self._has_skipped
            self.scaler.update(torch.where(has_skipped, scale.clamp(min=min_scale), scale))
        elif self._has_skipped and self.scaler.get_scale() < min_scale:  # read only then: it waits for the device
            self.scaler.update(min_scale)
        self._has_skipped = False
        self._stepped.clear()
        self._unscaled.clear()

    def forget(self) -> None:
        # The scale stays: if it was to be lowered, the next step is skipped too and lowers it.
        self.scaler._per_optimizer_states.clear()
        self._unscaled.clear()
        self._stepped.clear()
        self._found.clear()
        self._has_skipped = False

    def take_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if self._stepped:
            self._update()
        self.forget()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False) if scaler is None else scaler
        self._is_scaled_by_hand = True  # the program calls its `scale`, and we do not see that

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        if self._stepped:  # torch's scaler cannot be pickled between a step and its update
            self._update()
        return vars(self)

    def explain_skips(self) -> str:
        return (
            f"their fp16 gradients were infinite or NaN, and the loss scale is down to {self.scaler.get_scale():g}. "
            "The loss itself is probably infinite: lower the learning rate, clip gradients, or use "
            "mixed_precision='bf16'."
        )


def _explained(optimizer: Optimizer) -> ValueError | None:
    """Return what to raise where torch's scaler refuses gradients; None if no trained parameter is of fp16 itself."""
    trained = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    halves = sum(parameter.dtype == torch.float16 for parameter in trained)
    if not halves:
        return None
    return ValueError(
        f"mixed_precision='fp16' trains parameters of float32, and {halves} of the {len(trained)} trained ones are of "
        "float16: their updates would be lost to rounding. Before prepare, for these alone: parameter.data = "
        "parameter.data.float() (peft's get_peft_model does it for adapters, with autocast_adapter_dtype=True)."
    )


class _Scaler(torch.amp.GradScaler):
    """The scaler as programs see it; a program may scale losses itself with it."""

    def __init__(self, precision: Fp16, device_type: str, **options: Any) -> None:
        super().__init__(device_type, **options)
        self._precision = precision

    def scale(self, outputs: Any) -> Any:
        return self._precision.scale_by_hand(outputs)


def _waits(flag: Tensor) -> bool:
    """Return whether reading `flag` waits for what was computed before."""
    return flag.is_cuda


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


class _Casting:
    """Autocast that all forwards of one precision share. Copies of a model copy this along, and no scaler."""

    def __init__(self, device: torch.device, dtype: torch.dtype, options: AutocastKwargs) -> None:
        self.device = device
        self.dtype = dtype
        self.options = options
        self.forwards: AbstractContextManager[Any] | None = None  # the autocast of every forward, once there was one
        self.is_in_forward = False

    def move_to(self, device: torch.device) -> None:
        self.device = device
        self.forwards = None

    def context(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        chosen = options or self.options
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )


class _AutocastForward:
    """A module's forward under autocast, outputs in fp32. A class, so that prepared models can be pickled."""

    def __init__(self, forward: Callable[..., Any], casting: _Casting) -> None:
        functools.update_wrapper(self, forward, updated=())  # signature() of the model stays what it was
        self.forward = forward
        self.casting = casting

    def __nbaccel_unwrap__(self) -> Callable[..., Any]:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casting = self.casting
        # Making an autocast asks the device for its features each time, so one serves all forwards. It stores the state
        # that it found when it was entered, so a forward inside of another one gets its own.
        was_in_forward, casting.is_in_forward = casting.is_in_forward, True
        context = None if was_in_forward else casting.forwards
        if context is None:
            context = casting.context()
            if not was_in_forward:
                casting.forwards = context
        try:
            with context:
                output = self.forward(*args, **kwargs)
        finally:
            casting.is_in_forward = was_in_forward
        if type(output) is Tensor:  # as nearly always
            return output.float() if output.dtype in _HALF else output
        return to_fp32(output)


def to_fp32(value: Any) -> Any:
    """Return `value` with half-precision tensors anywhere in it as fp32; everything else is unchanged."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    return map_children(to_fp32, value)


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `Precision.wrap_forward`."""
    if isinstance(model.__dict__.get("forward"), _AutocastForward):
        del model.forward


_KINDS: dict[str, type[Precision]] = {"no": Precision, "fp16": Fp16, "bf16": Bf16}


def make_precision(name: str, device: torch.device, handlers: Handlers | None = None) -> Precision:
    """Return the precision called `name`.

    Raises:
        ValueError: There is no such precision; the message names the choices.
    """
    if name not in _KINDS:
        raise ValueError(wrong_precision(name))
    return _KINDS[name](device, handlers)
