"""Unprepared loaders: warns of a training whose batches come from a loader that is not prepared. Runs in ranks.

Each rank then reads all batches, and N ranks do N times the same work. The decision follows from what happens, not from
what is missing: a torch loader that sees its whole dataset is iterated, a step of the prepared model is trained between
two of its batches, no prepared loader is being iterated, and the ranks' datasets are equal. Data that the program
distributes by itself differ in one of these, and so do evaluations; there is no warning for them.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from nbaccel.base.world import World
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.step.accumulation import Accumulation

__all__ = ["contents", "watch_loaders"]

_BATCHES_WATCHED = 256
"""Batches of an iteration to watch; if nothing was trained by then, the rest is not watched."""

_STEPS_PER_BATCH = 4
"""With more steps than these between two batches, the steps train on other data, as where a held iterator evaluates."""

_DEPTH = 5
_WIDTH = 4


def watch_loaders(world: World, accumulation: Accumulation) -> None:
    """Watch loaders that are iterated unprepared from now on, while `accumulation` trains. Warns once, in rank 0.

    It hooks the begin of iterations, and the batches of such a loader up to the
    decision; a prepared loader's are not hooked.
    """
    watch = getattr(DataLoader.__iter__, "nbaccel_watch", None)
    if watch is None:
        watch = _Watch()
        _hook(watch)
    watch.follow(world, accumulation)


def _hook(watch: _Watch) -> None:
    original = DataLoader.__iter__

    def begin(loader: DataLoader[Any]) -> Any:
        iterator = original(loader)
        if watch.is_open:
            watch.look(loader, iterator, sys._getframe(1).f_globals.get("__name__", ""))
        return iterator

    begin.nbaccel_watch = watch  # type: ignore[attr-defined]
    DataLoader.__iter__ = begin  # type: ignore[method-assign]


class _Watch:
    """Follows the training of one Accelerator, by a weak reference.

    Attributes:
        is_open: Nothing is decided yet.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._world = World(0, 1, 0, 1)
        self._accumulation_of: weakref.ref[Accumulation] | None = None
        self._judged = 0
        self._laid: tuple[str, str, str] | None = None

    def follow(self, world: World, accumulation: Accumulation) -> None:
        if self._accumulation_of is None or self._accumulation_of() is not accumulation:
            self._world, self._accumulation_of, self.is_open = world, weakref.ref(accumulation), True
            self._laid = None

    def look(self, loader: DataLoader[Any], iterator: Any, module: str) -> None:
        """Hook an iteration of `loader` that begins in `module`."""
        if not module.startswith("nbaccel.") and _sees_everything(loader) and not self._trains_otherwise():
            # On the instance, since a wrapper would be another class than programs know. It holds the iterator by a
            # weak reference: in a cycle its worker processes would outlive the loop.
            iterator._next_data = _Looked(self, loader, iterator)

    def step(self) -> tuple[int, int] | None:
        """Return the complete training steps, and the iterations of prepared loaders that trained.

        None where steps say nothing about an unprepared loader.
        """
        accumulation = self._accumulation_of() if self._accumulation_of is not None else None
        if accumulation is None or not self.is_open or self._trains_otherwise():
            return None
        return accumulation.clock.done, accumulation.clock.passes

    def note_trained(self, loader: DataLoader[Any]) -> bool:
        """Note that the prepared model was trained on a batch of `loader`; return True if this ends the look at it.

        Every rank, at the same step. The first time it lays down what the dataset contains, the second time rank 0
        compares: in between the ranks have trained together, so what a rank has not laid down by then, it never will.
        """
        if self._laid is None:
            self._laid = self._lay(loader)
            return False
        key, mine, notice = self._laid
        self._laid = None
        with suppress(RuntimeError):  # of a store that is gone
            store, world = c10d._get_default_store(), self._world
            if not world.is_main_process or all(
                _read(store, f"{key}/{rank}") == mine for rank in range(1, world.world_size)
            ):
                self.is_open = False
                if world.is_main_process:
                    warn_user(notice)
        return True

    def _lay(self, loader: DataLoader[Any]) -> tuple[str, str, str]:
        """Show the other ranks what the dataset contains. Return the key, the contents, and what is said of them."""
        self._judged += 1
        key, world = f"nbaccel/unprepared/{self._judged}", self._world
        try:
            mine = contents(loader.dataset)
        except Exception as error:  # from attributes of the program's own classes: a notice is not worth an error
            mine = f"rank {world.rank} cannot read it: {type(error).__name__}"
        with suppress(RuntimeError):
            c10d._get_default_store().set(f"{key}/{world.rank}", mine)
        return key, mine, _notice(loader, world)

    def _trains_otherwise(self) -> bool:
        """Return whether the present training gets its batches elsewhere, or is not one training of all ranks."""
        accumulation = self._accumulation_of() if self._accumulation_of is not None else None
        return (
            accumulation is None
            or accumulation.is_iterating
            or accumulation.is_local
            or not torch.is_grad_enabled()
            or not dist.is_initialized()
        )


