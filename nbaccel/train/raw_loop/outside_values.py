"""Find values that enter a loss from outside of its batch, and differ between ranks. Runs in ranks.

A loop may keep a state that it makes of its batches: a running mean, a bank of features, a baseline, weights of
classes. Once each rank has a part of every batch, each has a state of its own, and all train one model by losses that
do not belong together; nothing in the batch or in the graph shows it. So while a batch is watched, each operation's
inputs that are neither of the batch, nor trained, nor made meanwhile are *outside values*; it is followed on which of
them a loss depends, and the ranks compare these. They must be the same in all ranks, as everything is that ranks with
the same program have not made of their own samples.
"""

from __future__ import annotations

import linecache
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from nbaccel.base.notices import is_users
from nbaccel.base.values import attributes_of
from nbaccel.train.distributed.callers import users_frames, users_name, variables_of
from nbaccel.train.raw_loop.gradient_weights import digest
from nbaccel.train.raw_loop.node_kinds import names
from nbaccel.train.raw_loop.trained_tensors import sums_of

__all__ = ["OutsideUses", "OutsideValue", "OutsideValues", "SeenMemory", "as_text", "of_parts", "tensors_in"]

_RANDOM, _GRID, _EARLIER = 1, 2, 4
"""The bits of what was drawn meanwhile, of a row of numbers, and of an earlier batch; the others are of outside values,
in their order."""

_GRIDS = names("linspace logspace arange")

_OVERWRITTEN = names("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ set_")
_FRESH = "lift_fresh"
_STATISTICS = ("running_mean", "running_var")
_MOST_ELEMENTS = 1 << 26
_MOST_OF_PARAMETERS = 1 << 20
_MOST_PARTS = 4096
_LONGEST_LINE = 60
_FRAMES = 8
_NEAR = 1e-6
_MOST_COUNTED = 1e5
_OF_NUMBERS = ("Tensor", "number")  # types of arguments


class OutsideValue(NamedTuple):
    """The outside values that one operation of one line has had, as ranks tell it to each other.

    Args:
        times: How many they were: as many as samples, or as steps of a sequence, where it differs between ranks.
        shape: That of the last one.
        is_fresh: It was a number, or made of numbers just then: it may be of this part of the batch.
        is_whole: It is fresh, and its numbers are whole ones.
        number: The value, or the norm of a tensor.
        may_be_size: It may be the number of samples, and rightly differ: a factor of the loss, or a tensor that the
            program made before it had counts or numbers of several samples.
        is_by_place: It is some rows of a larger tensor, and they are not all alike.
    """

    times: int
    shape: tuple[int, ...]
    is_fresh: bool
    is_whole: bool
    digest: int
    number: float
    may_be_size: bool = True
    is_by_place: bool = False


