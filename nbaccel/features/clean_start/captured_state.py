"""State of the kernel that a forked rank inherits and a rank of the zygote must be given. Used in the kernel and ranks.

The kernel captures the state, and ranks apply it: random generators, torch's switches, filters of warnings, the path,
directory and environment, the source of the notebook's cells. Code has to behave alike after a fork and in a rank of
the zygote, so everything here that a fork would copy is sent explicitly. `tests/launching/test_parity.py` runs one
program under both and compares.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.features.clean_start.torch_flags import TorchFlags
from nbaccel.launching.ipc.kernel_state import cell_sources, take_cell_sources

__all__ = ["Arithmetic", "KernelState", "Surroundings"]

_WhenLoaded = Callable[[Mapping[str, Callable[[Any], None]]], None]

_EVERYWHERE = sys.stdlib_module_names | {"builtins", "__main__", "torch", "numpy"}
"""Packages whose categories of warnings are sent as they are."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The precision and the traps of `decimal`, and how NumPy treats divisions by zero and prints; None if not loaded.

    A fork has them as context variables.
    """

    decimal: Any = None
    numpy_errors: Mapping[str, Any] | None = None
    numpy_print_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> Arithmetic:
        decimal, numpy = sys.modules.get("decimal"), sys.modules.get("numpy")
        options = numpy.get_printoptions() if numpy else {}
        return cls(
            decimal.getcontext().copy() if decimal else None,
            numpy.geterr() if numpy else None,
            {name: value for name, value in options.items() if type(value) in (bool, int, float, str)},
        )

    def apply(self) -> None:
        if self.decimal is not None:
            import decimal

            decimal.setcontext(self.decimal)
        if self.numpy_errors is not None:
            import numpy

            numpy.seterr(**self.numpy_errors)
            numpy.set_printoptions(**self.numpy_print_options)


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
        """Apply the path and the environment, then the directory.

        Raises:
            OSError: The directory is gone.
        """
        sys.path[:] = self.sys_path
        present = dict(os.environ)
        for name in present.keys() - self.environ.keys():
            del os.environ[name]
        for name, value in self.environ.items():
            if present.get(name) != value:
                os.environ[name] = value
        os.chdir(self.cwd)


@dataclass(frozen=True, slots=True)
class KernelState:
    """Random number generators, torch flags, warning filters and the source of the notebook's cells.

    Args:
        start_method: That of multiprocessing, if one has been chosen or used.
    """

    python_rng: Any
    numpy_rng: Any = None
    torch_rng: bytes | None = None
    torch_flags: TorchFlags = field(default_factory=TorchFlags)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
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
            arithmetic=Arithmetic.capture(),
            warning_filters=[_in_text(one) for one in warnings.filters],
            sources=cell_sources(),
            start_method=multiprocessing.get_start_method(allow_none=True),
        )

    def apply(self, when_loaded: _WhenLoaded) -> None:
        """Apply the state.

        Args:
            when_loaded: Calls a function with each named module, now or when it is imported.
        """
        random.setstate(self.python_rng)
        filters: list[Any] = []
        later: dict[str, list[Any]] = {}
        parts: list[Any] = [part for one in warnings.filters for part in one]
        patterns = {(part.pattern, part.flags): part for part in parts if type(part) is re.Pattern}
        for one in (_with_its_patterns(each, patterns) for each in self.warning_filters):
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
        take_cell_sources(self.sources)
        if self.numpy_rng is not None:
            import numpy

            numpy.random.set_state(self.numpy_rng)
        if self.torch_rng is not None:
            import torch

            torch.random.set_rng_state(torch.frombuffer(bytearray(self.torch_rng), dtype=torch.uint8))
        self.torch_flags.apply()
        self.arithmetic.apply()


def _in_text(one: Any) -> Any:
    """Return a warning filter, with text and flags for each regular expression.

    A category of a package that not every process has loaded becomes "module:name". The class itself would make each
    rank import the package: transformers and Lightning take seconds.
    """
    action, message, category, module, line = map(_pattern_in_text, one)
    home = category.__module__
    if home.partition(".")[0] not in _EVERYWHERE:
        category = f"{home}:{category.__qualname__}"
    return action, message, category, module, line


def _pattern_in_text(part: Any) -> Any:
    return (part.pattern, part.flags) if type(part) is re.Pattern else part


def _with_its_patterns(one: Any, patterns: Mapping[tuple[str, int], re.Pattern[str]]) -> Any:
    """Return a filter from `_in_text` with regular expressions; those of `patterns` need not be compiled again.

    Torch and NumPy have filters in every process, and a rank takes half a millisecond to compile the patterns of those.
    """
    return tuple((patterns.get(part) or re.compile(*part)) if type(part) is tuple else part for part in one)


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