class _Looked:
    """Replaces an iterator's ``_next_data`` until it is known whether its batches are trained on."""

    def __init__(self, watch: _Watch, loader: DataLoader[Any], iterator: Any) -> None:
        self._watch = watch
        self._loader = loader
        self._iterator_of = weakref.ref(iterator)
        self._left = _BATCHES_WATCHED
        self._step: tuple[int, int] | None = None

    def __call__(self) -> Any:
        iterator = self._iterator_of()
        assert iterator is not None  # it is calling
        before, self._step = self._step, self._watch.step()
        has_trained = before is not None and self._step is not None and _is_trained_between(before, self._step)
        self._left -= 1
        is_over = has_trained and self._watch.note_trained(self._loader)
        if is_over or not self._left:
            del iterator._next_data
        return type(iterator)._next_data(iterator)


def _is_trained_between(before: tuple[int, int], now: tuple[int, int]) -> bool:
    return 0 < now[0] - before[0] <= _STEPS_PER_BATCH and now[1] == before[1]


def contents(dataset: Any) -> str:
    """Return a short text that is equal for equal datasets, without reading a sample.

    For tensors and lists, in the dataset or in its parts, it covers lengths and a few values; for parts of a dataset
    their indices.

    Example:
        >>> from torch.utils.data import Subset
        >>> contents(Subset(range(8), range(0, 8, 2))) == contents(Subset(range(8), range(1, 8, 2)))
        False
    """
    said = getattr(dataset, "_fingerprint", None)  # of Hugging Face's datasets: of all that was done to them
    parts = [said] if isinstance(said, str) else _parts(dataset, _DEPTH)
    return hashlib.blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).hexdigest()


def _parts(thing: Any, depth: int) -> Iterator[str]:
    yield type(thing).__qualname__
    if thing is None or isinstance(thing, (str, bytes, int, float, range)):
        yield repr(thing)[:200]
    elif depth == 0:
        return
    elif isinstance(thing, torch.Tensor) or type(thing).__module__ == "numpy":
        yield str(getattr(thing, "shape", ""))
        if hasattr(thing, "reshape"):
            flat = thing.reshape(-1)
            yield repr((flat[:_WIDTH].tolist(), flat[-_WIDTH:].tolist()))
    elif isinstance(thing, (list, tuple)):
        yield str(len(thing))
        for value in [*thing[:_WIDTH], *thing[-_WIDTH:]]:
            yield from _parts(value, depth - 1)
    else:
        values = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        yield str(len(values))
        for name, value in list(values.items())[: 4 * _WIDTH]:
            yield str(name)[:200]
            yield from _parts(value, depth - 1)


def _read(store: Any, key: str) -> str | None:
    """Return the text at `key`; None if no rank has written it."""
    return str(store.get(key).decode()) if store.check([key]) else None


def _notice(loader: DataLoader[Any], world: World) -> str:
    batches = len(loader)
    return (
        f"the loader over {type(loader.dataset).__name__} was not prepared: each of {world.world_size} ranks reads all "
        f"{batches} batches, so the same work is done {world.world_size} times. `loader = accelerator.prepare(loader)` "
        "before the loop gives each rank its share."
    )


def _sees_everything(loader: DataLoader[Any]) -> bool:
    """Return whether the samplers of `loader` are torch's own, and leave out nothing of the dataset."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) not in (SequentialSampler, RandomSampler):
        return False
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    try:
        return len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return False
