"""Models that earlier cells have made: where they are, and whether ranks can get them. Runs in the kernel.

Many notebooks load a model in one cell, onto a GPU or over all of them, and train it in another. A plain model can be
sent to ranks: its memory goes to the host once, and all ranks share that copy. One that is quantised or spread over
GPUs cannot; it is refused before anything is copied (`made_in_cells`).

Packages that quantise or dispatch models are recognised by what they leave in a model, and are not imported. No model
is kept here: a plan outlives the notebook's names.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nbaccel.base.quantised import cannot_be_sent, is_quantised
from nbaccel.base.quantities import amount
from nbaccel.namespace.nbytes import met_in, sizes_on_devices
from nbaccel.namespace.wrappers import plain

__all__ = [
    "LOADER",
    "EarlierModel",
    "models_in",
    "places_of",
]

_NO_CARD = frozenset({"cpu", "disk", "meta"})

LOADER = "from_pretrained"
"""The method of classes that load a model."""


@dataclass(frozen=True, slots=True)
class EarlierModel:
    """A model that values of the notebook lead to, and that is on a device, quantised, or spread.

    Args:
        name: The variable that leads to it.
        own_name: A variable that is the model itself; empty if there is none.
        kind: Its class.
        is_loaded: The class has `from_pretrained`.
        on_devices: Its bytes by device that is not the host.
        cards: The devices over which it is spread, or between which and the host it moves; empty for a model in one
            place.
        is_quantised: Its weights cannot be sent.
    """

    name: str
    own_name: str
    kind: str
    is_loaded: bool = False
    on_devices: Mapping[str, int] | None = None
    cards: tuple[str, ...] = ()
    is_quantised: bool = False

    @property
    def nbytes(self) -> int:
        """Return its bytes on devices."""
        return sum((self.on_devices or {}).values())

    @property
    def where(self) -> str:
        """Return its devices in words."""
        return " and ".join(self.on_devices or {})

    @property
    def stays_here(self) -> bool:
        """Return whether no other process can get it."""
        return self.is_quantised or bool(self.cards)

    def __str__(self) -> str:
        """Return how the notebook has it, in words that follow its name."""
        size = f" ({amount(self.nbytes)})" if self.nbytes else ""
        if self.is_quantised:
            return f"was loaded quantised{f' and lies on {self.where}' if self.where else ''}{size}"
        return f"is spread over {' and '.join(self.cards)}{size}" if self.cards else f"lies on {self.where}{size}"


def models_in(values: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> tuple[EarlierModel, ...]:
    """Return the models of `values` that are on devices, quantised or spread; each once, and none inside of another.

    They are found in containers, in attributes of objects such as a Trainer, in closures and defaults of functions, and
    in attributes of classes of the notebook.

    Args:
        variables: The notebook's, among which a model that was found in another object may have a name of its own.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    module = torch.nn.Module
    values = {name: plain(value) for name, value in values.items()}
    models_first = sorted(values, key=lambda name: not issubclass(type(values[name]), module))
    met = met_in({name: values[name] for name in models_first}, module)
    inside = {id(part) for models in met.values() for model in models for part in _children(model)}
    names = {id(value): name for name, value in reversed({**(variables or {}), **values}.items()) if name[:1] != "_"}
    found = []
    for name, models in met.items():
        for model in models:
            if id(model) not in inside and (one := _weighed(name, names.get(id(model), ""), model)) is not None:
                found.append(one)
    return tuple(found)


def _weighed(name: str, own_name: str, model: Any) -> EarlierModel | None:
    """Return the facts about a model; None if it is a plain one on the host, or cannot be read."""
    with suppress(Exception):  # a module whose __init__ was not called has no parameters to ask for
        sizes = sizes_on_devices({name: model})
        on_devices = {device: counted[name] for device, counted in sizes.items() if device != "meta"}
        quantised = cannot_be_sent(model) or (bool(on_devices) and is_quantised(model))
        cards = places_of(model, on_devices)
        if on_devices or quantised or cards:
            kind = type(model)
            is_loaded = callable(getattr(kind, LOADER, None))
            return EarlierModel(name, own_name, kind.__name__, is_loaded, on_devices, cards, quantised)
    return None


# --- recognising ----------------------------------------------------------------------------------------------------


def places_of(model: Any, on_devices: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return the places of a module that is spread over devices, or that moves between one and the host or the disk.

    It is empty for a module in one place, and for one whose parts wait on the host and on the disk alone: each process
    may have such a model.

    Args:
        on_devices: Its bytes by device, if the caller knows them.
    """
    parts = list(_parts(model))
    maps = (marks["hf_device_map"] for marks in map(vars, parts) if isinstance(marks.get("hf_device_map"), dict))
    mapped = dict.fromkeys(_device_name(place) for places in maps for place in places.values())
    if on_devices is None:
        on_devices = Counter(str(tensor.device) for tensor in _tensors(model) if tensor.device.type not in _NO_CARD)
    places = list(dict.fromkeys([*mapped, *on_devices]))
    if all(place in _NO_CARD for place in places):
        return ()
    if len(places) == 1 and any(map(_brings_weights, map(vars, parts))):
        places.append("the host")
    return tuple(places) if len(places) > 1 else ()


def _brings_weights(marks: Mapping[str, Any]) -> bool:
    """Return whether a module is dispatched, by its attributes: by a hook of Accelerate's kind that has a device."""
    hook = marks.get("_hf_hook")
    return "_nbaccel_dispatch" in marks or hasattr(hook, "execution_device") or hasattr(hook, "hooks")


def _device_name(place: Any) -> str:
    """Return torch's name of a place in a device map, where numbers are GPUs.

    Example:
        >>> _device_name(1), _device_name("cuda"), _device_name("disk")
        ('cuda:1', 'cuda:0', 'disk')
    """
    text = str(place)
    return f"cuda:{text}" if text.isdecimal() else "cuda:0" if text == "cuda" else text


def _parts(model: Any) -> Iterator[Any]:
    yield from sys.modules["torch"].nn.Module.modules(model)


def _children(model: Any) -> list[Any]:
    try:
        return [part for part in vars(model)["_modules"].values() if part is not None]
    except (KeyError, TypeError, AttributeError):  # a module whose __init__ was not called
        return []


def _tensors(model: Any) -> Iterator[Any]:
    module = sys.modules["torch"].nn.Module
    yield from module.parameters(model)
    yield from module.buffers(model)
