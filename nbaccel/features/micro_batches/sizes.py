"""Sizes: records which micro-batches fit on this rank. Runs in ranks; pure bookkeeping, no tensors.

Samples of similar shapes are one class and share a size: it halves when a micro-batch did not fit, and grows back
after many steps that did. Shapes that went through forward and backward are also recorded: a micro-batch that is no
larger in any dimension is *proven*, and gradients may be sent while it still computes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "GROW_AFTER",
    "MicroBatches",
    "Shapes",
]

Shapes = tuple[tuple[int, ...], ...]
"""The shape of one sample in each tensor of a batch."""

GROW_AFTER = 200
"""Batches of a class without a failure until it tries the double size; doubled after each try that failed."""


@dataclass(slots=True)
class _Fit:
    """Size that fits for one class of shapes.

    Args:
        size: The largest micro-batch to run now; None while nothing has failed.
        clean: Batches since the last failure or growth.
        patience: How many are needed to grow.
        is_trial: The size is a growth that has not been confirmed.
    """

    size: int | None = None
    clean: int = 0
    patience: int = GROW_AFTER
    is_trial: bool = False


class MicroBatches:
    """Sizes of micro-batches of one rank. Each rank has its own; ranks never compare them.

    Args:
        ceiling: No micro-batch is larger; None to take whole batches as long as they fit.

    Example:
        >>> sizes = MicroBatches()
        >>> image = ((3, 32, 32), ())
        >>> sizes.next_part(left=64, shapes=image)
        64
        >>> sizes.failed(64, image)
        32
        >>> sizes.next_part(left=50, shapes=image)  # two parts of equal size, not 32 and 18
        25
    """

    def __init__(self, ceiling: int | None = None) -> None:
        self.ceiling = ceiling
        self._fits: dict[Shapes, _Fit] = {}
        self._proven: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def start_at(self, size: int) -> None:
        """Run micro-batches of at most `size` samples, from the next batch on, for shapes of every class."""
        if size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {size}")
        if size != self.ceiling:
            self.ceiling = size
            self._fits.clear()

    def next_part(self, left: int, shapes: Shapes, least: int = 1) -> int:
        """Return how many of the `left` samples of a batch to run next, so that all parts are about equally large.

        Args:
            least: The smallest part that the model accepts.
        """
        largest = min(left, self._largest(shapes) or left)
        parts = max(1, min(-(-left // largest), left // least))
        return -(-left // parts)

    def failed(self, size: int, shapes: Shapes, least: int = 1) -> int:
        """Record that a micro-batch of `size` did not fit; return the next size, or 0 where there is none."""
        fit = self._fit(shapes)
        if fit.is_trial:
            fit.patience *= 2
        fit.is_trial = False
        fit.clean = 0
        kind, flat = _flat(size, shapes)
        self._proven[kind] = [proven for proven in self._proven.get(kind, ()) if not _covers(proven, flat)]
        if size <= least:
            return 0
        fit.size = max(least, -(-size // 2))
        return fit.size

    def fitted(self, count: int, shapes: Shapes) -> None:
        """Record that a whole batch of `count` samples went through."""
        fit = self._fit(shapes)
        if fit.size is None or fit.size >= min(count, self.ceiling or count):
            return
        fit.is_trial = False
        fit.clean += 1
        if fit.clean >= fit.patience:
            fit.size = min(2 * fit.size, count)
            fit.clean = 0
            fit.is_trial = True

    def prove(self, size: int, shapes: Shapes) -> None:
        """Record that a micro-batch of this size went through forward and backward."""
        kind, flat = _flat(size, shapes)
        known = self._proven.setdefault(kind, [])
        if not any(_covers(proven, flat) for proven in known):
            self._proven[kind] = [proven for proven in known if not _covers(flat, proven)] + [flat]

    def is_proven(self, size: int, shapes: Shapes) -> bool:
        """Return whether a micro-batch that was at least as large in every dimension went through."""
        kind, flat = _flat(size, shapes)
        return any(_covers(proven, flat) for proven in self._proven.get(kind, ()))

    def _largest(self, shapes: Shapes) -> int | None:
        """Return the size to run now: by the class itself, or for a new class by those of smaller samples."""
        fit = self._fits.get(_class_of(shapes))
        if fit is not None and fit.size is not None:
            return fit.size
        flat = _flat(0, _class_of(shapes))
        known = [
            other.size
            for other_class, other in self._fits.items()
            if other.size is not None
            and _flat(0, other_class)[0] == flat[0]
            and _covers(flat[1], _flat(0, other_class)[1])
        ]
        return min([*known, *([self.ceiling] if self.ceiling else [])], default=None)

    def _fit(self, shapes: Shapes) -> _Fit:
        return self._fits.setdefault(_class_of(shapes), _Fit())


def _class_of(shapes: Shapes) -> Shapes:
    """Return each dimension's power of two: lengths 33 to 64 are one class."""
    return tuple(tuple((length - 1).bit_length() for length in shape) for shape in shapes)


def _flat(size: int, shapes: Shapes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of dimensions of each tensor, and all lengths in a row."""
    return tuple(map(len, shapes)), (size, *(length for shape in shapes for length in shape))


def _covers(larger: tuple[int, ...], smaller: tuple[int, ...]) -> bool:
    return all(one >= other for one, other in zip(larger, smaller, strict=True))
