"""Loaders: hooks by which torch's loaders call `BatchSplitter`, and facts read from their parts. Runs in ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from nbaccel.base.quantities import length_or_none
from nbaccel.errors import CannotSplit
from nbaccel.train.oom.microbatch.slicing import Samples, sample_shapes
from nbaccel.train.raw_loop.loader_pass import PassBegin

__all__ = [
    "ask",
    "asked",
    "batch_size_of",
    "batches_of",
    "makes_of_indices",
    "nameless",
    "samples_of_batch",
    "samples_of_index",
    "shares_out",
    "whole_numbers",
]

_SHARES = ("num_replicas", "num_processes")


class Asked(Protocol):
    """Object that torch's loaders call: `BatchSplitter`, which decides a rank's share of the batches, or an observer.

    Attributes:
        needs_order: Batches must come in the order of their indices.
        next_begin: How the pass that begins next has begun in the process that this one continues.
    """

    needs_order: bool
    next_begin: PassBegin | None

    def minds(self, iterator: Any) -> bool:
        """Return whether this object decides about `iterator`."""

    def before(self) -> None:
        """Prepare for an iterator that draws what all ranks draw."""

    def begin_pass(self, iterator: Any, loader: Any = None) -> Any:
        """Begin a pass, when an iterator begins, or begins again."""

    def draw(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the next index; `real` is torch's function for it."""

    def hand_out(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the next batch; `real` is torch's function for it."""

    def note_passed(self, iterator: Any) -> None:
        """Note that what `iterator` has handed out by now was trained in the process that this one continues."""


def ask(passes: Asked) -> None:
    """Make torch's loaders call `passes` from now on, and no other. Calling this again has no effect."""
    hooks = getattr(_BaseDataLoaderIter.__next__, "nbaccel_hooks", None)
    if hooks is None:
        hooks = LoaderHooks(passes)
        hooks.install()
    hooks.passes = passes


def asked() -> Asked | None:
    """Return the object that torch's loaders call; None where that is nobody."""
    hooks = getattr(_BaseDataLoaderIter.__next__, "nbaccel_hooks", None)
    return None if hooks is None else hooks.passes


class LoaderHooks:
    """Makes torch's iterators call `passes`. It outlives tasks; an iterator's own state is stored on the iterator."""

    def __init__(self, passes: Asked) -> None:
        self.passes = passes

    def install(self) -> None:
        kind: Any = _BaseDataLoaderIter
        torchs_init, torchs_reset = kind.__init__, kind._reset
        torchs_index, torchs_next = kind._next_index, kind.__next__

        def init(iterator: Any, loader: Any) -> None:
            is_minded = self.passes.minds(iterator)
            if is_minded:
                self.passes.before()
            torchs_init(iterator, loader)
            if is_minded:
                self.passes.begin_pass(iterator, loader)

        def reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            is_minded = self.passes.minds(iterator)
            if is_minded:
                self.passes.before()
                if self.passes.needs_order and getattr(iterator, "_in_order", None) is False:
                    iterator._in_order = True  # otherwise the next batch would differ between ranks
            torchs_reset(iterator, loader, first_iter)
            if is_minded and not first_iter:
                self.passes.begin_pass(iterator, loader)

        def next_index(iterator: Any) -> Any:
            if self.passes.minds(iterator):
                return self.passes.draw(iterator, torchs_index)
            return torchs_index(iterator)

        def next_batch(iterator: Any) -> Any:
            if self.passes.minds(iterator):
                return self.passes.hand_out(iterator, torchs_next)
            return torchs_next(iterator)

        next_batch.nbaccel_hooks = self  # type: ignore[attr-defined]
        kind.__init__, kind._reset, kind._next_index, kind.__next__ = init, reset, next_index, next_batch


def samples_of_index(index: Any, is_collated: bool) -> int:
    """Return the number of samples of an index; 0 for one that cannot be cut."""
    if not is_collated:  # then a data set defines its index; only a list is sure to be one of samples
        return len(index) if type(index) is list else 0
    if isinstance(index, tuple) and len({type(each) for each in index}) > 1:
        return 0  # such as (size, indices)
    if isinstance(index, (list, tuple)) or (hasattr(index, "__array__") and index.ndim):
        return len(index)
    return 0


def samples_of_batch(batch: Any, known: int, is_collated: bool, batch_size: int | None) -> Samples:
    """Return the samples of a batch.

    Args:
        known: Their number, or 0.

    Raises:
        CannotSplit: It is not sure what a sample is.
    """
    samples = Samples.of(batch)
    if is_collated:
        most = known or batch_size or samples.count
        if samples.count > most or (known and samples.count != known):
            raise CannotSplit(f"it has {most} samples, and tensors of {samples.count} rows")
        return samples
    numbers = any(isinstance(leaf, (int, float)) or getattr(leaf, "ndim", 1) == 0 for leaf in tree_leaves(batch))
    if numbers or not any(sample_shapes(batch)):
        raise CannotSplit("without a batch_size, a batch of such tensors looks like a single sample")
    return samples


def whole_numbers(index: Any) -> list[int]:
    """Return the whole numbers in `index`, or an empty list if it has others."""
    try:
        return [*map(operator.index, index)]
    except TypeError:
        return []


def shares_out(iterator: Any) -> bool:
    """Return whether samplers, or the data set, give each rank samples of its own already."""
    top = iterator._index_sampler
    parts = [top, *(getattr(top, name, None) for name in ("sampler", "batch_sampler"))]
    parts += [getattr(parts[1], "sampler", None), getattr(parts[2], "sampler", None)]
    if not makes_of_indices(iterator):
        parts.append(iterator._dataset)
    is_pipe = getattr(iterator, "_shared_seed", None) is not None  # which torch has divided among ranks
    return is_pipe or any(getattr(part, name, None) not in (None, 1) for part in parts for name in _SHARES)


def nameless(kind: type) -> str:
    """Return a description of a loader that no variable holds.

    Args:
        kind: The class of its data set.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> nameless(list), nameless(IterableDataset)
        ('a DataLoader over a list', 'a DataLoader over an IterableDataset')
    """
    article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    return f"a DataLoader over {article} {kind.__name__}"


def makes_of_indices(iterator: Any) -> bool:
    """Return whether batches are made of the indices of samples, and not taken from an iterable data set."""
    return bool(iterator._dataset_kind == _DatasetKind.Map)


def batch_size_of(iterator: Any, loader: Any) -> int | None:
    """Return the samples of a batch; None where that is unknown.

    Args:
        loader: None in the middle of a pass.
    """
    size = getattr(loader, "batch_size", None) or getattr(iterator._index_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def batches_of(iterator: Any, loader: Any) -> int | None:
    """Return how many batches a pass has; None where that is unknown.

    Args:
        loader: None in the middle of the pass.
    """
    return length_or_none(iterator._index_sampler if makes_of_indices(iterator) or loader is None else loader)
