"""Order: samplers that draw the same on every rank, whatever generator they use. Runs in ranks.

A `SharedOrder` replaces the user's sampler. Torch's samplers get a generator that all ranks seed alike; a
sampler of the user's own, which may draw from any global generator, runs with `PrivateRandomness`. The user's
sampler and the process's generators do not change.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from nbaccel.train.data.pieces import in_pieces

__all__ = [
    "PrivateRandomness",
    "SharedOrder",
    "begin_workers_anew",
    "data_seed",
    "drawn_seed",
    "order_states",
    "own_states",
    "replayed",
    "samplers_of",
    "set_own_states",
    "tell_epoch",
]

_EPOCH_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: neighbouring epochs of neighbouring seeds do not coincide."""

_DRAW_STRIDE = 0xD1B54A32D192ED03
"""An odd number near 2**64 times 0.8191: the draws of an epoch coincide neither with each other nor other epochs."""

_SAMPLER_ATTRIBUTES = ("sampler", "batch_sampler")

_OF_PROCESS = "process"
"""The name of the process's generator among those of an order; a checkpoint has its state for itself."""

_SEEDABLE_STRIDE = 1
"""Accelerate's seedable sampler: epoch e has the order of seed + e."""


class SharedOrder(Sampler[Any]):
    """The user's sampler or batch sampler, in the same order on all ranks.

    Args:
        seed: Equal on all ranks; the order of epoch e follows from (seed, e, draw) alone.
        is_seedable: As Accelerate's seedable sampler.
        at_once: How many batches are drawn together from a sampler of the user's own.

    Attributes:
        given: The program's own one.
        draw: Which order of an epoch that is begun several times; see `Position.draw`.
    """

    def __init__(self, batches: Any, seed: int, is_seedable: bool = False, at_once: int = 1) -> None:
        self.seed = seed
        self.draw = 0
        self.given = batches
        self._how = (is_seedable, at_once)
        self._at_once = at_once
        self._stride = _SEEDABLE_STRIDE if is_seedable else _EPOCH_STRIDE
        self._generators: list[torch.Generator] = []
        self._batches = self._with_own_generator(batches)
        self._private = PrivateRandomness() if _may_draw_anywhere(batches) else None
        self.set_epoch(0)

    @property
    def is_drawn(self) -> bool:
        """True if the order depends on random numbers."""
        return bool(self._generators) or self._private is not None

    @property
    def is_own(self) -> bool:
        """True if a sampler that torch did not write draws it."""
        return self._private is not None

    def apart(self) -> SharedOrder:
        """Return the same order, drawn by separate generators."""
        return SharedOrder(self.given, self.seed, *self._how)

    def set_epoch(self, epoch: int) -> None:
        # Accelerate has no looks: there the first one has the order of the first loop.
        draw = max(self.draw, -1 - self.draw) if self._stride == _SEEDABLE_STRIDE else self.draw
        seed = drawn_seed(self.seed + epoch * self._stride, draw)
        for generator in self._generators:
            generator.manual_seed(seed)
        if self._private is not None:
            self._private.seed(seed)
        tell_epoch(epoch, *samplers_of(self._batches))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches) if self._private is None else self._private.over(self._batches, self._at_once)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _with_own_generator(self, batches: Any) -> Any:
        inner = getattr(batches, "sampler", None)
        if inner is not None:
            shared = self._with_own_generator(inner)
            if shared is not inner:
                batches = copy.copy(batches)
                batches.sampler = shared
        if hasattr(batches, "generator"):
            batches = copy.copy(in_pieces(batches))
            batches.generator = torch.Generator()
            self._generators.append(batches.generator)
        return batches


class PrivateRandomness:
    """Random numbers of Python, NumPy and torch's CPU, separate from the process's own.

    Example:
        >>> private = PrivateRandomness()
        >>> private.seed(3)
        >>> with private:
        ...     first = random.random()
        >>> private.seed(3)
        >>> with private:
        ...     random.random() == first
        True
    """

    def __init__(self) -> None:
        self._seed = 0
        self._own: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()

    def seed(self, seed: int) -> None:
        self._seed = seed
        self._own = None

    def __enter__(self) -> None:
        self._outer = _exchange_generators(self._fresh() if self._own is None else self._own)

    def __exit__(self, *exception: object) -> None:
        self._own = _exchange_generators(self._outer)

    def over(self, values: Any, at_once: int = 1) -> Iterator[Any]:
        """Iterate `values`, which draw from these numbers; the code that consumes them does not.

        Args:
            at_once: How many are drawn before the first of them is handed out.
        """
        with self:
            iterator = iter(values)
        while True:
            with self:
                drawn = list(itertools.islice(iterator, at_once))
            if not drawn:
                return
            yield from drawn

    def _fresh(self) -> tuple[Any, ...]:
        numpy = _numpy_random()
        return (
            random.Random(self._seed).getstate(),
            torch.Generator().manual_seed(self._seed).get_state(),
            None if numpy is None else numpy.MT19937(self._seed),
        )


