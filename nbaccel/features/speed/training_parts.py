"""Changes applied to the loaders, the model and the optimizers of a training, and what these are. Runs in ranks.

Objects that the notebook has are changed in place, in the rank's copy of them, wherever the program refers to them;
those that the program makes are changed as they are made.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from nbaccel.base.notices import PACKAGE_DIR
from nbaccel.base.quantities import length_or_none
from nbaccel.features.check.dry_run.function_hooks import FunctionHooks
from nbaccel.features.source.users_functions import objects_of_process
from nbaccel.features.speed.changes import SpeedChange

__all__ = ["TrainingParts"]

_LOOKS = 8
"""Batches after which it is known whether their data set draws random numbers."""

_CONVOLUTION = "Conv2d"
_PREPARED = "PreparedOptimizer"


class TrainingParts:
    """Applies a change from `begin` to `end`, and describes the parts that train.

    Args:
        namespace: The program's.

    Attributes:
        loader_s: Seconds that the program waited for batches.
        draws: The data set draws random numbers in this process.
    """

    def __init__(self, change: SpeedChange, namespace: Mapping[str, Any]) -> None:
        self._change = change
        self._namespace = namespace
        self._replaced = FunctionHooks()
        self._made_at: dict[int, tuple[str, int]] = {}  # of objects that the program makes
        self._names: dict[int, str] = {}  # of objects that the notebook has
        self._changed: set[int] = set()
        self._loader: Any = None  # the one that was iterated last
        self._trains_from: Any = None
        self._optimizers: dict[int, Any] = {}
        self._model: Any = None
        self._frames = 0  # that were compiled before the model was called
        self._looks = 0
        self._is_reading = False
        self.loader_s = 0.0
        self.draws = False

    def begin(self) -> None:
        """Change what the notebook has, and what the program makes from now on."""
        import torch
        from torch.utils.data import DataLoader
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        kinds = (DataLoader, torch.optim.Optimizer, torch.nn.Module)
        for name, value in self._namespace.items():
            if issubclass(type(value), kinds) and not name.startswith("_"):
                self._names[id(value)] = name
        if self._change.threads:
            torch.set_num_threads(self._change.threads)
        self._notice(DataLoader, self._change_loader)
        self._notice(torch.optim.Optimizer, lambda optimizer: None)  # its groups follow
        self._replaced.wrap(_BaseDataLoaderIter, "__init__", self._begin_pass)
        self._replaced.wrap(_BaseDataLoaderIter, "__next__", self._read)
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            self._replaced.wrap(fetcher, "fetch", self._fetch)
        for each in objects_of_process():
            kind = type(each)  # not `isinstance`, which asks some objects for more than they can answer
            if issubclass(kind, DataLoader):
                with suppress(AttributeError):  # its __init__ was not called
                    self._change_loader(each)

    def end(self) -> None:
        """Take the hooks away."""
        self._replaced.undo()

    def note_model(self, model: Any) -> bool:
        """Change the training's model before its first call; return whether hooks may count its samples."""
        import torch

        self._model = model
        if self._change.channels_last:
            model.to(memory_format=torch.channels_last)
        if self._change.compiles:
            self._frames = _compiled_frames()
            model.compile()
        return not self._change.compiles

    def note_step(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped: it trains, on batches of the loader that was iterated last."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        self._trains_from = self._trains_from or self._loader
        if self._change.optimizer:
            change_optimizer(optimizer, self._change.optimizer)

    # --- loaders

    def _notice(self, kind: Any, change: Callable[[Any], None]) -> None:
        """Keep where the program makes objects of a class, and change them."""
        real = kind.__init__

        @functools.wraps(real)
        def made(new: Any, *args: Any, **kwargs: Any) -> None:
            real(new, *args, **kwargs)
            frame = _maker()
            if frame is not None:
                self._made_at[id(new)] = frame.f_code.co_filename, frame.f_lineno
                change(new)

        self._replaced.put(kind, "__init__", made)

    def _change_loader(self, loader: Any) -> None:
        if id(loader) in self._changed or type(loader).__module__.startswith("nbaccel."):
            return
        self._changed.add(id(loader))
        change_loader(loader, self._change)

    def _begin_pass(self, real: Callable[..., Any], iterator: Any, loader: Any, *args: Any) -> None:
        real(iterator, loader, *args)
        self._loader = loader

    def _read(self, real: Callable[..., Any], iterator: Any) -> Any:
        if self._is_reading:  # within the batch of another loader
            return real(iterator)
        self._is_reading = True
        began = time.perf_counter()
        try:
            return real(iterator)
        finally:
            self._is_reading = False
            self.loader_s += time.perf_counter() - began

    def _fetch(self, real: Callable[..., Any], *args: Any) -> Any:
        if self.draws or self._looks >= _LOOKS:
            return real(*args)
        self._looks += 1
        states = _states()
        try:
            return real(*args)
        finally:
            self.draws |= states != _states()

    # --- facts

    def facts(self) -> dict[str, Any]:
        """Return what the parts are, for the kernel: plain values."""
        loader = self._of_the_program(self._trains_from)
        found: dict[str, Any] = {"draws": self.draws, "loader_s": self.loader_s, "is_prepared": _has_prepared()}
        found["compiles_nothing"] = self._change.compiles and _compiled_frames() == self._frames
        if loader is not None:
            found["loader"] = {
                **self._place(loader),
                "num_workers": loader.num_workers,
                "batch_size": loader.batch_size,
                "can_grow": is_batched_by_torch(loader),
                "pin_memory": bool(loader.pin_memory),
                "persistent_workers": bool(loader.persistent_workers),
                "prefetch_factor": loader.prefetch_factor,
                "samples": length_or_none(loader.dataset),
            }
        if self._optimizers:
            optimizer = next(iter(self._optimizers.values()))
            group = optimizer.param_groups[0]
            found["optimizer"] = {
                **self._place(optimizer),
                "kind": type(optimizer).__name__,
                "is_of_torch": type(optimizer).__module__.startswith("torch."),
                "can_fuse": "fused" in group,
                "fused": bool(group.get("fused")),
                "tensors": sum(len(group["params"]) for group in optimizer.param_groups),
            }
        if self._model is not None:
            parts = [type(part).__name__ for part in self._model.modules()]
            found["model"] = {
                **self._place(self._model),
                "kind": type(self._model).__name__,
                "has_convolutions": _CONVOLUTION in parts,
                "is_random": any("Dropout" in part for part in parts),
                "is_compiled": self._model._compiled_call_impl is not None or "OptimizedModule" in parts,
            }
        return found

    def _of_the_program(self, loader: Any) -> Any:
        """Return the loader of the program's that a prepared one, or one that reads for it, stands for."""
        if loader is None or id(loader) in self._changed:
            return loader
        from torch.utils.data import DataLoader

        known = [
            each for each in objects_of_process() if issubclass(type(each), DataLoader) and id(each) in self._changed
        ]
        same = [each for each in known if each.dataset is loader.dataset]
        trains = [each for each in same if id(each) in self._names or id(each) in self._made_at]
        return next(iter(trains or same), loader)

    def _place(self, value: Any) -> dict[str, Any]:
        """Return where an object is: the variable that holds it, and the line that has made it, where it is known."""
        file, line = self._made_at.get(id(value), ("", 0))
        name = self._names.get(id(value), "")
        if not name and not file:
            holders = ((name, each) for name, each in self._namespace.items() if not name.startswith("_"))
            name = next((name for name, each in holders if each is value or _wrapped(each) is value), "")
        return {"name": name, "file": file, "line": line}


def change_loader(loader: Any, change: SpeedChange) -> None:
    """Change a loader in place, as if it had been made with other arguments."""
    from torch.utils.data import BatchSampler

    options = dict(change.loader)
    if "num_workers" in options and not options["num_workers"]:
        options |= {"prefetch_factor": None, "persistent_workers": False}
    elif options.get("num_workers") and loader.prefetch_factor is None:
        options.setdefault("prefetch_factor", 2)  # torch's own default
    for name, value in options.items():
        object.__setattr__(loader, name, value)  # a loader refuses some of these later on
    if change.batch_factor > 1 and is_batched_by_torch(loader):
        size = loader.batch_size * change.batch_factor
        object.__setattr__(loader, "batch_size", size)
        if loader.batch_sampler is not None:
            object.__setattr__(loader, "batch_sampler", BatchSampler(loader.sampler, size, loader.drop_last))


def is_batched_by_torch(loader: Any) -> bool:
    """Return whether `batch_size` says how large the batches of a loader are."""
    from torch.utils.data import BatchSampler

    return loader.batch_size is not None and type(loader.batch_sampler) in (BatchSampler, type(None))


def change_optimizer(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Change an optimizer in place, from its next step on."""
    for group in optimizer.param_groups:
        group.update(options)
        if options.get("fused"):
            group["foreach"] = False
    optimizer.defaults.update(options)
    if options.get("fused"):
        optimizer._step_supports_amp_scaling = True
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # moves what a fused step wants on the device


def _states() -> tuple[Any, ...]:
    """Return the states of the generators that a data set may draw from, in short."""
    import torch

    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else str(numpy.random.get_state()[1:])
    return hash(torch.get_rng_state().numpy().tobytes()), hash(random.getstate()), of_numpy


def _maker() -> FrameType | None:
    """Return the frame that makes an object, unless it is this package's, or that of torch; then None."""
    of_torch = os.path.dirname(str(sys.modules["torch"].__file__)) + os.sep
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(of_torch):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(PACKAGE_DIR) else frame


def _wrapped(model: Any) -> Any:
    """Return the module in a prepared model; None if it is none."""
    torch = sys.modules["torch"]
    return model._modules.get("module") if issubclass(type(model), torch.nn.Module) else None


def _compiled_frames() -> int:
    """Return how many functions torch has compiled here; ``model.compile()`` passes over torch's own classes."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["frames"]["ok"]) if "frames" in counters else 0


def _has_prepared() -> bool:
    """Return whether the program trains by what `accelerator.prepare` returns."""
    return any(type(each).__name__ == _PREPARED for each in objects_of_process())
