"""MadeAgain: objects without a form as data that were made in a loop, such as the model of a fold. Runs in ranks.

No file builds them. The statements that have made them run again, or, of a copy of a model, the model is copied again;
then what is data of them is written in place: parameters, buffers and gradients bit for bit, the state of optimizers
and schedulers, attributes. What is not data (functions, say) stays as the statements have left it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nbaccel.base.quantities import with_article
from nbaccel.base.values import attributes_of, frozen
from nbaccel.features.cell_checkpoints.data_codec import Decoder, Encoder, NoData
from nbaccel.features.cell_checkpoints.head_state import (
    CODE,
    COPY,
    SCALARS,
    SCALER,
    HeadState,
    Seen,
    is_refused_name,
    shown,
    stateless,
    text_of,
)
from nbaccel.namespace.arrays import TensorChange, Values
from nbaccel.namespace.inventory import ObjectPlace
from nbaccel.namespace.kind import Entries, Write
from nbaccel.namespace.kinds import is_read_by_attributes, slots_of
from nbaccel.namespace.wrappers import is_put_there

__all__ = ["MadeAgain", "is_alike", "made_objects", "prepared"]

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {each for each in vars(torch.nn.Module()) if "hooks" in each}
"""Tables of a module by the numbers that torch gives to hooks, which go on as long as the process lives."""


@frozen
class MadeAgain:
    """The objects of one difference that are made again.

    Args:
        roots: Roots whose statements make them.
        copies: By their roots, the models of which they are copies.
        others: By their roots, models of which those may be copies that their statements do not make: after
            ``best = None`` a later round may have copied one.
        state: What roots and copies lead to.
        places: By the id of an object, its place; of the others the file has the value.
    """

    roots: list[str]
    copies: dict[str, Any]
    others: dict[str, Any]
    state: HeadState
    places: dict[int, str]

    @classmethod
    def among(
        cls, bound: Mapping[str, Any], changes: Iterable[Any], head: HeadState, can_make: Callable[[str], bool]
    ) -> MadeAgain:
        """Find them among the values of names that the loop has bound, and the contents that it has changed.

        Args:
            can_make: Says whether the statements that bind a root run again.
        """
        roots: dict[str, Any] = {}
        copies: dict[int, tuple[Any, Any]] = {}
        places: dict[int, str] = {}
        trial = Encoder(head, _as_it_is, places)

        def is_copied(found: Any) -> bool:
            original = _original(found, head, roots) if isinstance(found, torch.nn.Module) else None
            if original is None or id(found) in places:
                return False
            copies[id(found)] = found, original
            places[id(found)] = f"{COPY}{len(copies)}"
            return True

        roots |= {root: each for root, each in bound.items() if isinstance(each, torch.nn.Module) and can_make(root)}
        for value in roots.values():
            places |= dict.fromkeys(map(id, [*value.modules(), *value.parameters(), *value.buffers()]), "")
        for root, value in bound.items():
            if type(value) in SCALARS or root in roots or stateless(value) is not None:
                continue
            while (found := _without_form(trial.encoded, value)) is not None and is_copied(found):
                pass
            if can_make(root) and (found is not None or _leads_on(value, head, places)):
                roots[root] = value
                places[id(value)] = ""
        for content in changes:
            while (found := _without_form(trial.change, content)) is not None and is_copied(found):
                pass
        own = {f"{COPY}{number}": found for number, (found, _) in enumerate(copies.values())}
        state = HeadState(roots | own, are_names=False)
        originals = dict(zip(own, (original for _, original in copies.values()), strict=True))
        models = {root: value for root, value in roots.items() if isinstance(value, torch.nn.Module)}
        others = {root: each for root in models if (each := _original(models[root], head, models)) is not None}
        return cls(list(roots), originals, others, state, _in_place(state, head))

    def is_below(self, value: Any, head: HeadState) -> bool:
        """Return whether a value leads to one of these objects, so that it is there only once they are made."""
        trial = Encoder(head, _as_it_is, self.places)
        return _without_form(trial.encoded, value) is None and any(each[0] == "made" for each in trial.records)

    def contents(self, encoder: Encoder) -> Iterator[list[Any]]:
        """Yield the place of each object, what it is, and what is data of it.

        Raises:
            NoData: Something has a state that is neither data nor made by a statement.
        """
        for text, seen in _by_order_of_hooks(self.state.objects()).items():
            if self.places.get(id(seen.obj)) == text:
                kept = _kept(seen.obj.items()) if type(seen.obj) is dict else []
                yield [text, _name_of(seen.obj), kept, _content(seen, encoder)]


def _copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model, also of one that holds results of its forward, as torch's weight_norm does."""
    # https://github.com/pytorch/pytorch/pull/103001: such tensors refuse to be copied.
    values = [value for module in model.modules() for value in vars(module).values()]
    memo = {id(each): each.detach().clone() for each in values if isinstance(each, Tensor) and not each.is_leaf}
    return copy.deepcopy(model, memo)


