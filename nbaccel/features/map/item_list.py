"""Check the items of a map, recognise them in a later call, and order them by length.

Used in the kernel, in ranks and in scripts. Items in memory are read whole. Of a data set, whose items may be pictures
that are read and decoded one by one, some are compared, and of a stream each block (`ItemStream`).
"""

from __future__ import annotations

from array import array
from collections import UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from itertools import chain, islice
from typing import Any, Self

from nbaccel.base.values import frozen
from nbaccel.features.source.fingerprint import checksum_of, checksum_of_sample, length_of

__all__ = ["ItemMark", "ItemStream", "as_items", "is_read_whole", "longest_first"]

_IN_MEMORY = (list, tuple, range, deque, array, UserList, memoryview)
_OF_PACKAGES = ("numpy", "torch", "pandas", "pyarrow", "polars")
_DATA_SETS = "torch.utils.data"
_PLAIN = (str, bytes, int, float, type(None))


@frozen
class ItemMark:
    """The facts that tell items from others.

    Args:
        total: Their number; None for a stream.
        checksum: The checksum of all or some of them; empty for a stream.
    """

    total: int | None
    checksum: str

    @classmethod
    def of(cls, items: Any) -> Self:
        """Return the mark of items as `as_items` returns them.

        Example:
            >>> ItemMark.of(as_items(iter("ab")))
            ItemMark(total=None, checksum='')
        """
        if not hasattr(items, "__getitem__"):
            return cls(None, "")
        return cls(len(items), checksum_of(items) if is_read_whole(items) else checksum_of_sample(items))


def is_read_whole(items: Any) -> bool:
    """Return whether all items are compared, and not some: they are in memory, or in an array or a tensor.

    Example:
        >>> is_read_whole(["a"]), is_read_whole(range(3))
        (True, True)
    """
    if isinstance(items, _IN_MEMORY) or type(items).__qualname__ == "TensorDataset":
        return True
    module = type(items).__module__
    return module.partition(".")[0] in _OF_PACKAGES and not module.startswith(_DATA_SETS)


def as_items(items: Any) -> Any:
    """Return items as a map reads them: something with a length and numbers, or an `ItemStream`.

    Raises:
        TypeError: It is a text, a dict, a set or a table, of which it is not clear what an item is.

    Example:
        >>> as_items("text")
        Traceback (most recent call last):
        TypeError: items is a list of items, got a str: for one item write [item]
    """
    kind = type(items).__qualname__
    if isinstance(items, str | bytes):
        raise TypeError(f"items is a list of items, got a {kind}: for one item write [item]")
    if isinstance(items, Mapping):
        raise TypeError(f"items is a list of items, got a {kind}: write list(items.items()), or its values")
    if isinstance(items, AbstractSet) and kind not in ("dict_keys", "dict_items"):
        raise TypeError(f"items is a list of items, got a {kind}, whose order is another one each time: sorted(items)")
    if hasattr(items, "columns") and hasattr(items, "to_dict"):
        raise TypeError(f'items is a list of items, got a {kind}: write items.to_dict("records"), or one column')
    if hasattr(items, "iloc") or kind in ("dict_keys", "dict_values", "dict_items"):
        return list(items)
    if hasattr(items, "__len__") and hasattr(items, "__getitem__") and not _has_no_numbers(items):
        return list(items[:]) if _is_plain_column(items) else items
    if hasattr(items, "__iter__"):
        return items if isinstance(items, ItemStream) else ItemStream(items)
    raise TypeError(f"items is a list of items, or a stream of them, got a {kind}")


def _has_no_numbers(items: Any) -> bool:
    """Return whether items are a stream of torch, which may have a length, and inherits a method that only raises."""
    return any(kind.__qualname__ == "IterableDataset" for kind in type(items).__mro__)


def _is_plain_column(items: Any) -> bool:
    """Return whether items are a column of `datasets` with texts, numbers or lists of them, fast to read at once."""
    if not (type(items).__module__.startswith("datasets.") and hasattr(items, "column_name") and len(items)):
        return False
    first = items[0]
    return all(isinstance(each, _PLAIN) for each in (first[:1] if isinstance(first, list) else [first]))


def longest_first(items: Sequence[Any]) -> Sequence[int] | None:
    """Return the items by length, the longest first; None where all are alike, so that they keep their order."""
    lengths = array("q", map(length_of, items))
    if not lengths or min(lengths) == max(lengths):
        return None
    return array("q", sorted(range(len(lengths)), key=lambda number: -lengths[number]))


class ItemStream:
    """Items without numbers: a generator, which is drawn once, or an object that gives them anew each time.

    Args:
        source: A loader may have a length, which is not needed.

    Attributes:
        drawn: Items of a generator that were compared, and kept.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self.drawn: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return chain(self.drawn, self._source) if self.is_drawn_once else iter(self._source)

    @property
    def is_drawn_once(self) -> bool:
        return hasattr(self._source, "__next__")

    def difference(self, blocks: Iterable[tuple[int, str]], keeps: bool = False) -> str:
        """Compare all items with those of an earlier stream; return in words what differs, empty if nothing does.

        Args:
            blocks: Of the earlier one: the number of the item after the last, and the checksum of the items.
            keeps: What a generator gives meanwhile comes again when the stream is read; it is in memory until then.

        Example:
            >>> ItemStream(iter("abd")).difference([(2, checksum_of("ab")), (3, checksum_of("c"))])
            'item 2 is another one'
        """
        stream = self._kept(iter(self._source)) if keeps and self.is_drawn_once else iter(self)
        start = 0
        for stop, checksum in blocks:
            block = list(islice(stream, stop - start))
            if start + len(block) < stop:
                return f"it ends after {start + len(block):,} now"
            if checksum and checksum != checksum_of(block):
                last = stop - 1
                return f"item {start:,} is another one" if last == start else f"items {start:,} to {last:,} are others"
            start = stop
        if any(True for _ in islice(stream, 1)):
            return f"more than {start:,} now"
        self.drawn.clear()
        return ""

    def _kept(self, stream: Iterator[Any]) -> Iterator[Any]:
        for item in stream:
            self.drawn.append(item)
            yield item