class SeenMemory(StorageWeakRef):
    """A tensor's memory that was seen, for as long as this process has it.

    torch's own reference can be pickled, as a number: in another process its end frees whatever lies at that address,
    and the process with it. The handle of a hook for all optimizers or modules leads to hooks of ours, and so to these.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)  # type: ignore[no-untyped-call]

    def has_gone(self) -> bool:
        """Return whether nothing holds this memory any more."""
        return bool(self.expired())  # type: ignore[no-untyped-call]

    def __reduce__(self) -> NoReturn:
        raise TypeError("memory of one process cannot be sent to another")


@dataclass(slots=True)
class _Seen:
    bit: int
    value: Any
    line: str
    digests: list[int] = field(default_factory=list)
    is_fresh: bool = False
    may_be_size: bool = True


class OutsideUses:
    """The outside values of the operations since a batch was handed out.

    Args:
        is_trained: Whether ranks keep a tensor equal anyway.
    """

    def __init__(self, is_trained: Callable[[Tensor], bool]) -> None:
        self._is_trained = is_trained
        self._bits: dict[int, tuple[SeenMemory, int]] = {}  # what a tensor's memory depends on
        self._numbers: dict[float, int] = {}  # that have left torch meanwhile, or came with the batch
        self._seen: dict[str, _Seen] = {}
        self._written: dict[int, list[tuple[int, int, int]]] = {}  # stretches of outside memory, and their bits
        self._has_counted = False  # the program has numbers of which it may make counts
        self._is_factor = False  # a number in the present operation is one of a loss
        self._has_drawn = False  # a number that was drawn has left torch, and others may be made of it
        self._is_blind = False  # the batch was too large an object to know its tensors

    def add(self, batch: Any) -> None:
        """Note what belongs to the batch."""
        for each in tensors_in(batch):
            if each is None:
                self._is_blind = True
            elif isinstance(each, Tensor):
                self._set(each, 0)
            else:
                self._numbers[each] = 0

    def add_memory(self, storages: Sequence[SeenMemory]) -> None:
        """Note the memory of a batch that was handed out before, and may be computed with only now."""
        for each in storages:
            self._bits[each.cdata] = each, _EARLIER

    def before(self, func: Any, name: str, args: Any, kwargs: Any) -> int:
        """Return what the results of an operation depend on; called before it, which may write into its inputs."""
        bits = _RANDOM if torch.Tag.nondeterministic_seeded in func.tags else _GRID if name in _GRIDS else 0
        if func.is_view and name != _FRESH:  # nothing is read yet
            return 0
        arguments, first = func._schema.arguments, args[0] if args else None
        self._is_factor = isinstance(first, Tensor) and first.requires_grad and first.numel() == 1  # `terms` reads them
        has_tensors = any(isinstance(each, Tensor) for each in args)
        for at, each in enumerate(args):
            if at < len(arguments) and arguments[at].name in _STATISTICS:
                continue  # they are read in an evaluation only, and ranks average them
            if type(each) is int and has_tensors and not self._is_factor and str(arguments[at].type) in _OF_NUMBERS:
                each = float(each)  # not a dimension, or a length
            if not (at == 0 and name in _OVERWRITTEN):
                bits |= self._of(each, name, at)
        for at, each in kwargs.items():
            if at != "out":
                bits |= self._of(each, name, at)
        return bits

    def after(self, func: Any, name: str, results: Any, bits: int) -> None:
        """Note the results of an operation."""
        if func.is_view and name != _FRESH:
            return
        for each in tree_leaves(results):
            if not isinstance(each, Tensor):
                continue
            known = self._known(each)
            is_part = each.numel() * each.element_size() < each.untyped_storage().nbytes()
            if name not in _OVERWRITTEN or (is_part and known is not None):
                self._set(each, bits | (known or 0))
            elif not is_part:
                self._set(each, bits)
            elif each.is_contiguous():  # the rest of this memory is from outside all the same
                stretches = self._written.setdefault(each.untyped_storage()._cdata, [])
                stretches.append((*_stretch(each), bits))

    def note_leaves(self, tensor: Tensor) -> None:
        """Note a tensor whose numbers become those of NumPy or Python."""
        self._has_counted = self._has_counted or (tensor.numel() > 1 and self._known(tensor) is not None)

    def note_left(self, tensor: Tensor, value: Any, is_of_batch: bool) -> None:
        """Note a tensor's number that becomes one of Python's."""
        bits = self._known(tensor) or 0
        if type(value) is int or (type(value) is float and value.is_integer()):
            self._has_counted = self._has_counted or self._known(tensor) is not None
        elif type(value) is float:
            self._numbers[value] = bits
        self._has_drawn = self._has_drawn or bool(bits & _RANDOM and not is_of_batch)

    def of(self, roots: Sequence[Tensor]) -> OutsideValues:
        """Return the outside values that the losses `roots` depend on."""
        bits = 0
        for root in roots:
            bits |= self._known(root) or 0
        return OutsideValues(
            {} if self._is_blind else {key: seen for key, seen in self._seen.items() if seen.bit & bits}
        )

    def is_of_memory(self, tensor: Tensor) -> tuple[bool, bool]:
        """Return whether a tensor depends on one from outside, or is trained, and whether it was drawn."""
        bits = self._known(tensor) or 0
        has_tensor = any(
            seen.bit & bits and isinstance(seen.value, Tensor) and not seen.is_fresh for seen in self._seen.values()
        )
        is_trained = tensor.requires_grad and tensor.is_leaf
        return has_tensor or is_trained or bool(bits & _EARLIER), bool(bits & _RANDOM)

    def is_of_a_grid(self, tensor: Tensor) -> bool:
        return bool((self._known(tensor) or 0) & _GRID)

    # -- inputs

    def _of(self, argument: Any, name: str, at: int | str) -> int:
        if isinstance(argument, Tensor):
            return self._of_tensor(argument, name, at)
        if type(argument) is float:
            return self._of_number(argument, name, at)
        if not isinstance(argument, list | tuple):
            return 0
        bits = 0
        for each in argument:
            bits |= self._of(each, name, at)
        return bits

    def _of_tensor(self, tensor: Tensor, name: str, at: int | str) -> int:
        known = self._known(tensor)
        if known is not None:
            return known
        bits, (start, stop) = 0, _stretch(tensor)
        for begin, end, its in self._written.get(tensor.untyped_storage()._cdata, ()):
            bits |= its
            if begin <= start and stop <= end and tensor.is_contiguous():
                return its
        if not (tensor.requires_grad or self._is_trained(tensor)):  # a graph leads to trained leaves
            is_fresh = name == _FRESH
            most = _MOST_OF_PARAMETERS if isinstance(tensor, torch.nn.Parameter) else _MOST_ELEMENTS
            bits |= self._see(tensor, name, at, _digest_of(tensor, most), is_fresh, not self._has_counted)
        self._set(tensor, bits)
        return bits

    def _of_number(self, number: float, name: str, at: int | str) -> int:
        known = self._numbers.get(number)
        if known is not None or self._has_drawn or not math.isfinite(number):
            return known or 0
        return self._see(number, name, at, digest(repr(number)), True, self._is_factor)

    def _see(self, value: Any, name: str, at: int | str, found: int, is_fresh: bool, may_be_size: bool) -> int:
        place, line = _place()
        key = f"{place}:{name}:{at}"
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(_EARLIER << 1 + len(self._seen), value, line)
        seen.value, seen.is_fresh, seen.may_be_size = value, is_fresh, may_be_size
        seen.digests.append(found)
        return seen.bit

    # -- memory

    def _known(self, tensor: Tensor) -> int | None:
        try:
            found = self._bits.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or a subclass without memory
            return 0
        return None if found is None or found[0].has_gone() else found[1]

    def _set(self, tensor: Tensor, bits: int) -> None:
        with suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            self._bits[storage._cdata] = SeenMemory(storage), bits


class OutsideValues:
    """The outside values that a loss depends on, by the operation and the line that use them."""

    def __init__(self, seen: dict[str, _Seen]) -> None:
        self._seen = seen

    @property
    def digest(self) -> int:
        """A number that differs for other values; 0 where there are none."""
        if not self._seen:
            return 0
        return digest(repr([(key, seen.digests) for key, seen in sorted(self._seen.items())]))

    def told(self) -> dict[str, OutsideValue]:
        """Return the values, for other ranks."""
        return {key: _told(seen) for key, seen in self._seen.items()}

    def name(self, key: str) -> tuple[str, str]:
        """Return the program's name for a value, and the line that uses it."""
        seen = self._seen.get(key)
        if seen is None:
            return "a value", "in another rank"
        line = seen.line if len(seen.line) <= _LONGEST_LINE else f"{seen.line[:_LONGEST_LINE]}..."
        return _name_of(seen.value) or f"a value of `{line}`", line


