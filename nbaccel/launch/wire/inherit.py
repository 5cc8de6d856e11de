"""KernelState: state that a forked rank inherits and a rank of the zygote must be given. Captured in the kernel.

Code has to behave alike after a fork and in a rank of the zygote, so everything here that a fork would copy is sent
explicitly. `tests/launch/test_parity.py` runs one program under both and compares.
"""

from __future__ import annotations

import functools
import linecache
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.launch.wire.torch_flags import TorchFlags

__all__ = ["KernelState", "Surroundings"]

_WhenLoaded = Callable[[Mapping[str, Callable[[Any], None]]], None]

_EVERYWHERE = sys.stdlib_module_names | {"builtins", "__main__", "torch", "numpy"}
"""Packages whose categories of warnings are sent as they are."""

_CELL_FILES = ("ipykernel_", "<ipython-input-", "Cell In[")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The path, directory and environment of the kernel, in plain text: needed before anything can be unpickled."""

    sys_path: list[str]
    cwd: str
    environ: dict[str, str]

    @classmethod
    def capture(cls) -> Surroundings:
        return cls(list(sys.path), os.getcwd(), dict(os.environ))

    def apply(self) -> None:
        sys.path[:] = self.sys_path
        os.chdir(self.cwd)
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        os.environ.update(self.environ)


@dataclass(frozen=True, slots=True)
class KernelState:
    """Random number generators, torch flags, warning filters and the source of the notebook's cells.

    start_method: that of multiprocessing, if one has been chosen or used.
    """

    python_rng: Any
    numpy_rng: Any = None
    torch_rng: bytes | None = None
    torch_flags: TorchFlags = field(default_factory=TorchFlags)
    warning_filters: list[Any] = field(default_factory=list)
    sources: dict[str, list[str]] = field(default_factory=dict)
    start_method: str | None = None

    @classmethod
    def capture(cls) -> KernelState:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        return cls(
            python_rng=random.getstate(),
            numpy_rng=numpy.random.get_state() if numpy else None,
            torch_rng=bytes(torch.random.get_rng_state().numpy()) if torch else None,
            torch_flags=TorchFlags.capture(),
            warning_filters=[_without_its_package(one) for one in warnings.filters],
            sources=_cell_sources(),
            start_method=multiprocessing.get_start_method(allow_none=True),
        )

    def apply(self, when_loaded: _WhenLoaded) -> None:
        """Apply the state.  when_loaded: calls a function with each named module, now or when it is imported."""
        random.setstate(self.python_rng)
        filters: list[Any] = []
        later: dict[str, list[Any]] = {}
        for one in self.warning_filters:
            home = one[2].partition(":")[0] if isinstance(one[2], str) else ""
            if home and home not in sys.modules:
                later.setdefault(home, []).append(one)
            else:
                filters += [one] if not home else _with_its_category(one, sys.modules[home])
        warnings.filters[:] = filters  # type: ignore[index]  # typeshed: a Sequence; CPython: a list
        _forget_shown_warnings()
        when_loaded({name: functools.partial(_add_filters, filters) for name, filters in later.items()})
        if self.start_method is not None:
            multiprocessing.set_start_method(self.start_method, force=True)
        linecache.cache.update({name: (0, None, lines, name) for name, lines in self.sources.items()})
        if self.numpy_rng is not None:
            import numpy

            numpy.random.set_state(self.numpy_rng)
        if self.torch_rng is not None:
            import torch

            torch.random.set_rng_state(torch.frombuffer(bytearray(self.torch_rng), dtype=torch.uint8))
        self.torch_flags.apply()


def _without_its_package(one: Any) -> Any:
    """Return a warning filter, with "module:name" for a category of a package that not every process has loaded.

    The class itself would make each rank import the package: transformers and Lightning take seconds.
    """
    action, message, category, module, line = one
    home = category.__module__
    if home.partition(".")[0] in _EVERYWHERE:
        return one
    return action, message, f"{home}:{category.__qualname__}", module, line


def _with_its_category(one: Any, package: Any) -> list[Any]:
    """Return the filter `one` with the class of `package` for its category; an empty list if there is none."""
    action, message, category, module, line = one
    try:
        kind = functools.reduce(getattr, category.partition(":")[2].split("."), package)
    except AttributeError:  # another version
        return []
    return [(action, message, kind, module, line)]


def _add_filters(filters: list[Any], package: Any) -> None:
    """Put `filters`, whose categories are of `package`, before all others, in their order."""
    added = [each for one in filters for each in _with_its_category(one, package)]
    warnings.filters[:0] = added  # type: ignore[index]
    _forget_shown_warnings()


def _forget_shown_warnings() -> None:
    """Make the present filters judge every warning again."""
    if hasattr(warnings, "_filters_mutated"):
        warnings._filters_mutated()


def _cell_sources() -> dict[str, list[str]]:
    """Return the lines of every cell that has run, by the file name it was compiled under."""
    kept = getattr(linecache, "_ipython_cache", {})  # IPython 7 restores them from here whenever linecache drops them
    entries = {**kept, **linecache.cache}
    return {
        name: entry[2]
        for name, entry in entries.items()
        if len(entry) > 2 and any(part in name for part in _CELL_FILES)
    }