def _by_order_of_hooks(objects: Mapping[str, Seen]) -> Mapping[str, Seen]:
    """Return objects by the text of their place, in which a hook has its number among those of its table."""
    numbers: dict[tuple[str, tuple[Any, ...]], set[int]] = {}
    for seen in objects.values():
        for table, number in _hooks_on_the_way(seen.place):
            numbers.setdefault(table, set()).add(number)
    orders = {table: {number: at for at, number in enumerate(sorted(found))} for table, found in numbers.items()}

    def text(seen: Seen) -> str:
        steps = list(seen.place.steps)
        for (name, before), number in _hooks_on_the_way(seen.place):
            steps[len(before)] = steps[len(before)][0], orders[name, before][number]
        return text_of(ObjectPlace(seen.place.name, tuple(steps)))

    return {text(seen): seen for seen in objects.values()} if numbers else objects


def _hooks_on_the_way(place: ObjectPlace) -> Iterator[tuple[tuple[str, tuple[Any, ...]], int]]:
    """Yield the tables of hooks through which a place leads, each with torch's number of the hook."""
    for at, (_, key) in enumerate(place.steps[:-1]):
        if key in _HOOKS and type(number := place.steps[at + 1][1]) is int:
            yield (place.name, place.steps[: at + 1]), number


def _as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _leads_on(value: Any, head: HeadState, places: Mapping[int, str]) -> bool:
    """Return whether a value leads to objects that statements make: other statements may read them by it."""
    trial = Encoder(head, _as_it_is, places)
    return _without_form(trial.encoded, value) is None and ["made", ""] in trial.records


def _without_form(encoded: Callable[[Any], Any], value: Any) -> Any:
    """Return the first object in `value` that has no form as data; None if there is none."""
    try:
        encoded(value)
    except NoData as error:
        return error.obj if error.obj is not None else value
    return None


def _original(found: torch.nn.Module, head: HeadState, roots: Mapping[str, Any]) -> Any:
    """Return a model of which `found` may be a copy: of the same modules, with tensors of the same shapes."""
    there = [seen.obj for seen in head.present_objects().values() if type(seen.obj) is type(found)]
    there += [value for value in roots.values() if type(value) is type(found) and value is not found]
    return next((each for each in there if _structure(each) == _structure(found)), None)


def _structure(model: torch.nn.Module) -> Any:
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in named}
    return shapes, {name: (type(each), _kept(vars(each).items())) for name, each in model.named_modules()}


def _kept(items: Iterable[tuple[Any, Any]]) -> list[list[str]]:
    """Return the keys of code among items, each with the name of the code: another run has to make the same."""
    code = [(key, value) for key, value in items if issubclass(type(value), CODE) and not is_put_there(key, value)]
    return [[str(key), f"{type(value).__name__} {getattr(value, '__qualname__', '')}"] for key, value in code]