def of_parts(
    told: Sequence[Mapping[str, OutsideValue]], rows: Sequence[float], fixed: set[str], has_drawn_apart: bool
) -> list[str]:
    """Return which outside values of the ranks differ, and are not of the samples of this part of a batch.

    What belongs to samples has their number in its shape, or is there as often, or is a count of them. Where all ranks
    have equally many samples, neither tells it; the first parts are of different sizes. Rows of a larger tensor, as
    ``kept[: len(x)]``, are of no sample: each rank has taken the same ones.

    Args:
        told: By rank.
        rows: The samples of each rank's part.
        fixed: Keys of values whose shapes and times do not depend on the number of samples; others are added.
        has_drawn_apart: The ranks' other random generators differ, since they have drawn for samples.
    """
    found = []
    for key in told[0]:
        if not all(key in each for each in told):
            continue
        values = [each[key] for each in told]
        first = values[0]
        are_uneven = len({value.times for value in values}) > 1
        is_once_each = not any(row and value.times % row for value, row in zip(values, rows, strict=True))
        if len({value.shape for value in values}) > 1:
            if any(value.is_by_place for value in values) and [value.shape[:1] for value in values] == [
                (row,) for row in rows
            ]:
                found.append(key)
            continue
        if are_uneven and (is_once_each or first.is_fresh):
            continue
        if len(set(rows)) > 1:
            fixed.add(key)
        if len({value.digest for value in values}) == 1:
            continue
        if first.is_fresh and (has_drawn_apart or _are_counts(values, rows)):
            continue
        if key in fixed or not (rows[0] in first.shape or (is_once_each and rows[0] > 1)):
            found.append(key)
    return found


