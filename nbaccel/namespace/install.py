"""Results: turns the values that a run brought back into variables of the notebook. Runs in the kernel, after the run.

A value is loaded in place into an object of the same type and structure that the notebook has already, so every other
reference to it sees the training; any other value replaces the name. Modules are handled first, then optimizers, then
the rest: an optimizer of the notebook may stay only if its parameters do. Nothing is printed here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.quantised import TrainedTensors
from nbaccel.base.quantities import amount
from nbaccel.namespace.wrappers import plain

__all__ = ["Arrival", "install"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A variable that came back from the ranks.

    Args:
        name: Its name in the notebook.
        how: How its value was entered, such as "updated in place"; may be empty.
        nbytes: Its size.
    """

    name: str
    how: str
    nbytes: int

    def __str__(self) -> str:
        """Return the arrival as one entry of a list.

        Example:
            >>> str(Arrival("model", "updated in place", 44_700_000))
            'model (updated in place, 44.7 MB)'
        """
        return f"{self.name} ({', '.join(filter(None, [self.how, amount(self.nbytes)]))})"


def install(values: Mapping[str, Any], namespace: dict[str, Any], sizes: Mapping[str, int]) -> list[Arrival]:
    """Bind each of `values` in `namespace`, or load it into the object that has the name; in the order of `values`."""
    moving = _Moving()
    # Of several names for one object, the name under which the notebook has a similar object decides.
    in_order = sorted(values, key=lambda name: type(plain(namespace.get(name))) is not type(values[name]))
    how: dict[str, str] = {}
    for kind in (_Trained(), _Module(), _Optimizer(), _Stateful(), _Plain()):
        for name in in_order:
            if name not in how and kind.handles(values[name]):
                how[name] = _settle(kind, name, values[name], namespace, moving)
    return [Arrival(name, how[name], _size(values[name], sizes.get(name, 0))) for name in values]


def _size(value: Any, size: int) -> int:
    """Return the bytes that came of `value`.

    Args:
        size: Those that it had in the rank.
    """
    return value.nbytes if type(value) is TrainedTensors else size


@dataclass(slots=True)
class _Moving:
    """The objects handled so far.

    Args:
        stays: By the id of a new object, the notebook's object that took its state (parameters among them).
        replaces: Ids of new objects that are the notebook's from now on.
    """

    stays: dict[int, Any] = field(default_factory=dict)
    replaces: set[int] = field(default_factory=set)

    def home(self, new: Any) -> Any:
        """Return the notebook's object for a new one."""
        return self.stays.get(id(new), new)


class _Plain:
    """Any object: it replaces the object that had its name."""

    changed = ""
    """Text for the case that an object of the same type existed and could not be loaded."""

    came = ""
    """Text for a new object of which only a part came."""

    def handles(self, new: Any) -> bool:
        return True

    def meets(self, old: Any, new: Any) -> bool:
        """Return whether `old`, which has the name, is of a kind into which `new` may be loaded."""
        return type(old) is type(new)

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        return False

    def load(self, old: Any, new: Any, moving: _Moving) -> None:
        """Give `old` the state of `new`."""

    def load_if_it_fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        """Load `new` into `old` if it fits; return whether it did."""
        if not self.fits(old, new, moving):
            return False
        self.load(old, new, moving)
        return True

    def adopt(self, new: Any, moving: _Moving) -> None:
        """Take `new` as the notebook's object: make it refer to the notebook's objects."""


class _Stateful(_Plain):
    """Schedulers, scalers, and other objects with a state."""

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


class _Trained(_Plain):
    """Trained tensors of a quantised model. They fit the notebook's model that trains tensors of the same names."""

    changed = "what was trained, whose names or shapes are not those of the model here"
    came = "what was trained; the quantised base stays in the ranks"

    def handles(self, new: Any) -> bool:
        return type(new) is TrainedTensors

    def meets(self, old: Any, new: Any) -> bool:
        return _Module().handles(old)

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        return _Module().handles(old)

    def load(self, old: Any, new: Any, moving: _Moving) -> None:
        new.load_into(old)
        own = dict(old.named_parameters(remove_duplicate=False))
        moving.stays |= {id(tensor): own[name] for name, tensor in new.items() if name in own}
        moving.stays[id(new)] = old


class _Module(_Stateful):
    """Modules; they fit when their state has the same names, shapes and types."""

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
    """Optimizers; they fit if their groups have parameters of the same shapes, and none of a new module."""

    changed = "its parameters changed"

    def handles(self, new: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and issubclass(type(new), torch.optim.Optimizer)

    def fits(self, old: Any, new: Any, moving: _Moving) -> bool:
        is_of_new_module = any(id(parameter) in moving.replaces for parameter in _parameters(new))
        return not is_of_new_module and _shapes(old) == _shapes(new)

    def adopt(self, new: Any, moving: _Moving) -> None:
        """Make the new optimizer step the parameters that the notebook's modules kept, in place of its copies."""
        moving.replaces.add(id(new))
        if not any(id(parameter) in moving.stays for parameter in _parameters(new)):
            return
        state = new.state_dict()
        for group in new.param_groups:
            group["params"] = [moving.home(parameter) for parameter in group["params"]]
        new.state = defaultdict(dict)
        new.load_state_dict(state)  # moves momentum to the devices of the parameters


def _settle(kind: _Plain, name: str, new: Any, namespace: dict[str, Any], moving: _Moving) -> str:
    """Load or bind one value; return how, in words for the user."""
    if id(new) in moving.stays or id(new) in moving.replaces:  # a second name for an object settled already
        namespace[name] = moving.home(new)
        return "updated in place" if id(new) in moving.stays else ""
    old = plain(namespace.get(name))
    is_like = kind.meets(old, new)
    if is_like and _succeeds(kind.load_if_it_fits, old, new, moving):
        return "updated in place"
    kind.adopt(new, moving)
    namespace[name] = new
    return f"new object: {kind.changed}" if is_like and kind.changed else kind.came


def _succeeds(load: Callable[..., bool], old: Any, new: Any, moving: _Moving) -> bool:
    """Return whether loading succeeds. A state that does not fit is no error: the object then comes as a new one."""
    try:
        return load(old, new, moving)
    except Exception:  # any error of a user's load_state_dict, or a layer that has no shape yet
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