def _name_of(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _in_place(state: HeadState, head: HeadState) -> dict[int, str]:
    """Return the places of the objects that are written in place: those without a form as data, and their tensors.

    Tensors of models are among them, since functions and hooks may have them, too.
    """
    objects = _by_order_of_hooks(state.objects())
    new = {id(seen.obj): (text, seen) for text, seen in objects.items() if head.place_of_any(seen.obj) is None}
    found: dict[int, str] = {}

    def add(*objects: Any) -> None:
        found.update((id(obj), new[id(obj)][0]) for obj in objects if id(obj) in new)

    for _, seen in new.values():
        if isinstance(module := seen.obj, torch.nn.Module):
            tables = [table for name in _TABLES if isinstance(table := vars(module).get(name), dict)]
            add(module, vars(module), *tables, *(each for table in tables for each in table.values()))
    trial = Encoder(head, _as_it_is, found)
    for obj_id, (_, seen) in new.items():
        if obj_id in found or stateless(seen.obj) is not None:
            continue
        if not seen.place.steps or _without_form(trial.encoded, seen.obj) is not None:
            own = None if isinstance(seen.obj, dict) else attributes_of(seen.obj)
            add(seen.obj, *([] if own is None else [own]))
    return found


def _content(seen: Seen, encoder: Encoder) -> Any:
    """Return what is data of an object, as JSON; None if nothing is."""
    obj = seen.obj
    if isinstance(obj, Tensor):
        return encoder.change(TensorChange(Values(obj.detach()), obj.requires_grad, (obj.grad,)))
    if any(key in _HOOKS for _, key in seen.place.steps[-1:]):
        return None  # as the statement has left it
    if isinstance(obj, dict):
        methods = OrderedDict if isinstance(obj, OrderedDict) else dict
        return ["entries", _encodable(encoder, methods.items(obj))]
    if isinstance(obj, (list, deque)):
        return ["items", len(obj), _encodable(encoder, enumerate(obj))]
    if seen.kind is SCALER:
        return ["scaler", encoder.encoded(obj.state_dict())]
    if type(obj) is tuple:
        return None
    if not is_read_by_attributes(seen.kind):
        raise NoData(with_article(type(obj).__name__), place=shown(seen.place))
    slots = [(name, member) for name, member in slots_of(type(obj)).items() if hasattr(obj, name)]
    return ["slots", _encodable(encoder, ((name, member.__get__(obj)) for name, member in slots))] if slots else None


def _encodable(encoder: Encoder, items: Any) -> list[Any]:
    """Return the pairs of keys and values that are data."""
    found = []
    for key, value in list(items):
        if is_refused_name(key) or is_put_there(key, value) or key in _HOOKS:
            continue
        try:
            found.append([encoder.encoded(key), encoder.encoded(value)])
        except NoData:
            continue  # it is written in place, or stays as the statement has left it
    return found


# --- reading --------------------------------------------------------------------------------------------------------


def made_objects(roots: Mapping[str, Any], copies: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Seen]:
    """Return the objects that were made again, by the text of their place.

    Args:
        roots: Values of the roots whose statements have run.
        copies: Models to copy, by the root of the copy.
    """
    if not all(isinstance(original, torch.nn.Module) for original in copies.values()):
        raise ValueError("a copy of no model")
    own = {root: _copy(original) for root, original in copies.items()}
    return _by_order_of_hooks(HeadState({**roots, **own}, are_names=False).objects())


def is_alike(seen: Seen | None, name: str, kept: Any) -> bool:
    """Return whether an object was made again, is of the same class, and leads to the same code."""
    return (
        seen is not None
        and _name_of(seen.obj) == name
        and (type(seen.obj) is not dict or _kept(seen.obj.items()) == kept)
    )


def prepared(seen: Seen, content: Any, decoder: Decoder) -> Callable[[], Write | None]:
    """Decode what is data of an object that was made again, and return the function that prepares to write it.

    That function is called once all new objects are filled.

    Raises:
        An error of any kind: it is not what `MadeAgain.contents` yields.
    """
    if content is None:
        return lambda: None
    if content[0] == "tensor change":
        change = decoder.change(content)
        return lambda: seen.kind.writing(seen.obj, change)
    word, *rest, last = content
    if word == "scaler" and seen.kind is SCALER:
        state = decoder.decoded(last)
        return lambda: SCALER.writing(seen.obj, (state,))
    pairs = [(decoder.decoded(key), decoder.decoded(value)) for key, value in last]
    if any(is_refused_name(key) for key, _ in pairs):
        raise ValueError("a name of Python's own")
    return lambda: _writing(seen, word, rest, pairs)


def _writing(seen: Seen, word: str, rest: list[Any], pairs: list[tuple[Any, Any]]) -> Write:
    obj = seen.obj
    if word == "entries" and isinstance(obj, dict):
        entries = Entries([], [key for key, _ in pairs], [value for _, value in pairs])
        is_class = type(seen.mark[0]) is tuple  # which adds attributes
        return seen.kind.writing(obj, (entries, None) if is_class else entries)
    if word == "items" and isinstance(obj, (list, deque)) and len(obj) == rest[0]:
        members = [(partial(obj.__setitem__, index), value) for index, value in pairs]
    elif word == "slots":
        slots = slots_of(type(obj))
        members = [(partial(slots[name].__set__, obj), value) for name, value in pairs]
    else:
        raise ValueError(f"{shown(seen.place)} was made otherwise")

    def write() -> None:
        for put, value in members:
            put(value)

    return write
