"""Patches: finds patches of torch by the notebook's packages and cells in the kernel, and applies them in ranks.

A forked rank has them. A rank of the zygote imports only the packages whose names its task reads: a package that
changed torch when it was imported (a method of `Module`, a function of `torch.cuda`) would be missing there without a
message. Importing everything that the notebook has costs seconds, so only packages are imported whose functions or
classes are in torch: in the order of the notebook, before the task is unpacked; or, if they are functions of modules,
when one is called first. Changes by a cell, and packages whose import has not applied their patches again, are named in
one line.

An addition by a package, where torch itself has nothing, is left to that package: transformers adds with every model
that it makes.

Not seen: functions of C, `functools.partial`, values that are no functions, modules of torch's with an underscore, and
patches of other packages than torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from nbaccel.base.world import World

__all__ = [
    "Patch",
    "PatchFinder",
    "Patches",
]

_TORCH = "torch"
_CELLS = "__main__"
_USED_BY_TORCH = {"sympy", "tqdm", "typing_extensions"}
_PATCH_NOTHING = sys.stdlib_module_names | {_TORCH, "builtins", "nbaccel", "numpy", "IPython"} | _USED_BY_TORCH
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Patch:
    """A function or class of `package` in torch; "__main__" is a cell of the notebook.

    Args:
        module: A module of torch.
        kind: The class in it, if it is in one.
        name: The name of the attribute.
        is_function: It is a function of the module.
    """

    package: str
    module: str
    kind: str
    name: str
    is_function: bool

    def __str__(self) -> str:
        return ".".join(filter(None, [self.module, self.kind, self.name]))

    @property
    def adds(self) -> bool:
        """Return whether torch has nothing there: its own code cannot miss it, and its maker adds it when it runs."""
        module = sys.modules.get(self.module)
        holder = module if module is None or not self.kind else vars(module).get(self.kind)
        return self.package != _CELLS and holder is not None and not hasattr(holder, self.name)

    @property
    def is_made(self) -> bool:
        """Return whether this process has the patch, or has no such module."""
        module = sys.modules.get(self.module)
        if module is None:
            return True
        holder = vars(module).get(self.kind) if self.kind else module
        return holder is not None and _package_of(vars(holder).get(self.name)) in (self.package, "nbaccel")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A namespace at the time when it was searched."""

    values: list[Any]
    patches: list[Patch] = field(default_factory=list)
    classes: dict[str, Any] = field(default_factory=dict)


class PatchFinder:
    """Finds what other code has put into torch in this process. Fast if nothing has changed since the last search."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Seen] = {}

    def find(self) -> Patches:
        found: list[Patch] = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == _TORCH and "._" not in name and issubclass(type(module), ModuleType):
                seen = self._look(name, "", vars(module))
                found += seen.patches
                for kind, one in seen.classes.items():
                    found += self._look(name, kind, vars(one)).patches
        order = [name for name in list(sys.modules) if "." not in name and name not in _PATCH_NOTHING]
        return Patches(found, order)

    def _look(self, module: str, kind: str, namespace: Mapping[str, Any]) -> _Seen:
        values = list(namespace.values())
        before = self._seen.get((module, kind))
        if before is not None and len(values) == len(before.values) and all(map(is_, values, before.values)):
            return before
        seen = self._seen[module, kind] = _Seen(values)
        for name, value in list(namespace.items()):
            package = _package_of(value)
            if package is not None and package not in _PATCH_NOTHING and package in sys.modules:
                is_function = not kind and issubclass(type(value), FunctionType)
                seen.patches.append(Patch(package, module, kind, name, is_function))
            elif not kind and issubclass(type(value), type) and vars(value).get("__module__") == module:
                seen.classes[name] = value
        return seen


@dataclass(frozen=True, slots=True)
class Patches:
    """Patches of the kernel, and its packages.

    Args:
        found: The patches.
        order: The packages, as they were imported.
    """

    found: list[Patch]
    order: list[str]

    def make(self, packages: Iterable[str]) -> None:
        """Import the packages that made the patches, and `packages`, in the order of the kernel. Runs in ranks.

        Names that torch itself imports are in torch, too; ranks have those already.
        """
        missing = [patch for patch in self.found if not (patch.package == _CELLS or patch.is_made or patch.adds)]
        at_once = {patch.package for patch in missing if not (patch.is_function and _has(patch))}
        place = {name: at for at, name in enumerate(self.order)}
        for name in sorted({*packages, *at_once}, key=lambda name: place.get(name, -1)):
            with suppress(Exception):  # if it is needed, the pickle raises a better error
                importlib.import_module(name)
        late = [patch for patch in missing if patch.package not in sys.modules and patch.is_function and _has(patch)]
        for patch in late:
            _make_when_called(patch, late)
        self._say_what_is_missing(late)

    def _say_what_is_missing(self, late: Collection[Patch]) -> None:
        made = {patch.package for patch in self.found if patch.is_made and patch.package != _CELLS}
        absent = [
            patch for patch in self.found if not (patch in late or patch.package in made or patch.is_made or patch.adds)
        ]
        if absent and World.from_env().is_main_process:
            names = ", ".join(map(str, absent[:_SHOWN])) + (", ..." if len(absent) > _SHOWN else "")
            makers = sorted({"a cell" if patch.package == _CELLS else patch.package for patch in absent})
            print(
                f"{names}: changed in the notebook by {' and '.join(makers)}, and torch's own in ranks, which here "
                "start from a clean process. The lines that change it have to be in this cell.",
                file=sys.stderr,
            )


def _has(patch: Patch) -> bool:
    """Return whether torch has its own function there."""
    return patch.name in vars(sys.modules[patch.module])


def _make_when_called(patch: Patch, late: Iterable[Patch]) -> None:
    """Make torch's own function import the package first, which then replaces the function."""
    module = sys.modules[patch.module]
    original = vars(module)[patch.name]

    @functools.wraps(original)
    def imports_first(*args: Any, **kwargs: Any) -> Any:
        if patch.package in sys.modules:  # the program has imported it, and its replacement calls this
            return original(*args, **kwargs)
        for other in late:
            if other.package == patch.package:
                _take_back(other)
        with suppress(Exception):
            importlib.import_module(patch.package)
        return getattr(module, patch.name)(*args, **kwargs)

    imports_first.__dict__[_TORCHS_OWN] = original
    setattr(module, patch.name, imports_first)


_TORCHS_OWN = "_nbaccel_original"


def _take_back(patch: Patch) -> None:
    module = sys.modules[patch.module]
    now = vars(module).get(patch.name)
    if _TORCHS_OWN in getattr(now, "__dict__", ()):
        setattr(module, patch.name, vars(now)[_TORCHS_OWN])


def _package_of(value: Any) -> str | None:
    """Return the package whose code a function or class is; None for anything else."""
    kind = type(value)
    if issubclass(kind, (staticmethod, classmethod)):
        value = value.__func__
    elif issubclass(kind, property):
        value = value.fget
    if issubclass(type(value), FunctionType):
        home = value.__globals__.get("__name__")
    elif issubclass(type(value), type):
        home = vars(value).get("__module__")
    else:
        return None
    return home.partition(".")[0] if isinstance(home, str) else None
