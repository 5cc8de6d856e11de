"""Results: what a run brought back becomes variables of the notebook. Runs in the kernel, after the ranks are gone.

An object of the same type and structure that the notebook has already is loaded in place, so every other reference
to it sees the training; anything else replaces the name. Modules are settled first, then optimizers, then the rest:
an optimizer of the notebook may stay only if its parameters do. Nothing is printed here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.launch.wire.wrappers import plain
from nbaccel.notebook.plan import amount

__all__ = ["Arrival", "install"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One variable that came back: how it got into the notebook, in words that may be empty, and its size."""

    name: str
    how: str
    nbytes: int

    def __str__(self) -> str:
        """
        >>> str(Arrival("model", "updated in place", 44_700_000))
        'model (updated in place, 44.7 MB)'
        """
        return f"{self.name} ({', '.join(filter(None, [self.how, amount(self.nbytes)]))})"


def install(values: Mapping[str, Any], namespace: dict[str, Any], sizes: Mapping[str, int]) -> list[Arrival]:
    """Bind each of `values` in `namespace`, or load it into the object that has the name; in the order of `values`."""
    moving = _Moving()
    # Of several names for one object, that under which the notebook has its like decides.
    in_order = sorted(values, key=lambda name: type(plain(namespace.get(name))) is not type(values[name]))
    how: dict[str, str] = {}
    for kind in (_Module(), _Optimizer(), _Stateful(), _Plain()):
        for name in in_order:
            if name not in how and kind.handles(values[name]):
                how[name] = _settle(kind, name, values[name], namespace, moving)
    return [Arrival(name, how[name], sizes.get(name, 0)) for name in values]


@dataclass(slots=True)
class _Moving:
    """What has been settled so far.

    stays: by the id of an object that came, the notebook's object that took its state (parameters among them).
    replaces: ids of objects that came and are the notebook's from now on.
    """

    stays: dict[int, Any] = field(default_factory=dict)
    replaces: set[int] = field(default_factory=set)

    def home(self, new: Any) -> Any:
        """The notebook's object for one that came."""
        return self.stays.get(id(new), new)


class _Plain:
    """Any object: it replaces what had its name."""

    changed = ""
    """What to say when an object of the same type was there and could not be loaded."""

    def handles(self, new: Any) -> bool:
        return True

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        return False

    def load(self, old: Any, new: Any, moving: _Moving) -> None:
        """Give `old` the state of `new`."""

    def load_if_it_fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        """Whether `old` has the state of `new` now."""
        if not self.fits(old, new, moving):
            return False
        self.load(old, new, moving)
        return True

    def adopt(self, new: Any, moving: _Moving) -> None:
        """`new` is the notebook's from now on: point it at the notebook's objects."""


class _Stateful(_Plain):
    """Schedulers, scalers, and whatever else has a state."""

    changed = "its state did not fit"

    def handles(self, new: Any) -> bool:
        kind = type(new)  # not `new`: a `__getattr__` of the user's may do anything
        return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        optimizer = getattr(new, "optimizer", None)
        return id(optimizer) not in moving.replaces

    def load(self, old: Any, new: Any, moving: _Moving) -> None:
        old.load_state_dict(new.state_dict())
        moving.stays[id(new)] = old

    def adopt(self, new: Any, moving: _Moving) -> None:
        moving.replaces.add(id(new))
        if id(getattr(new, "optimizer", None)) in moving.stays:
            new.optimizer = moving.home(new.optimizer)


class _Module(_Stateful):
    """Modules fit when their state has the same names, shapes and types."""

    changed = "its structure changed"

    def handles(self, new: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and issubclass(type(new), torch.nn.Module)  # a proxy's ``__class__`` may do anything

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        return _structure(old) == _structure(new)

    def load(self, old: Any, new: Any, moving: _Moving) -> None:
        super().load(old, new, moving)  # on the device where the old one is
        came = dict(new.named_parameters(remove_duplicate=False))
        for name, parameter in old.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(came[name].requires_grad)
            moving.stays[id(came[name])] = parameter
        modes = {name: module.training for name, module in new.named_modules()}
        for name, module in old.named_modules():
            module.training = modes.get(name, module.training)

    def adopt(self, new: Any, moving: _Moving) -> None:
        moving.replaces |= {id(new), *map(id, new.parameters())}


class _Optimizer(_Stateful):
    """Optimizers fit when their groups hold as many parameters of the same shapes, and none of a module that is new."""

    changed = "its parameters changed"

    def handles(self, new: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and issubclass(type(new), torch.optim.Optimizer)

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        is_of_new_module = any(id(parameter) in moving.replaces for parameter in _parameters(new))
        return not is_of_new_module and _shapes(old) == _shapes(new)

    def adopt(self, new: Any, moving: _Moving) -> None:
        """It came with copies of the parameters; it has to step those that the notebook's modules kept."""
        moving.replaces.add(id(new))
        if not any(id(parameter) in moving.stays for parameter in _parameters(new)):
            return
        state = new.state_dict()
        for group in new.param_groups:
            group["params"] = [moving.home(parameter) for parameter in group["params"]]
        new.state = defaultdict(dict)
        new.load_state_dict(state)  # moves momentum to the devices of the parameters


def _settle(kind: _Plain, name: str, new: Any, namespace: dict[str, Any], moving: _Moving) -> str:
    """Load or bind one value; says how, in words for the user."""
    if id(new) in moving.stays or id(new) in moving.replaces:  # a second name for an object settled already
        namespace[name] = moving.home(new)
        return "updated in place" if id(new) in moving.stays else ""
    old = plain(namespace.get(name))
    is_like = type(old) is type(new)
    if is_like and _succeeds(kind.load_if_it_fits, old, new, moving):
        return "updated in place"
    kind.adopt(new, moving)
    namespace[name] = new
    return f"new object: {kind.changed}" if is_like and kind.changed else ""


def _succeeds(load: Callable[..., bool], old: Any, new: Any, moving: _Moving) -> bool:
    """A state that does not fit after all is no error: the object then comes as a new one."""
    try:
        return load(old, new, moving)
    except Exception:  # whatever a foreign load_state_dict raises, or a layer that has no shape yet
        return False


def _structure(module: Any) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), value.dtype) if hasattr(value, "shape") else None
        for name, value in module.state_dict().items()
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shapes(optimizer: Any) -> list[list[tuple[int, ...]]]:
    return [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
