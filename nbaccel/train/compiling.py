"""Compiling of prepared models by ``torch.compile``. Runs in ranks; touches no device.

A program chooses it with `TorchDynamoPlugin`. `Compiling` is the choice of one run: the program's, and for what it
leaves open the launch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, ModuleList

from nbaccel.settings import RunSettings
from nbaccel.train.handlers import KwargsHandler
from nbaccel.train.models import is_compiled_module
from nbaccel.train.strategies.base import without_compile

__all__ = ["Compiling", "TorchDynamoPlugin"]

_NOTHING = ("none", "no")
_DEFAULT_MODE = "default"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``, for ``Accelerator(dynamo_plugin=…)``. None: the launch's choice.

    backend: a backend's name, such as "inductor"; None or "no" compiles nothing.
    mode, fullgraph, dynamic, options, disable: as ``torch.compile`` takes them.
    use_regional_compilation: compile blocks that a model repeats (a ``ModuleList`` of one class) instead of the whole.

    >>> TorchDynamoPlugin(backend="eager", dynamic=True).to_kwargs()
    {'backend': 'eager', 'dynamic': True}
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def settings(self) -> RunSettings:
        """Return the choices that a launch can make too."""
        return RunSettings(
            dynamo_backend=None if self.backend is None else _name(self.backend),
            dynamo_mode=self.mode,
            dynamo_use_fullgraph=self.fullgraph,
            dynamo_use_dynamic=self.dynamic,
            dynamo_use_regional_compilation=self.use_regional_compilation,
        )


@dataclass(frozen=True, slots=True)
class Compiling:
    """Compiles the models of one run, by `settings` and by the options that only `plugin` has."""

    settings: RunSettings
    plugin: TorchDynamoPlugin

    @property
    def is_on(self) -> bool:
        return (self.settings.dynamo_backend or _NOTHING[0]) not in _NOTHING

    def compiled(self, model: Module) -> Module:
        """Return `model` compiled, unless it is compiled already or nothing is to be compiled.

        With regional compilation it stays the same object, and the blocks that it repeats are compiled in place.
        """
        if not self.is_on or is_compiled_module(model):
            return model
        blocks = list(_repeated(without_compile(model))) if self.settings.dynamo_use_regional_compilation else []
        for block in blocks:
            if block._compiled_call_impl is None:
                block.compile(**self._arguments())
        if blocks:
            return model
        wrapped: Module = torch.compile(model, **self._arguments())  # type: ignore[assignment]  # a module gives one
        return wrapped

    def _arguments(self) -> dict[str, Any]:
        mode = self.settings.dynamo_mode
        return {
            "backend": self.settings.dynamo_backend,
            "mode": None if mode == _DEFAULT_MODE else mode,  # torch takes no mode, not even this, beside options
            "fullgraph": bool(self.settings.dynamo_use_fullgraph),
            "dynamic": self.settings.dynamo_use_dynamic,
            "options": self.plugin.options,
            "disable": self.plugin.disable,
        }


def _name(backend: Any) -> str:
    """Return ``torch.compile``'s name of `backend`, which Accelerate spells in capitals, in an enumeration."""
    return str(getattr(backend, "value", backend)).lower()


def _repeated(model: Module) -> Iterator[Module]:
    for module in model.modules():
        if isinstance(module, ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            yield from module
