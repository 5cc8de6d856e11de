"""What programs can call: every public name with its signature, a line each, whatever module defines it.

    python tests/public_surface.py             print it
    python tests/public_surface.py --write     add what is new to tests/public_surface.txt

A line that changes or goes is edited by hand, since programs may use it. A name that several modules show is described
once; the others name that one, and stand for the same object. Annotations are left out, and so is what is inherited
from other packages: both differ between versions of Python and torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".txt")

COMMAND = "python tests/public_surface.py --write"

MODULES = {
    "nbaccel": ["__version__", "last_run", "load_ipython_extension", "map", "runs", "unload_ipython_extension"],
    "nbaccel.accelerator": [],
    "nbaccel.data_loader": [],
    "nbaccel.errors": [],
    "nbaccel.launchers": [],
    "nbaccel.local_sgd": [],
    "nbaccel.logging": [],
    "nbaccel.memory_utils": [],
    "nbaccel.optimizer": [],
    "nbaccel.scheduler": [],
    "nbaccel.state": [],
    "nbaccel.testing": [],
    "nbaccel.tracking": [
        "AimTracker",
        "ClearMLTracker",
        "CometMLTracker",
        "DVCLiveTracker",
        "MLflowTracker",
        "SwanLabTracker",
        "TensorBoardTracker",
        "TrackioTracker",
        "WandBTracker",
    ],
    "nbaccel.utils": [],
    "nbaccel.utils.constants": [],
    "nbaccel.utils.dataclasses": [],
    "nbaccel.utils.environment": [],
    "nbaccel.utils.imports": [],
    "nbaccel.utils.memory": [],
    "nbaccel.utils.operations": [],
    "nbaccel.utils.other": [],
    "nbaccel.utils.random": [],
    "nbaccel.utils.tqdm": [],
    "nbaccel.utils.versions": [],
}
"""Modules that programs import by name, in the order in which names are described; names besides their `__all__`."""

_OBJECTS = ("Accelerator", "AcceleratorState", "PartialState")
"""Classes of `nbaccel` that are made without arguments, and whose objects have attributes that no class shows."""

_CHANGING = ("nbaccel.__version__", "nbaccel.last_run", "nbaccel.runs")

_MADE_BY_PREPARE = ("AcceleratedOptimizer", "AcceleratedScheduler", "GradientState")
"""Classes whose objects programs are given: how they are made is nobody's business."""

_SPECIAL = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__")


def surface() -> dict[str, str]:
    """Return what each public name is."""
    described: dict[int, str] = {}
    kept: list[Any] = []  # so that no other object gets the address of one that is gone
    lines: dict[str, str] = {}
    for module_name, others in MODULES.items():
        module = import_module(module_name)
        for name in sorted({*getattr(module, "__all__", ()), *others}):
            value = getattr(module, name)
            path = f"{module_name}.{name}"
            is_thing = callable(value)
            if is_thing and id(value) in described:
                lines[path] = f"= {described[id(value)]}"
                continue
            if is_thing:
                described[id(value)] = path
                kept.append(value)
            lines |= dict(_describe(path, value))
    lines |= dict(_attributes_of_objects())
    return lines


def _describe(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if path in _CHANGING:
        yield path, "a value"
    elif isinstance(value, type) and not _is_ours(value):
        yield path, f"class of {value.__module__.partition('.')[0]}"
    elif isinstance(value, type):
        yield path, "class" if path.rpartition(".")[2] in _MADE_BY_PREPARE else _class(value)
        yield from _members(path, value)
    elif callable(value):
        yield path, _signature(value)
    else:
        yield path, f"= {_Plain(value)!r}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "nbaccel"


def _class(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "enum"
    if getattr(kind, "_is_protocol", False):
        return "class"
    for maker in ("__init__", "__new__"):  # not `signature(kind)`, which a metaclass may hide
        owner = next(base for base in kind.__mro__ if maker in vars(base))
        if _is_ours(owner):
            return f"class {_signature(vars(owner)[maker])}"
    return "class"


def _members(path: str, kind: type) -> Iterator[tuple[str, str]]:
    """What a class of ours has by itself and by bases of ours."""
    if issubclass(kind, enum.Enum):
        yield from ((f"{path}.{name}", f"= {member.value!r}") for name, member in kind.__members__.items())
    found: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if _is_ours(base)]):
        found |= vars(base)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    members = kind.__members__ if issubclass(kind, enum.Enum) else {}
    for name in sorted(found.keys() | fields):
        is_public = not name.startswith("_") or (name in _SPECIAL and not issubclass(kind, enum.Enum))
        if is_public and name not in members:
            yield f"{path}.{name}", "field" if name in fields else _member(found[name])


def _member(value: Any) -> str:
    if isinstance(value, staticmethod):
        return f"static {_signature(value.__func__)}"
    if isinstance(value, classmethod):
        return f"class {_signature(value.__func__)}"
    if isinstance(value, property):
        return "property" if value.fset is None else "property, settable"
    if callable(value) and not isinstance(value, type):
        return _signature(value)
    return "attribute"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(?)"
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.default if parameter.default is inspect.Parameter.empty else _Plain(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Plain:
    """A value whose `repr` has no address and no name that may change."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return repr(value)
        if type(value) in (tuple, list):
            inside = ", ".join(repr(_Plain(item)) for item in value)
            return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
        if type(value) is dict:
            return "{" + ", ".join(f"{key!r}: {_Plain(item)!r}" for key, item in value.items()) + "}"
        return "<factory>" if repr(value) == "<factory>" else "<object>"


def _attributes_of_objects() -> Iterator[tuple[str, str]]:
    nbaccel = import_module("nbaccel")
    for name in _OBJECTS:
        kind = getattr(nbaccel, name)
        thing = kind(cpu=True)
        for attribute in sorted(vars(thing)):
            if not attribute.startswith("_") and not hasattr(kind, attribute):
                yield f"nbaccel.{name}.{attribute}", "attribute of objects"


def read() -> dict[str, str]:
    """Return what is frozen."""
    if not FILE.exists():
        return {}
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {path: what for path, _, what in (line.partition(" ") for line in lines)}


def as_text(lines: dict[str, str]) -> str:
    return "".join(f"{path} {what}\n" for path, what in lines.items())


def main() -> int:
    parser = argparse.ArgumentParser(description="The public surface of nbaccel.")
    parser.add_argument("--write", action="store_true", help=f"add what is new to {FILE.name}")
    now, frozen = surface(), read()
    if not parser.parse_args().write:
        print(as_text(now), end="")
        return 0
    changed = {path: what for path, what in frozen.items() if now.get(path) != what}
    FILE.write_text(as_text({path: frozen.get(path, what) for path, what in now.items()} | changed), encoding="utf-8")
    print(f"{FILE.name}: {len(now.keys() - frozen.keys())} lines added")
    for path, what in changed.items():
        print(f"left as it was: {path} {what} (now: {now.get(path, 'gone')})", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # instead of the tests, whose folder `launch` and others would hide modules
    sys.exit(main())
