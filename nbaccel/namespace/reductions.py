"""Reduce objects that cloudpickle would refuse, copy or spoil. Runs in the kernel and in ranks.

A reduction is what `__reduce__` returns: a function and its arguments, by which the receiver makes the object. Here are
those that send a prepared object as the user wrote it, and those of libraries, the standard one among them. Libraries
are known by the loaded modules, so none is imported here before an object of it arrives. It packs nothing: `pickling`,
which does, has the reductions that need the memory of a payload.
"""

from __future__ import annotations

import copy
import copyreg
import enum
import functools
import importlib
import mmap
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle

from nbaccel.base.quantised import TrainedTensors, base_of, trained_state
from nbaccel.namespace.wrappers import is_made_anew, is_put_there, itself, plain, reduce_accelerate, users_class

__all__ = [
    "attributes_of_tensor",
    "globals_of_module",
    "module_of_maker",
    "reduce_of_a_library",
    "reduce_to_what_was_written",
    "with_slots",
]


def attributes_of_tensor(tensor: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the attributes of a tensor, and the rest of its reduction for those that are weak references to itself.

    Pyro puts one on each of its parameters; it is made anew when the tensor is there.
    """
    own: dict[str, Any] = vars(tensor)
    weak = [name for name, value in own.items() if type(value) is weakref.ref and value() is tensor]
    if not weak:
        return own, ()
    return {name: value for name, value in own.items() if name not in weak}, (weak, None, None, _refer_to_itself)


def _refer_to_itself(tensor: Any, names: list[str]) -> None:
    vars(tensor).update((name, weakref.ref(tensor)) for name in names)


def reduce_to_what_was_written(obj: Any) -> Any:
    """Reduce a prepared or parallel object to the wrapped one, and a model without what `prepare` has added."""
    inner = plain(obj)
    if inner is not obj:
        return itself, (inner,)
    if is_made_anew(obj):
        return obj.__nbaccel_anew__()
    if reduced := reduce_accelerate(obj):
        return reduced
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is torch.utils.hooks.RemovableHandle and _leads_to_ours(obj):
        return _handle_of_no_hook, (obj.id,)
    if torch is None or not issubclass(type(obj), torch.nn.Module):
        return None
    if base := _base_of(obj):
        return TrainedTensors, (type(obj).__name__, trained_state(obj, obj.state_dict(keep_vars=True), base))
    kind, own = type(obj), users_class(type(obj))
    put_there = [name for name, value in vars(obj).items() if is_put_there(name, value)]
    hooks = _hooks_put_there(obj)
    if not put_there and not hooks and kind is own:
        return None
    match obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL):
        case (make, args, dict(state), *rest):
            left = {name: _without(value, hooks) for name, value in state.items() if name not in put_there}
            return *_made_as(own, kind, make, args), left, *rest
        case (make, args, *rest) if kind is not own:
            return *_made_as(own, kind, make, args), *rest
    return None  # the user's own __reduce__ or __getstate__ takes precedence


def _leads_to_ours(handle: Any) -> bool:
    """Return whether hooks of ours are in the table of a hook's handle, with which all that they know would travel."""
    hooks = (handle.hooks_dict_ref() or {}).values()
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] == "nbaccel" for hook in hooks)


def _handle_of_no_hook(number: int) -> Any:
    """Return the handle of a hook that is gone: its table is one of a process, or of a tensor's, and stays there."""
    kind = sys.modules["torch"].utils.hooks.RemovableHandle
    handle: Any = kind.__new__(kind)
    handle.__setstate__((None, number))
    return handle


def _base_of(module: Any) -> frozenset[str]:
    """Return the names of the base of a quantised model; empty for any other module.

    A module inside of such a model is never asked: of the model only the trained tensors are sent.
    """
    try:
        return base_of(module)
    except Exception:  # a class of the user's, or one whose __init__ was not called
        return frozenset()