def drawn_seed(seed: int, draw: int) -> int:
    """Return the seed of one draw of an epoch; that of draw 0 is the epoch's own."""
    return (seed + draw * _DRAW_STRIDE) % 2**63


def data_seed(loader: DataLoader[Any]) -> int:
    """Return the seed of the loader's order on this rank, without drawing a random number. Rank 0's is used."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return seed % 2**63


def tell_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch` of those `owners` that have it: samplers and datasets that shuffle by the epoch."""
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def begin_workers_anew(loader: DataLoader[Any]) -> None:
    """Let `loader` start its persistent workers again, if they could not hear the epoch that its dataset is told.

    They keep a copy of the dataset from their begin, so each epoch would be the first one again (starVLA#470). A
    dataset that has memory in common with them, as those of `datasets`, tells them itself.
    """
    dataset = loader.dataset
    if loader.persistent_workers and hasattr(dataset, "set_epoch"):
        kept = getattr(dataset, "__dict__", {}).values()
        if not any(each.is_shared() if isinstance(each, Tensor) else _is_of_processes(each) for each in kept):
            loader._iterator = None


def _is_of_processes(value: Any) -> bool:
    return type(value).__module__.startswith("multiprocessing.")


def samplers_of(source: Any) -> list[Any]:
    """Return the samplers of a loader, or `source` if it is one itself, and those inside of them at any depth."""
    is_loader = isinstance(source, DataLoader)
    below = [source.batch_sampler, source.sampler] if is_loader else [source]
    found: list[Any] = []
    while below:
        sampler = below.pop(0)
        if sampler is not None and all(sampler is not one for one in found):
            found.append(sampler)
            inside = getattr(sampler, "__dict__", {})
            below += [
                value for name, value in inside.items() if isinstance(value, Sampler) or name in _SAMPLER_ATTRIBUTES
            ]
    return found


@contextmanager
def replayed(states: dict[str, torch.Tensor], loader: DataLoader[Any]) -> Iterator[None]:
    """Set the generators of a loader's order to the states that `order_states` read, while entered.

    Afterwards the process's own generator has its old state; a generator of the loader's own continues from here.
    """
    outer = torch.default_generator.get_state()
    for name, generator in _order_generators(loader).items():
        if name in states:
            generator.set_state(states[name])
    try:
        yield
    finally:
        torch.default_generator.set_state(outer)


def order_states(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    """Return the states of the generators that determine the order of the loader's next epoch."""
    return {name: generator.get_state() for name, generator in _order_generators(loader).items()}


def own_states(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of `order_states` that belong to the loader's own generators."""
    return {name: state for name, state in states.items() if name != _OF_PROCESS}


def set_own_states(states: dict[str, torch.Tensor], loader: DataLoader[Any]) -> None:
    """Set the own generators of `loader` to `states`; that of the process does not change."""
    generators = _order_generators(loader)
    for name in own_states(states).keys() & generators.keys():
        generators[name].set_state(states[name])


def _order_generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    candidates = {"loader": loader.generator, "sampler": getattr(sampler, "generator", None)}
    own = {name: generator for name, generator in candidates.items() if isinstance(generator, torch.Generator)}
    return {_OF_PROCESS: torch.default_generator, **own}


def _may_draw_anywhere(batches: Any) -> bool:
    """Return whether a sampler that torch did not write is involved."""
    while isinstance(batches, Sampler):
        if not type(batches).__module__.startswith("torch.utils.data"):
            return True
        batches = getattr(batches, "sampler", None)
    return batches is not None and not isinstance(batches, (list, tuple, range))


def _exchange_generators(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set Python's, torch's and NumPy's generators; return their old states."""
    python, torch_state, bits = states
    before: list[Any] = [random.getstate(), torch.default_generator.get_state(), None]
    random.setstate(python)
    torch.default_generator.set_state(torch_state)
    numpy = _numpy_random()
    if numpy is not None and bits is not None:
        before[2] = numpy.get_bit_generator()
        numpy.set_bit_generator(bits)  # 1 us; its states would take 100 us each
    return tuple(before)


def _numpy_random() -> Any:
    """Return ``numpy.random`` if numpy, 1.24 or later, is imported; else None."""
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None and hasattr(numpy.random, "get_bit_generator") else None
