"""Objects that one Accelerator prepared: models, optimizers, schedulers, loaders. Runs in ranks.

`Prepared` stores them in the order of `prepare`, moves them, and reads their state; it does not prepare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import Module

from nbaccel.base.quantised import base_of, trained_state
from nbaccel.features import feature
from nbaccel.train.data import PreparedLoader
from nbaccel.train.prepare.models import may_move
from nbaccel.train.prepare.optimizer import PreparedOptimizer, PreparedScheduler
from nbaccel.train.step.accumulation import Window
from nbaccel.train.strategies import Strategy
from nbaccel.train.strategies.single import is_parallel, plain_name, plainly_named

if TYPE_CHECKING:
    from nbaccel.features.quantised_base.frozen_base import KnownBases

__all__ = [
    "Prepared",
    "frozen_names",
    "remembered",
]

_T = TypeVar("_T")


@dataclass(slots=True, weakref_slot=True)
class Prepared:
    """Prepared objects by kind; false while there are none."""

    models: list[Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    _bases: KnownBases | None = None

    def __bool__(self) -> bool:
        return bool(self.models or self.optimizers or self.schedulers or self.loaders)

    @property
    def bases(self) -> KnownBases:
        """Return what is known of the bases of quantised models; the first of them loads it."""
        if self._bases is None:
            self._bases = feature("the base of a quantised model")()
        return self._bases

    @property
    def _kinds(self) -> tuple[list[Any], ...]:
        return self.models, self.optimizers, self.schedulers, self.loaders

    @property
    def everything(self) -> list[Any]:
        return [*self.models, *self.optimizers, *self.schedulers, *self.loaders]

    def keep(self, known: Sequence[Any]) -> None:
        """Forget everything except what is in `known`."""
        ids = set(map(id, known))
        for entries in self._kinds:
            entries[:] = [thing for thing in entries if id(thing) in ids]

    def drop(self, things: Sequence[Any], strategy: Strategy) -> bool:
        """Forget `things`, given as prepared objects or as the program's own; return whether any of them was known."""
        ids = set(map(id, things))
        dropped = False
        for entries in self._kinds:
            left = [entry for entry in entries if not ids & {id(entry), id(_inner(entry, strategy))}]
            dropped |= len(left) < len(entries)
            entries[:] = left
        return dropped

    def forget(self) -> None:
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()

    def move_to(self, device: torch.device) -> None:
        """Move to the device of another process, or move pickled tensors that arrived on the CPU."""
        for model in self.models:
            if may_move(model):
                model.to(device)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())  # casts the state to its parameters' device
        for loader in self.loaders:
            loader.move_to(device)

    def is_one_training(self, models: Sequence[Module], strategy: Strategy) -> bool:
        """Return whether `models`, or without models the whole program, would train as one on all ranks."""
        known = {id(strategy.unwrap(model)) for model in self.models}
        if models:
            return all(strategy.keeps_together(model) or id(strategy.unwrap(model)) in known for model in models)
        is_ours = any(strategy.unwrap(model) is not model or is_parallel(model) for model in self.models)
        return is_ours or strategy.finds_parallel()

    def model_states(self, strategy: Strategy) -> list[dict[str, Any]]:
        """Return the state of each model as this rank holds it: its rows, where it is sharded. No collective.

        Of a quantised model it is that of the trained tensors, and of buffers that change. Names are those of a model
        of which nothing is compiled.
        """
        return [
            plainly_named(
                trained_state(strategy.unwrap(model), strategy.state_dict(model), base)
                if (base := self.base_of(model, strategy))
                else strategy.state_dict(model)
            )
            for model in self.models
        ]

    def base_of(self, model: Module, strategy: Strategy) -> frozenset[str]:
        """Return the names of the tensors of `model` that no checkpoint needs; empty unless it is quantised.

        A parameter that an optimizer has stepped belongs to the trained ones, though it is frozen now.
        """
        stepped = {id(parameter) for optimizer in self.optimizers for parameter in optimizer.optimizer.state}
        return base_of(strategy.unwrap(model), stepped)

    def bases_left_out(self, strategy: Strategy) -> dict[str, Any]:
        """Return the facts of the bases that `model_states` leaves out, for a checkpoint; empty if there are none.

        Under "bases" is one entry for each model, None for one without a base. A base is read once.
        """
        named = [(strategy.unwrap(model), self.base_of(model, strategy)) for model in self.models]
        if not any(base for _, base in named):
            return {}
        return {"bases": [self.bases.facts(module, base).to_json() if base else None for module, base in named]}

    def frozen(self, strategy: Strategy) -> list[frozenset[str]]:
        """Return for each model the names of its parameters that need no gradient, as `model_states` names them."""
        return [frozenset(map(plain_name, frozen_names(strategy.unwrap(model)))) for model in self.models]

    def loader_states(self, window: Window, since: int | None = None) -> list[dict[str, Any]]:
        """Return the position of each loader; batches of an open accumulation `window` count as not yet handed out.

        Their gradients are in no checkpoint, so they are read again.

        Args:
            since: The program is inside an epoch that began after that many passes; see
                `PreparedLoader.state_in_epoch`.
        """
        source = getattr(window.source, "loader", None)  # of this loader, or of what skip_first_batches made of it
        unseen = [window.unfinished if source is loader.loader else 0 for loader in self.loaders]
        if since is None:
            return [loader.state_dict(count) for loader, count in zip(self.loaders, unseen, strict=True)]
        return [loader.state_in_epoch(since, count) for loader, count in zip(self.loaders, unseen, strict=True)]


def frozen_names(module: Module) -> frozenset[str]:
    """Return the names of the parameters of `module` that need no gradient."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, weight in named if not weight.requires_grad)


def _inner(prepared: Any, strategy: Strategy) -> Any:
    """Return the program's own object in a prepared one."""
    if isinstance(prepared, Module):
        return strategy.unwrap(prepared)
    if isinstance(prepared, PreparedOptimizer):
        return prepared.optimizer
    return prepared.scheduler if isinstance(prepared, PreparedScheduler) else prepared.loader


def remembered(thing: _T, among: list[_T]) -> _T:
    """Return `thing`, and add it to the prepared objects in `among` if it is new."""
    if not any(thing is known for known in among):
        among.append(thing)
    return thing
