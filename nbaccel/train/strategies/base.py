"""Strategy: the interface to one way of spreading a model, and its honest default, a single device. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.train.handlers import Handlers
from nbaccel.train.microbatch.gradients import Gradients
from nbaccel.train.precision import Precision, Taken
from nbaccel.train.talk.collectives import Collectives
from nbaccel.world import World

__all__ = ["Strategy", "without_compile"]


class Strategy:
    """One process, one device. Subclasses are final and override what their way of spreading needs."""

    has_peers = False
    """Whether gradients are exchanged with other ranks at all."""

    recovers = False
    """Whether this training goes on after running out of memory: an optimizer's step is guarded then."""

    def __init__(self, world: World, device: torch.device, handlers: Handlers | None = None) -> None:
        self.world = world
        self.device = device
        self.handlers = handlers or Handlers()

    def setup(self, model: Module) -> Module:
        """`model`, on its device already, made part of this strategy. Collective."""
        return model

    def keeps_together(self, model: Module) -> bool:
        """Whether training `model` on every rank is one training. Always so on a single device."""
        return True

    def finds_parallel(self) -> bool:
        """Whether this process holds a module, prepared by us or made by the user, that trains as one."""
        return True

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """While entered, backward leaves gradients of `model` unsynchronised."""
        return nullcontext()

    def alone(self, model: Module) -> AbstractContextManager[Any]:
        """While entered, neither a forward nor a backward of `model` waits for another rank."""
        return nullcontext()

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        """While entered, backward synchronises gradients of `model`, also those of a forward under `no_sync`."""
        return nullcontext()

    def await_backward(self, model: Module) -> None:
        """Let the next backward synchronise gradients of `model`, also those of a forward that ran under `no_sync`."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Collective where gradients synchronise during the backward."""
        loss.backward(**kwargs)

    def lend_gradients(self, models: Sequence[Module], collectives: Collectives) -> Gradients:
        """The gradients of `models`, for `forward_backward` to accumulate and exchange. Collective.

        They are this strategy's again as soon as the program runs a forward of its own.

        Raises:
            CannotSplit: a model that exchanges something in its forward, or whose gradients are not ours to lend.
        """
        return Gradients([self.unwrap(model) for model in models])

    def step(self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> tuple[Any, Taken]:
        """Step `optimizer`: what it returned, and whether it took the step."""
        return precision.step(optimizer, closure)

    def has_finite_gradients(self, optimizer: Optimizer) -> bool:
        """No synchronised gradient of `optimizer` is NaN or infinite; alike on all ranks. Waits for the device."""
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # The largest magnitude: unlike a sum it cannot overflow by itself, and NaN wins against every number.
        return not gradients or bool(torch.nn.utils.get_total_norm(gradients, float("inf")).isfinite())

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def state_dict(self, model: Module) -> dict[str, Any]:
        """The whole model's state, as a single process would save it."""
        return self.unwrap(model).state_dict()

    def load_state_dict(self, model: Module, state: dict[str, Any], **options: Any) -> None:
        """options: as the module's own ``load_state_dict`` takes them, ``strict`` for example."""
        self.unwrap(model).load_state_dict(state, **options)

    def unwrap(self, model: Module) -> Module:
        """The user's own module."""
        return without_compile(model)


def without_compile(model: Module) -> Module:
    """The module inside ``torch.compile``'s wrapper, by the attribute that torch keeps it under."""
    while "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model
