"""Salvage: rebuilds the values of a parcel when one of them cannot be rebuilt here. Runs in the kernel and in ranks.

Used by `parcel` alone, after its pickle has failed as a whole: an error in the ``__setstate__`` of one value must not
lose the model that came with it. The pickle is read again, slowly, in Python; an object that fails is replaced, and
every name that leads to a replaced object is left out with the reason.
"""

from __future__ import annotations

import gc
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

from nbaccel.launch.wire.pickling import Contents, is_ours

__all__ = ["salvaged"]

_Reader: Any = pickle._Unpickler  # the one written in Python, which can continue after an error
_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes)


def salvaged(contents: Contents) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the values of `contents` by name that can be rebuilt, and the error of each of the others."""
    reader = _Salvager(contents)
    values: dict[str, Any] = reader.load()
    refused: dict[str, Exception] = {}
    for name, value in values.items():
        if (error := reader.error_in(value)) is not None:
            refused[name] = error
    return {name: value for name, value in values.items() if name not in refused}, refused


class _Broken:
    """Replaces an object that could not be rebuilt; calling it raises the same error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error


def _guarded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap an operation of the pickle machine that fills the object on top of the stack, by code of its class."""

    def guarded(self: _Salvager) -> None:
        operands = self.stack[-2:]
        try:
            load(self)
        except Exception as error:
            if self.stack and type(self.stack[-1]) is not _Broken:
                cause = next((each.error for each in operands if type(each) is _Broken), error)
                self.blame(self.stack[-1], cause)

    return guarded


class _Salvager(_Reader):  # type: ignore[misc]
    """Continues reading after an object that cannot be rebuilt."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Reader.dispatch)
    for _code in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.BUILD):
        dispatch[_code[0]] = _guarded(dispatch[_code[0]])

    def __init__(self, contents: Contents) -> None:
        contents.mapping.seek(0)
        super().__init__(contents.mapping, buffers=contents.buffers())
        self._contents = contents
        self._errors: dict[int, Exception] = {}  # by the id of the object that could not be filled
        self._kept: list[Any] = []
        self._known: list[Any] = []  # the receiver's own objects, which are whole

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._contents.call if is_ours(module, name) else super().find_class(module, name)
        except Exception as error:
            return _Broken(error)

    def persistent_load(self, token: Any) -> Any:
        try:
            known = self._contents.placed(token)
        except Exception as error:
            return _Broken(error)
        self._known.append(known)
        return known

    def blame(self, thing: Any, error: Exception) -> None:
        """Record that `thing` was made, and that a part of it is missing."""
        self._errors[id(thing)] = error
        self._kept.append(thing)

    def _call(self, function: Any, operands: list[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            cause = next((each.error for each in operands if type(each) is _Broken), error)
            if getattr(function, "__name__", "").endswith(("setstate", "_set_function_state")):
                self.blame(args[0], cause)  # it fills its first argument, and its value is thrown away
            return _Broken(cause)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        self.append(self._call(function, [function, *args], *args))

    def load_newobj(self) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        self.append(self._call(getattr(kind, "__new__", None), [kind, *args], kind, *args))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        kind = self.stack.pop()
        self.append(self._call(getattr(kind, "__new__", None), [kind, *args], kind, *args, **kwargs))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def error_in(self, value: Any) -> Exception | None:
        """Return the error of the first object that `value` leads to and that could not be rebuilt."""
        seen = set(map(id, self._known))
        waiting = [value]
        while waiting:
            thing = waiting.pop()
            if type(thing) is _Broken:
                return thing.error
            if id(thing) in self._errors:
                return self._errors[id(thing)]
            if id(thing) in seen or issubclass(type(thing), _CLOSED):
                continue
            seen.add(id(thing))
            np = sys.modules.get("numpy")
            if type(thing) is types.FunctionType:  # its globals are the notebook's
                waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
            elif np is not None and type(thing) is np.ndarray and thing.dtype.kind == "O":
                waiting += thing.ravel().tolist()
            else:
                waiting += gc.get_referents(thing)
        return None
