"""Find which names keep how many bytes of tensors alive. Runs anywhere; only `forget_history` changes anything.

It runs no code of the user's, and terminates: the garbage collector, not the object, tells what an object holds.
IPython is never imported, only used if loaded: in a script the names are those of `__main__`, without history.

Not seen: tensors that only C++ holds (DDP's buckets), module globals, and what hooks of a graph have packed.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = [
    "MOST_OBJECTS_OF_ALL",
    "Holding",
    "Names",
    "Search",
    "holdings",
    "holds_tensors",
    "named_holdings",
]

_MOST_OBJECTS = 300_000
"""Objects to search per name; more than that are data, and take longer to search than a user would wait."""

MOST_OBJECTS_OF_ALL = 500_000
"""Objects to search for all names together, half a second. Models come first, so what is left out most likely holds no
tensor. Objects and not seconds: what is found does not depend on how busy the machine is."""

_CLOSED = (type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType, str, bytes)
"""Objects that lead to the rest of the process, or nowhere; they are not followed."""


class Holding(NamedTuple):
    """Bytes of tensors on a device that a name keeps alive; "model.grad" and the like say which part of it."""

    name: str
    bytes: int
    device: str = "cpu"


def holdings(*groups: Mapping[str, Any], beside: Collection[Any] = ()) -> list[Holding]:
    """Return what keeps tensors alive among the names in `groups`, the largest first.

    Memory counts once, under the first name that leads to it: models come first, then optimizers, tensors, and the rest
    in the order in which they were made. A tensor that an autograd graph has saved counts under the tensor with that
    graph.

    Looks at 500,000 objects at most; what is under the last names may then be left out.

    Args:
        beside: Objects that are not followed, such as the namespace itself.
        *groups: Names and their objects; an object in an earlier group counts there.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> loss = model(torch.ones(3, 100)).sum()
        >>> loss.backward()
        >>> for holding in holdings({"weight": model.weight, "loss": loss, "model": model}):
        ...     print(holding)
        Holding(name='model', bytes=4040, device='cpu')
        Holding(name='model.grad', bytes=4040, device='cpu')
        Holding(name='loss', bytes=4, device='cpu')
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    census = _Census(torch, beside, Search(MOST_OBJECTS_OF_ALL))
    with torch._C.DisableTorchFunctionSubclass():  # classes of tensors may answer in any way, or refuse
        for names in groups:
            for name, thing in sorted(names.items(), key=lambda item: census.turn(item[1])):
                census.take(name, thing)
    return sorted(census.found(), key=lambda holding: -holding.bytes)


class Search:
    """Counts the objects that a search has looked at, up to `most`."""

    def __init__(self, most: int) -> None:
        self.left = most

    def goes_on(self) -> bool:
        self.left -= 1
        return self.left >= 0


def holds_tensors(thing: Any, search: Search) -> bool:
    """Return whether `thing` keeps a tensor alive, as far as `search` goes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(_storage_of(tensor) is not None for tensor in _tensors(torch, thing, (), search))


class _Census:
    """Counts storages, each under the first name that leads to it."""

    def __init__(self, torch: Any, beside: Iterable[Any], search: Search) -> None:
        self._torch = torch
        self._search = search
        self._storages: set[tuple[str, int]] = set()
        self._beside = {id(thing) for thing in beside}
        self._bytes: dict[tuple[str, str], int] = {}

    def turn(self, thing: Any) -> int:
        kinds = (self._torch.nn.Module, self._torch.optim.Optimizer, self._torch.Tensor)
        return next((turn for turn, kind in enumerate(kinds) if _is(thing, kind)), len(kinds))

    def take(self, name: str, thing: Any) -> None:
        if _is(thing, self._torch.optim.Optimizer):
            self._count(f"{name}.state", _tensors(self._torch, _state_of(thing), self._beside, self._search))
        tensors = list(_tensors(self._torch, thing, self._beside, self._search))
        self._count(name, tensors)
        self._count(f"{name}.grad", map(_gradient_of, tensors))
        self._count(f"{name}.grad_fn", _saved_by(self._torch, tensors, self._search))

    def found(self) -> Iterator[Holding]:
        for (name, device), count in self._bytes.items():
            yield Holding(name, count, device)

    def _count(self, name: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage is None:
                continue
            key = (str(storage.device), storage._cdata)
            if key not in self._storages:
                self._storages.add(key)
                place = (name, key[0])
                self._bytes[place] = self._bytes.get(place, 0) + storage.nbytes()


def _storage_of(tensor: Any) -> Any:
    """Return the memory of `tensor`; None where it has none: no tensor, sparse, on "meta", around other tensors.

    Of a sharded tensor (DTensor) it is that of the rows which this rank holds.
    """
    try:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        return storage if storage.nbytes() and storage.device.type != "meta" and storage.data_ptr() else None
    except Exception:  # classes of tensors refuse it in ways of their own
        return None


def _gradient_of(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf else None


def _state_of(optimizer: Any) -> list[Any]:
    """Return the values of its state, without the parameters that are the keys. A prepared one has the same state."""
    try:
        return list(optimizer.state.values())
    except Exception:  # a class of its own may have none
        return []


def _tensors(torch: Any, thing: Any, beside: Collection[int], search: Search) -> Iterator[Any]:
    """Yield the tensors that `thing` leads to by Python references."""
    seen = set(beside)
    waiting = [thing]
    while waiting and len(seen) < _MOST_OBJECTS and search.goes_on():
        thing = waiting.pop()
        if id(thing) in seen or _is(thing, _CLOSED):
            continue
        seen.add(id(thing))
        if _is(thing, torch.Tensor):
            yield thing
        if type(thing) is types.FunctionType:  # its globals belong to all
            waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        else:
            others = [other for other in gc.get_referents(thing) if gc.is_tracked(other)]
            waiting += others
            waiting += [other for other in others if _is(other, torch.Tensor)]  # next, before all others


def _is(thing: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether `thing` is of `kind` by its true type: a lazy object's ``__class__`` may import its target."""
    return issubclass(type(thing), kind)