def _made_as(own: type, kind: type, make: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a function and its arguments that make an object of the class `own` where these make one of `kind`."""
    if own is kind:
        return make, args
    # The pickler knows these two functions, and accepts no other class than the object's.
    make = _NEW.get(make.__name__, make) if make.__module__ == "copyreg" else make
    return make, tuple(own if each is kind else each for each in args)


def _new(kind: type, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _new_by_keywords(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kind.__new__(kind, *args, **kwargs)


_NEW: dict[str, Callable[..., Any]] = {"__newobj__": _new, "__newobj_ex__": _new_by_keywords}


def _hooks_put_there(module: Any) -> set[int]:
    """Return the numbers of a module's hooks that are not the user's; torch gives each number once."""
    tables = (
        table for name, table in vars(module).items() if name.endswith("_hooks") and issubclass(type(table), dict)
    )
    return {number for table in tables for number, hook in table.items() if is_put_there(number, hook)}


def _without(value: Any, hooks: set[int]) -> Any:
    """Return an attribute of a module; of a table of hooks, or of facts about hooks, a copy without `hooks`."""
    if not hooks or not issubclass(type(value), dict) or hooks.isdisjoint(value):
        return value
    return type(value)((number, hook) for number, hook in value.items() if number not in hooks)


def reduce_of_a_library(obj: Any) -> Any:
    """Reduce an object of a library that cloudpickle would refuse, copy or spoil; return None for any other."""
    if type(obj) is functools.cached_property:  # holds a lock before Python 3.12
        return _cached_property, (obj.func, obj.attrname)
    if type(obj) is types.CodeType:
        return _code_of_file, (obj.co_filename, *cloudpickle.Pickler.dispatch_table[types.CodeType](obj))
    for name in ("stdin", "stdout", "stderr"):
        if obj is getattr(sys, name):
            return getattr, (sys, name)
    if issubclass(type(obj), types.ModuleType) and type(obj) is not types.ModuleType:
        return _reduce_odd_module(obj)
    if reduced := _reduce_keras(obj):
        return reduced
    return _reduce_shell(obj) or _reduce_loader(obj) or _reduce_scheduler(obj) or _reduce_memory_map(obj)


def _reduce_keras(obj: Any) -> Any:
    """Reduce objects of a Keras model: a loss, metrics, an optimizer, and the containers that hold them.

    By themselves the former pickle as an archive of their configuration: some raise, and an optimizer loses its
    moments. The containers ask for attributes before they have them.
    """
    kind = type(obj)
    names = [base.__name__ for base in kind.__mro__ if str(base.__module__).startswith("keras.")]
    if not names:
        return None
    if "KerasSaveable" in names and "Layer" not in names:
        return copyreg.__newobj__, (kind,), vars(obj)  # type: ignore[attr-defined]
    if names[0] in ("TrackedList", "TrackedDict", "TrackedSet"):
        plain_kind = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        return kind, (plain_kind(obj),), vars(obj)
    return None


def _reduce_odd_module(module: types.ModuleType) -> Any:
    """Reduce a module with its own class (`torch.backends.cudnn`) by identity: its name may not lead to it."""
    name = next((name for name, known in list(sys.modules.items()) if known is module), None)
    return None if name is None else (importlib.import_module, (name,))


def _reduce_shell(obj: Any) -> Any:
    """Reduce the notebook's IPython shell: in the receiver it is the rank's.

    Objects bound to it (`get_ipython`) follow.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or shell is None or obj is not shell:
        return None
    return ipython.get_ipython, ()


def _reduce_loader(obj: Any) -> Any:
    """Reduce a loader without the iterator that it keeps for persistent workers: these belong to this process."""
    loaders = sys.modules.get("torch.utils.data.dataloader")
    if loaders is None or not issubclass(type(obj), loaders.DataLoader) or vars(obj).get("_iterator") is None:
        return None
    alone = copy.copy(obj)
    alone._iterator = None
    return itself, (alone,)


def _reduce_scheduler(obj: Any) -> Any:
    """Reduce a scheduler with its optimizer's method that counts steps: torch warns if a pickle has dropped it."""
    schedulers = sys.modules.get("torch.optim.lr_scheduler")
    if schedulers is None or not issubclass(type(obj), schedulers.LRScheduler) or hasattr(type(obj), "__setstate__"):
        return None
    if not hasattr(getattr(vars(obj).get("optimizer"), "step", None), _COUNTED):
        return None
    match obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL):
        case (make, args, dict(state), None, None):
            return make, args, state, None, None, _set_scheduler_state
    return None


def _set_scheduler_state(scheduler: Any, state: dict[str, Any]) -> None:
    """Complete a scheduler, and make its optimizer record that it has stepped, as the scheduler's constructor does."""
    vars(scheduler).update(state)
    optimizer = scheduler.optimizer
    if hasattr(optimizer.step, _COUNTED):
        return
    steps, known = optimizer.step.__func__, weakref.ref(optimizer)

    @functools.wraps(steps)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner: Any = known()
        owner._opt_called = True
        return steps(owner, *args, **kwargs)

    setattr(step, _COUNTED, True)
    optimizer.step = step


_COUNTED = "_wrapped_by_lr_sched"
"""Torch's mark on the `step` of an optimizer that a scheduler watches (torch/optim/lr_scheduler.py)."""


def _reduce_memory_map(obj: Any) -> Any:
    """Reduce a memory map to the name of its file, and its place there."""
    np = sys.modules.get("numpy")
    if np is None or type(obj) is not np.memmap or not isinstance(obj.base, mmap.mmap) or obj.filename is None:
        return None
    return _map_file, (obj.filename, obj.dtype, obj.mode, obj.offset, obj.shape, obj.flags.f_contiguous)


def _map_file(filename: Any, dtype: Any, mode: str, offset: int, shape: tuple[int, ...], is_fortran: bool) -> Any:
    """Open a memory map again; "w+" would empty the file again."""
    import numpy as np

    order: Any = "F" if is_fortran else "C"
    return np.memmap(filename, dtype, "r+" if mode == "w+" else mode, offset, shape, order)  # type: ignore[call-overload]


def _cached_property(function: Any, name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(type(made), name)
    return made


def _code_of_file(filename: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    """Make code that keeps the name of its cell, which tracebacks show: cloudpickle 3.1.3 leaves it out."""
    return make(*args).replace(co_filename=filename)


def with_slots(kind: type, reduced: Any) -> Any:
    """Reduce a class of the notebook with its own slots: cloudpickle would give its objects a dictionary."""
    match reduced:
        case (make, (meta, name, bases, dict(body), *of_skeleton), (dict(state), extra), *how) if (
            "__slots__" in state and not issubclass(meta, enum.EnumMeta)
        ):
            own = {key: value for key, value in state.items() if type(value) is not types.MemberDescriptorType}
            body |= {"__slots__": own.pop("__slots__")}
            return make, (meta, name, bases, body, *of_skeleton), (own, extra), *how
    return reduced


def module_of_maker(obj: Any) -> str | None:
    """Return the installed module in which a function was made by another function of it; None for anything else.

    The code of such a function is sent. In the receiver it reads that process's module: cloudpickle would send copies
    of the values, and the function would share them with no other code.
    """
    if not issubclass(type(obj), types.FunctionType) or obj.__module__ == "__main__":
        return None
    module = sys.modules.get(obj.__module__)  # an entry may be anything
    if getattr(module, "__dict__", None) is not obj.__globals__ or getattr(module, "__spec__", None) is None:
        return None
    return str(obj.__module__)


def globals_of_module(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))