def _are_counts(values: Sequence[OutsideValue], rows: Sequence[float]) -> bool:
    """Return whether fresh values are sizes, or made of the number of samples."""
    if not all(value.may_be_size for value in values):
        return False
    if math.prod(values[0].shape) > 1:
        return all(value.is_whole for value in values)
    made = [(value.number, row) for value, row in zip(values, rows, strict=True)]
    return all(_is_count(number, row or 1.0) for number, row in made)


def _is_count(number: float, rows: float) -> bool:
    if not number:
        return True
    candidates = [number, number**2, number * rows, number / rows, 1 / number, rows / number, 1 / number**2]
    return any(
        1 - _NEAR < abs(each) < _MOST_COUNTED and abs(each - round(each)) < _NEAR * abs(each) for each in candidates
    )


def as_text(value: OutsideValue) -> str:
    """Return a value for an error."""
    return f"{'of norm ' if value.shape else ''}{value.number:.6g}"


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return where the numbers of a contiguous tensor begin and end in its memory."""
    start = int(tensor.storage_offset())
    return start, start + tensor.numel()


def _told(seen: _Seen) -> OutsideValue:
    value, is_whole = seen.value, False
    shape: tuple[int, ...] = ()
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        values = value.detach()
        if values.numel() and values.dtype is not torch.bool and not values.is_complex():
            numbers = values.double()
            value, is_whole = float(numbers.norm()), seen.is_fresh and bool((numbers == numbers.round()).all())
        else:
            value = 0.0
    digests, is_by_place = digest(repr(seen.digests)), not seen.is_fresh and _is_by_place(seen.value)
    return OutsideValue(
        len(seen.digests), shape, seen.is_fresh, is_whole, digests, float(value), seen.may_be_size, is_by_place
    )


def _is_by_place(value: Any) -> bool:
    """Return whether a value is rows of a larger tensor that are not all alike, as a mask or labels of one class are.

    Whole numbers may be places of samples in their part.
    """
    if not isinstance(value, Tensor) or not value.ndim or not value.is_floating_point():
        return False
    if value.layout is not torch.strided or value.numel() * value.element_size() >= value.untyped_storage().nbytes():
        return False
    return bool((value.detach() != value.detach()[:1]).any())


def _digest_of(tensor: Tensor, most: int) -> int:
    values = tensor.detach()
    if values.layout is not torch.strided or values.device.type == "meta":
        return 1
    flat = values.reshape(-1)
    flat = flat[:: -(-flat.numel() // most)] if flat.numel() > most else flat
    if flat.device.type != "cpu":
        return digest(repr(sums_of([flat])))
    return zlib.crc32(flat.contiguous().view(torch.uint8).numpy().tobytes()) | 1


def tensors_in(batch: Any) -> Iterator[Tensor | float | None]:
    """Yield the tensors and numbers of a batch, which may be an object; None once it is too large to look through."""
    waiting, seen = [batch], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor) or type(each) is float:
            yield each
            continue
        if isinstance(each, str | bytes | int | type | None) or id(each) in seen:
            continue
        seen.add(id(each))
        if len(seen) > _MOST_PARTS:
            yield None
            return
        if isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, list | tuple | set):
            waiting.extend(each)
        waiting.extend((attributes_of(each) or {}).values())


def _place() -> tuple[str, str]:
    """Return a name for the lines that compute something now, equal in all ranks, and the program's own one."""
    frames = list(users_frames(_FRAMES))
    where = ":".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames[:2])
    own = next((frame for frame in frames if is_users(frame.f_code.co_filename)), frames[0] if frames else None)
    line = "" if own is None else linecache.getline(own.f_code.co_filename, own.f_lineno).strip()
    return where, line


def _name_of(value: Any) -> str:
    """Return the program's name for a value: a variable, or an attribute of one."""
    name = users_name(value)
    if name:
        return name
    for frame in users_frames(_FRAMES):
        if not is_users(frame.f_code.co_filename):
            continue
        for variables in (variables_of(frame), frame.f_globals):
            for name, each in list(variables.items()):
                if name.startswith("_"):
                    continue
                if type(each) is float and type(value) is float and each == value:
                    return name
                for attribute, held in list((attributes_of(each) or {}).items()):
                    if held is value or (type(held) is float and type(value) is float and held == value):
                        return f"{name}.{attribute}"
    return ""
