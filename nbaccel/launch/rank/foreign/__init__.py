"""Foreign trainers: Hugging Face's `Trainer` and Lightning's report to the panel, and stop when it asks. In ranks.

Nothing is imported here that the program does not import: a trainer's class is met when its module is loaded, or
has been in the kernel. Its training method then adds a callback of ours to the trainer first, through the trainer's
own list of callbacks. Where a version of theirs does not fit, the program runs as it would without us.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from nbaccel.launch.rank.foreign import lightning, transformers

__all__ = ["attach_to_foreign_trainers"]

_AddCallback = Callable[[Any], None]

_TRAINERS: Mapping[str, tuple[str, _AddCallback]] = {
    "transformers.trainer": ("train", transformers.add_callback),
    "lightning.pytorch.trainer.trainer": ("fit", lightning.add_callback),
    "pytorch_lightning.trainer.trainer": ("fit", lightning.add_callback),
}
"""Modules that define a class `Trainer`: the method that trains, and what to do to a trainer first."""


def attach_to_foreign_trainers() -> None:
    """Let the trainers that this process uses, now or later, report. Once per process."""
    for name in _TRAINERS:
        if name in sys.modules:
            _attach(sys.modules[name])
    sys.meta_path.insert(0, _Finder({name for name in _TRAINERS if name not in sys.modules}))


def _attach(module: ModuleType) -> None:
    method, add_callback = _TRAINERS[module.__name__]
    trains = getattr(module.Trainer, method)

    @functools.wraps(trains)
    def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # a version that is other than we know it: it trains, and tells us nothing
            add_callback(trainer)
        return trains(trainer, *args, **kwargs)

    setattr(module.Trainer, method, with_callback)


class _Finder(MetaPathFinder):
    """Finds what everybody else finds, and attaches to it when it has been loaded."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.remove(name)  # the search below comes by here again
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Another loader, and something to do after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        with suppress(Exception):  # see above
            _attach(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