def _saved_by(torch: Any, tensors: Iterable[Any], search: Search) -> Iterator[Any]:
    """Yield what the graphs behind `tensors` have saved for a backward.

    They are read without unpacking: that would run the hooks of activation checkpointing, which compute it all again.
    What a hook has packed is left out, and so is all of it before about torch 2.9, which shows nothing.
    """
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting and len(seen) < _MOST_OBJECTS and search.goes_on():
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                    tensor = getattr(one, "data", None)
                    if isinstance(tensor, torch.Tensor):
                        yield tensor


_LAST = ("_", "__", "___")


def named_holdings(leaving: Collection[Any] = ()) -> list[Holding]:
    """Return what the program's names and a notebook's outputs keep alive, the largest first.

    Args:
        leaving: Objects whose names are ignored.
    """
    names = Names.of_this_process()
    gone = {id(thing) for thing in leaving}
    staying = {name: value for name, value in names.variables().items() if id(value) not in gone}
    return holdings(staying, names.outputs(), beside=names.not_followed())


class Names:
    """Variables of the program that runs here, by the names its author uses.

    Args:
        shell: IPython's, or None in a script.
    """

    def __init__(self, shell: Any = None) -> None:
        self._shell = shell

    @classmethod
    def of_this_process(cls) -> Names:
        ipython = sys.modules.get("IPython")
        return cls(None if ipython is None else ipython.get_ipython())

    @property
    def namespace(self) -> dict[str, Any]:
        return vars(sys.modules["__main__"]) if self._shell is None else self._shell.user_ns

    def variables(self) -> dict[str, Any]:
        """Return the program's own variables, without those that IPython made."""
        hidden: Mapping[str, Any] = {} if self._shell is None else self._shell.user_ns_hidden
        return {
            name: value
            for name, value in self.namespace.items()
            if name not in hidden and not (name.startswith("_") and name.strip("_i0123456789") == "")
        }

    def outputs(self) -> dict[str, Any]:
        """Return outputs of cells that IPython keeps, as `Out[7]`; and `_7` or `_`, where only those are left."""
        if self._shell is None:
            return {}
        spaces = (self._shell.user_ns_hidden, self.namespace)
        last = {name: value for space in spaces for name, value in space.items() if name in _LAST or _is_numbered(name)}
        return {f"Out[{number}]": value for number, value in self._out().items()} | last

    def not_followed(self) -> list[Any]:
        """Return objects that would lead from one variable to all others."""
        return [self.namespace, sys.modules, self._out(), *([] if self._shell is None else [self._shell])]

    def forget_history(self, is_heavy: Callable[[Any], bool]) -> None:
        """Drop the heavy outputs everywhere in IPython: Out, `_7`, `_`, its display hook, its mirror.

        The mirror is `user_ns_hidden`, in which IPython records the names it made itself, with their values.
        """
        if self._shell is None:
            return
        mirror = self._shell.user_ns_hidden
        out = self._out()
        for number in [number for number, value in out.items() if is_heavy(value)]:
            del out[number]
        for space in (self.namespace, mirror):
            for name in [name for name in space if _is_numbered(name) and is_heavy(space[name])]:
                del space[name]
            space.update({name: "" for name in _LAST if is_heavy(space.get(name))})
        hook = self._shell.displayhook
        for name in _LAST:
            if is_heavy(getattr(hook, name, None)):
                setattr(hook, name, "")

    def _out(self) -> dict[int, Any]:
        out: dict[int, Any] = {} if self._shell is None else self.namespace.get("_oh", {})
        return out


def _is_numbered(name: str) -> bool:
    """
    >>> _is_numbered("_7"), _is_numbered("_i7"), _is_numbered("_")
    (True, False, False)
    """
    return name.startswith("_") and name[1:].isdecimal()
