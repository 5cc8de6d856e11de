"""Follow a batch through a loop's operations, to find values of the whole batch that enter its loss. Runs in ranks.

A loss whose samples are weighed by ``s / s.sum()``, standardised by their mean, or picked by ``ce > ce.mean()`` is no
sum over samples, and its graph does not show it: such a value has no graph, or only its number is used. So the
operations of a loop's first batches are watched, down to those of torch itself. A tensor that was reduced over the
samples is `MIXED`; what is computed of its number, and not of its graph, is `HIDDEN`. What is computed of some samples
that were picked by their place, such as ``x[:10]`` or a chunk, is `PICKED`: a part of the batch has others there, and
fewer. So is a sample beside another one, as in ``x - x.flip(0)``: each tensor has the places at which its samples stood
in the batch, and tensors that meet have the same ones. An order that torch has drawn is noise. Graphs themselves are
read by `terms` and `sample_independence`, and a count that divides a loss by `gradient_weights`.

A tensor that has rows of the batch and rows of others, as of a memory, is `JOINED`: each part of the batch would have
all the others. It is known which rows are whose, so a loss may be of one kind of them alone. A term of a loss that
depends on a memory, or on points, and on no batch is the same with each part.

A number that leaves torch, as by ``.item()``, is followed by its value, where it comes back as a number or in a small
new tensor. NumPy and Python are not followed: once they have numbers of several samples, a new tensor of the batch's
length is `MADE`, maybe of several samples for each. One that has the same numbers as what has left is of the batch.
What enters a loss from outside of its batch is followed by `outside_values`, in these batches and in some later ones.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from nbaccel.base.notices import is_users
from nbaccel.train.distributed.callers import users_frames
from nbaccel.train.oom.microbatch.slicing import is_array
from nbaccel.train.raw_loop.node_kinds import names
from nbaccel.train.raw_loop.outside_values import OutsideUses, OutsideValues, SeenMemory, tensors_in
from nbaccel.train.raw_loop.terms import Term

__all__ = ["BatchWatch"]

BATCH, ONE, MIXED, COUNT, HIDDEN, PICKED, MADE, SOME, JOINED = 1, 2, 4, 8, 16, 32, 64, 128, 256
"""Marks of a tensor: it depends on the batch; on single samples only; it was reduced over samples; it is a sum of
samples that has no graph, such as a count; it depends on the number of a `MIXED` one; on samples picked by place; on
what was made outside of torch, after numbers of several samples had left it; its first dimension are some samples,
which a mask has picked; on samples together with others that are not of the batch."""

_REDUCING = names(
    "sum nansum mean prod amax amin max min aminmax median nanmedian mode kthvalue std var std_mean var_mean norm "
    "linalg_vector_norm any all count_nonzero logsumexp argmax argmin bincount histc"
)
_ALONG = names("_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin topk")
_PRODUCTS = names("mm bmm addmm baddbmm dot vdot mv")
_COLLECTED = names("scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_")
_SUMS = names("sum nansum count_nonzero")
_KEEP_COUNTS = names("clamp clamp_ clamp_min clamp_min_ maximum mul mul_ add add_ _to_copy clone")
_LEAST = names("clamp clamp_ clamp_min clamp_min_ maximum")
_JOINING = names("cat stack")
_WRITING = names("index_copy index_copy_ index_put index_put_ _index_put_impl_ scatter scatter_ slice_scatter")
_PICKING = names("index index_select gather take _unsafe_index embedding")
_ORDERING = names("flip roll sort index _unsafe_index index_select gather")
_DRAWING = names("randperm rand randn randint")
_KEEP_NOISE = names("_to_copy clone sort")
_FRESH = "lift_fresh"  # of memory that torch did not fill
_NEW = names("lift_fresh full scalar_tensor new_full fill fill_")
_UNKNOWN, _RAISED = -1.0, -2.0
"""Beside numbers of samples: those that NumPy or Python has, and a zero that was given a least value."""

_NUMBERS = ("b", "i", "u", "f")  # kinds of NumPy's types
_MOST_NEW = 4096
_MOST_SIZES = 16
_LONGEST_LINE = 60
_FRAMES = 6
_FEWEST = 2


class BatchWatch:
    """Watches the operations between a batch and its backwards.

    One object for each rank: `begin` with each batch that is to be watched, `end` with the next thing that happens.

    Args:
        watches: False makes one that watches nothing.
        is_trained: Whether ranks keep a tensor equal.

    Attributes:
        has_counts: Losses are divided by counts of samples, and not only by their number.
    """

    def __init__(self, watches: bool = True, is_trained: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self._watches = watches
        self._is_trained = is_trained
        self._has_least = self.has_counts = False
        self._trace: _Trace | None = None
        self._before: list[SeenMemory] = []
        self._by_mistake: dict[Hashable, bool] = {}
        self._ratios: dict[Hashable, float] = {}  # of others to samples, by the lines that have joined them

    @property
    def is_on(self) -> bool:
        """True while values of the whole batch are looked for."""
        return self._trace is not None and self._trace.marks

    @property
    def is_strict(self) -> bool:
        """True while what is found counts in any case, see `begin`."""
        return self._trace is not None and self._trace.marks and self._trace.like is None and self._trace.has_several

    def is_known(self, like: Hashable) -> bool:
        """Return whether a part like this one was examined, or as many others were as are kept."""
        return like in self._by_mistake or len(self._by_mistake) >= _MOST_SIZES

    @property
    def least(self) -> int:
        """1 if a count of samples may have been none here and given a least value, 2 if one was, else 0.

        It may where the loop has done so and a zero has left torch, or nothing is known of this batch.
        """
        trace = self._trace
        if not (self._has_least or (trace is not None and trace.has_least)):
            return 0
        if trace is None or not trace.counts:
            return 1
        return 2 if _RAISED in trace.counts else int(not trace.counts.isdisjoint((0.0, _UNKNOWN)))

    @property
    def is_open(self) -> bool:
        """True while a batch is watched."""
        return self._trace is not None

    def begin(self, batch: Any, rows: int, marks: bool = True, like: Hashable = None, has_turns: bool = False) -> None:
        """Watch what is computed of `batch`, which has `rows` samples, and of those that are watched already.

        Args:
            marks: Look for values of the whole batch, too, beside those from outside of it.
            like: Names the parts of batches like this one, whose loss was examined as a whole batch and had none. Of
                them the first shows what is found by mistake, as where a part equals another length by chance: if
                anything is, then no part like it is looked at.
            has_turns: The batch comes in several parts, one after the other.
        """
        if self._trace is not None and self._trace.only_counts:
            self.end()
        has_marks = self.is_on
        if not self._open(marks):
            return
        assert self._trace is not None
        if marks and (like is None or not has_marks):
            self._trace.like = like
        self._trace.marks = self._trace.marks or marks
        self._trace.has_turns |= has_turns
        self._trace.add(batch, rows)
        self.remember(batch)

    def forget(self) -> None:
        """Watch no longer, and forget what another task has joined."""
        self.end()
        self._ratios.clear()

    def count(self) -> None:
        """Watch nothing but counts, if one of the loop's may have a least value."""
        if self._has_least and self._trace is None:
            self._open(False, only_counts=True)

    def _open(self, marks: bool, only_counts: bool = False) -> bool:
        if self._trace is None and self._watches and _may_watch():
            self._trace = _Trace(marks, OutsideUses(self._is_trained), only_counts, self._ratios)
            self._trace.outside.add_memory(self._before)
            _tell_what_leaves(True)
            self._trace.__enter__()  # type: ignore[no-untyped-call]
        return self._trace is not None

    def add(self, batch: Any) -> None:
        """Note that another batch was handed out; it is none of what comes from outside."""
        if self._trace is not None:
            self._trace.has_unmarked = True
            self._trace.outside.add(batch)

    def remember(self, batch: Any, anew: bool = True) -> None:
        """Note the batch before one that is to be watched: loops that fetch ahead compute with it then.

        Args:
            anew: Forget others.
        """
        self._before = [] if anew else self._before
        for each in tensors_in(batch):
            with suppress(NotImplementedError, RuntimeError):
                if isinstance(each, Tensor):
                    self._before.append(SeenMemory(each.untyped_storage()))

    def outside(self, roots: Sequence[Tensor]) -> OutsideValues:
        """Return the values from outside of the batch on which the losses `roots` depend."""
        return OutsideValues({}) if self._trace is None else self._trace.outside.of(roots)

    def end(self) -> None:
        """Watch no longer. Calling this again has no effect."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._has_least = self._has_least or trace.has_least
            _leave(trace)
            _tell_what_leaves(False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch what is done meanwhile, such as a backward."""
        trace = self._trace
        if trace is None or _get_current_dispatch_mode() is not trace:
            yield
            return
        _leave(trace)
        try:
            yield
        finally:
            if self._trace is trace:
                trace.__enter__()  # type: ignore[no-untyped-call]

    def step_aside(self) -> None:
        """Do not watch what is done until `go_on`."""
        if self._trace is not None and self._trace.is_at_work:
            _leave(self._trace)
            self._trace.is_at_work = False

    def go_on(self) -> None:
        """Watch again, after `step_aside`."""
        if self._trace is not None and not self._trace.is_at_work:
            self._trace.is_at_work = True
            self._trace.__enter__()  # type: ignore[no-untyped-call]

    def are_apart(self, roots: Sequence[Tensor], terms: Sequence[Term]) -> list[bool]:
        """Return for each term of the losses `roots` whether it was seen to depend on no batch.

        It depends on a memory, on points that were drawn, or on a grid, and is the same with each part of a batch.
        """
        trace = self._trace
        return [] if trace is None or not trace.marks else trace.are_apart(roots, terms)

    def obstacle(self, roots: Sequence[Tensor]) -> str:
        """Return which value of the whole batch enters one of the losses `roots`; "" where none is known."""
        trace = self._trace
        if trace is None or not trace.marks:
            return ""
        if found := next((text for root in roots if (text := trace.joined_in(root))), ""):
            return found
        found = next((text for root in roots if (text := trace.obstacle_in(root))), "")
        return found if trace.like is None or not self._by_mistake.setdefault(trace.like, bool(found)) else ""


def _may_watch() -> bool:
    """Return whether operations can be watched without changing any.

    Not beside another dispatch mode, which the program may leave before ours. Before torch 2.9 a function that is first
    called under a mode is never compiled.
    """
    if _get_current_dispatch_mode() is not None:
        return False
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    is_safe = hasattr(TorchDispatchMode, "ignore_compile_internals")
    return is_safe or not getattr(dynamo, "cached_backends", None)


def _leave(trace: _Trace) -> None:
    """Leave the mode, also from below others that the program has entered since and not left."""
    above: list[Any] = []
    while (mode := _get_current_dispatch_mode()) is not None and mode is not trace:
        above.append(_pop_mode())
    if mode is trace:
        trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for each in reversed(above):
        _push_mode(each)


def _telling(name: str) -> Callable[..., Any]:
    """Return a method of tensors that tells the trace at work whose numbers it gives away."""
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(trace := _get_current_dispatch_mode(), _Trace):
            trace.note_leaves(tensor)
        return original(tensor, *args, **kwargs)

    return call


_TELLING = {name: _telling(name) for name in ("numpy", "tolist")}
"""In place of methods that no operation shows, while a batch is watched."""


def _tell_what_leaves(tells: bool) -> None:
    for name, method in _TELLING.items():
        if tells and name not in vars(Tensor):  # a library may have put its own there
            setattr(Tensor, name, method)
        elif not tells and vars(Tensor).get(name) is method:
            delattr(Tensor, name)


class _Mark(NamedTuple):
    """Marks of the memory of a tensor.

    Args:
        line: The line of the program that made it `MIXED`.
        extent: How many of its numbers are the batch's, or an operation's result.
        samples: Where its samples are, if they are all there.
        joined: Which of its rows are samples of the batch, where others are beside them.
        order: Their places in the batch, or an object of its own for places that are not known; () if they stand as
            they were given.
    """

    storage: SeenMemory
    bits: int
    line: str
    extent: int
    samples: _Samples | None = None
    order: Hashable = ()
    joined: _Joined | None = None


class _Samples(NamedTuple):
    """The samples in the memory of a tensor: where the first one begins, how far they are apart, how many they are."""

    start: int
    apart: int
    rows: int

    def touched_by(self, view: Tensor) -> set[int]:
        """Return the samples of which a view of this memory has numbers."""
        first, inside = divmod(int(view.storage_offset()) - self.start, self.apart)
        rows = {first % self.rows}
        for length, step in zip(view.shape, view.stride(), strict=True):
            if step % self.apart:
                inside += (length - 1) * step
            elif step:
                places = range(min(length, self.rows))
                rows = {(row + place * (step // self.apart)) % self.rows for row in rows for place in places}
        further = range(min(inside // self.apart + 1, self.rows))
        return {(row + more) % self.rows for row in rows for more in further}


class _Joined(NamedTuple):
    """The rows of a tensor that has samples of the batch beside others: where they are, and which are samples."""

    rows: _Samples
    own: frozenset[int]

    def dim_of(self, view: Tensor) -> int | None:
        """Return the dimension of `view` that has these rows, all of them, or as many for each; None if none does."""
        rows = self.rows
        for at, (length, step) in enumerate(zip(view.shape, view.stride(), strict=True)):
            if step and length * step == rows.rows * rows.apart and not rows.apart % step:
                return at
        return None

    def of(self, result: Tensor, dim: int) -> _Joined | None:
        """Return the same for what was computed of each row; None where `dim` does not have them any more."""
        if dim >= result.ndim or not result.shape[dim] or result.shape[dim] % self.rows.rows:
            return None
        each = result.shape[dim] // self.rows.rows
        return _Joined(_Samples(int(result.storage_offset()), result.stride(dim) * each, self.rows.rows), self.own)


class _Trace(TorchDispatchMode):
    """Marks the tensors that are computed of a batch. Tensors are known by their memory, which views share."""

    supports_higher_order_operators = True

    def __init__(self, marks: bool, outside: OutsideUses, only_counts: bool, ratios: dict[Hashable, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks, self.only_counts = marks, only_counts
        self.has_unmarked = False  # batches whose tensors have no marks
        self.has_turns = False  # the batch comes in several parts, maybe all of one size
        self.is_lost = False  # an operation could not be followed
        self._ratios = ratios
        self._apart: dict[Any, bool] = {}  # nodes whose values depend on no batch, and whether they were drawn
        self.like: Hashable = None
        self.counts: set[float] = set()  # what may be counts, of those that leave torch or are given a least value
        self.outside = outside
        self.is_at_work, self.has_least = True, False
        self._rows: set[int] = set()
        self._marks: dict[int, _Mark] = {}  # by storage
        self._left: dict[float, str] = {}  # numbers that have left torch, with the line they are of
        self._line = ""  # the last of these lines
        self._taken: list[Any] = []  # tensors, or arrays, of which NumPy or Python has the numbers
        self._ones: list[Any] = []  # numbers of single samples that it has
        self._drawn: dict[int, SeenMemory] = {}  # orders that were drawn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what is compiled is compiled under this mode, too."""
        return True

    def add(self, batch: Any, rows: int) -> None:
        self._rows.add(rows)
        if len(self._rows) > 1:
            self._rows.discard(1)
        self.outside.add(batch)
        for each in tree_leaves(batch):
            if isinstance(each, Tensor):
                if self._axis(each.shape) is not None:
                    self._mark(each, BATCH, "")
                else:
                    self.has_unmarked = True
            elif is_array(each) and getattr(each.dtype, "kind", "") in _NUMBERS:
                self._taken.append(each)
            elif not isinstance(each, str | bytes | int | float | None):
                self.has_unmarked = True

    @property
    def has_several(self) -> bool:
        """True unless a batch is a single sample, which shows nothing of others."""
        return min(self._rows, default=0) >= _FEWEST

    def are_apart(self, roots: Sequence[Tensor], terms: Sequence[Term]) -> list[bool]:
        """Return for each term whether it depends on no batch; False where that is not sure.

        Of numbers that were drawn there may be some for each sample: where a batch comes in turns, their count tells.
        """
        self._note_apart(roots)
        if self.is_lost or self.has_unmarked or self._taken or self._ones:
            return []
        found = []
        for term in terms:
            is_drawn = self._apart.get(term.node)
            numbers = term.elements or term.count
            is_counted = isinstance(numbers, int | float) and bool(numbers % min(self._rows))
            found.append(is_drawn is not None and (not is_drawn or not self.has_turns or is_counted))
        return found

    def _note_apart(self, inputs: Sequence[Tensor]) -> None:
        """Note the nodes of single numbers that depend on no batch."""
        for each in inputs:
            if each.numel() == 1 and each.grad_fn is not None and not self._read(each)[0]:
                is_of_memory, is_drawn = self.outside.is_of_memory(each)
                if is_of_memory or is_drawn or self.outside.is_of_a_grid(each):
                    self._apart[each.grad_fn] = is_drawn

    def joined_in(self, tensor: Tensor) -> str:
        """Return where others were joined with the samples that `tensor` depends on; "" if none were."""
        bits, line = self._read(tensor)
        return f"samples that are not of the batch are joined with it ({line})" if bits & JOINED else ""

    def obstacle_in(self, tensor: Tensor) -> str:
        """Return the value of the batch that `tensor` depends on, with its line; "" if it depends on none."""
        bits, line = self._read(tensor)
        if not self.has_several:
            return ""
        if bits & HIDDEN:
            return f"its loss uses a number of the whole batch ({line or 'a statistic'})"
        if bits & MADE:
            return f"its loss uses what NumPy or Python made of its samples, maybe of several together ({line})"
        return f"samples that are picked by their place in the batch ({line})" if bits & PICKED else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bits, name = 0, func._schema.name.partition("::")[2]
        if name in _LEAST or name == "_local_scalar_dense":
            with suppress(Exception):  # an operation that cannot be followed is the program's even so
                self._note_counts(name, args)
        if self.only_counts:
            return func(*args, **(kwargs or {}))
        with suppress(Exception):
            bits = self.outside.before(func, name, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        with suppress(Exception):
            if name == "_local_scalar_dense":
                self.outside.note_left(args[0], result, bool(self._read(args[0])[0]))
            self.outside.after(func, name, result, bits)
            if name in _DRAWING or (name in _KEEP_NOISE and self._is_drawn(args[0])):
                for each in tree_leaves(result):
                    self._drawn[_key(each)] = SeenMemory(each.untyped_storage())
            if self.marks:
                self.is_lost = not self._follows(func, args, kwargs or {}, result) or self.is_lost
        return result

    def _follows(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Follow an operation, and return whether that was possible."""
        try:
            self._follow(func, args, kwargs, result)
        except Exception:  # an operation that cannot be followed is the program's even so
            return False
        return True

    # -- one operation

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        marked = [(each, *found) for each in inputs if (found := self._read(each))[0]]
        self._note_apart(inputs)
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            self._note_left(marked, result)
            return
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        hidden = self._comes_back(name, args, kwargs, results) if self._line else ""
        new = 0 if hidden or name != _FRESH else self._bits_of_new(results[0])
        is_view = func.is_view and not func._schema.is_mutable and not (hidden or new)
        if not (marked or hidden or new) or not results or is_view:
            return
        self.has_least = self.has_least or (name in _LEAST and any(its & COUNT for _, its, _ in marked))
        bits = HIDDEN | BATCH if hidden else new
        line = hidden or next((each[2] for each in marked if each[2]), "")
        has_graph = torch.is_grad_enabled() and any(each.is_floating_point() for each in results) and name != "detach"
        bits |= self._own_bits(func, name, args, kwargs, marked, results)
        along = (_dims_of(func, args, kwargs) or [0])[0]
        is_joined = name in _JOINING and results[0].shape[along] in self._rows
        if not is_joined and (any(its & PICKED for _, its, _ in marked) or self._picks(name, args, marked, results)):
            bits |= PICKED
        orders = self._orders(func, args, kwargs, inputs, results)
        bits |= PICKED if len(orders) > 1 else 0
        order = orders.pop() if orders else ()
        joined, is_beside = self._joined(name, args, along, marked, results)
        bits |= JOINED if is_beside or joined is not None else 0
        if bits & (MIXED | PICKED | MADE | JOINED) and not line:
            line = _users_line()
        for at, (tensor, its, _) in enumerate(marked):
            bits |= its & (HIDDEN | MADE)
            is_number_used = its & MIXED and not (has_graph and tensor.requires_grad) and not bits & COUNT
            if is_number_used and not _divides_a_loss(name, args, marked, at):
                bits |= HIDDEN
        for at, each in enumerate(results):
            its_order = object() if at and order and name == "sort" else order  # where they were
            self._mark(each, bits, line, its_order, None if joined is None else joined[at])

    def _own_bits(
        self, func: Any, name: str, args: Any, kwargs: Any, marked: Sequence[tuple[Tensor, int, str]], results: Any
    ) -> int:
        """Return the marks of a result, except for `HIDDEN`."""
        together = 0
        for _, its, _ in marked:
            together |= its
        of_one = [its & ONE or self._is_one(tensor) for tensor, its, _ in marked]
        bits = together & (BATCH | MIXED) | self._has_some(name, args, marked, results)
        if marked and all(of_one) and not (name in _JOINING and len(marked) > 1):
            return bits | ONE
        is_mixed = bool(marked) and self._mixes(func, name, args, kwargs, [each[0] for each in marked], results)
        is_count = len(results) == 1 and results[0].numel() == 1
        if is_mixed:
            bits |= MIXED
            is_first = not together & (MIXED | HIDDEN) and not any(tensor.requires_grad for tensor, *_ in marked)
            return bits | (COUNT if is_count and is_first and name in _SUMS else 0)
        is_of_counts = is_count and bool(marked) and all(its & COUNT for _, its, _ in marked)
        is_kept = name in _KEEP_COUNTS or (name in ("div", "div_") and len(marked) == 1 and args[0] is marked[0][0])
        is_kept = is_kept and not (name in ("mul", "mul_") and len(marked) > 1)
        return bits | (COUNT if is_of_counts and is_kept else 0)

    def _mixes(
        self, func: Any, name: str, args: Any, kwargs: Any, marked: Sequence[Tensor], results: Sequence[Tensor]
    ) -> bool:
        """Return whether an operation computes with several samples at once."""
        tensor = marked[0]
        if name in _REDUCING:
            if len(args) > 1 and isinstance(args[1], Tensor):
                return name == "bincount"  # otherwise `maximum`, elementwise
            dims = _dims_of(func, args, kwargs)
            if dims and self._read(tensor)[0] & SOME and 0 in {dim % max(1, tensor.ndim) for dim in dims}:
                return tensor.numel() > 1
            return self._covers(tensor, None if name in ("bincount", "histc", "median") and dims is None else dims)
        if name in _ALONG:
            dims = _dims_of(func, args, kwargs)
            return self._covers(tensor, [-1] if dims is None else dims)
        if name in _PRODUCTS and len(marked) > 1:
            one = marked[-2]
            inner, shape = one.shape[-1], results[0].shape
            is_summed = self._is_of_samples(inner) and not self._is_of_samples(one.shape[0])
            return is_summed or (name == "mm" and all(map(self._is_of_samples, shape)))
        if name in _COLLECTED:
            source = next((each for each in reversed(marked) if each.ndim), None)
            is_along = source is not None and source.shape[0] in self._rows and args[1] == 0
            return is_along and results[0].shape[0] not in self._rows
        return False

    def _has_some(
        self, name: str, args: Any, marked: Sequence[tuple[Tensor, int, str]], results: Sequence[Tensor]
    ) -> int:
        """Return `SOME` if a result has samples that a mask has picked, along its first dimension."""
        if not (marked and results[0].ndim):
            return 0
        (tensor, *_), length = marked[0], results[0].shape[0]
        if name in ("index", "masked_select") and args[0] is tensor and length not in self._rows:
            mask = args[1] if name == "masked_select" else args[1][0]
            return SOME if self._axis(tensor.shape) == 0 and mask is not None and mask.dtype == torch.bool else 0
        return SOME if any(its & SOME and each.ndim and each.shape[0] == length for each, its, _ in marked) else 0

    def _picks(
        self, name: str, args: Any, marked: Sequence[tuple[Tensor, int, str]], results: Sequence[Tensor]
    ) -> bool:
        """Return whether an operation takes samples by numbers that do not depend on them."""
        if name not in _PICKING or len(marked) != 1:
            return False
        (tensor, *_), shape = marked[0], results[0].shape
        at = next((at for at, length in enumerate(tensor.shape) if length in self._rows), len(shape))
        is_known = self._marks[_key(tensor)].samples is not None and any(each is tensor for each in args[:2])
        return is_known and at < len(shape) and shape[at] not in self._rows

    # -- samples beside others

    def _joined(
        self,
        name: str,
        args: Any,
        along: int,
        marked: Sequence[tuple[Tensor, int, str]],
        results: Sequence[Tensor],
    ) -> tuple[list[_Joined | None] | None, bool]:
        """Return which rows of each result are samples, where others are beside them, and whether they are at all."""
        if any(its & JOINED for _, its, _ in marked):
            return self._still_joined(name, marked, results), True
        if name in _JOINING:
            found = self._joined_by(name, args[0], along % results[0].ndim, results[0])
        elif name == "constant_pad_nd":
            found = self._padded(args[0], args[1], results[0])
        elif name == "copy_":
            found = self._written_to(args[0], args[1])
        elif name in _WRITING:
            return None, self._is_written_to(args, [tensor for tensor, its, _ in marked if its & BATCH])
        else:
            return None, False
        return (None if found is None else [found]), found is not None

    def _still_joined(
        self, name: str, marked: Sequence[tuple[Tensor, int, str]], results: Sequence[Tensor]
    ) -> list[_Joined | None] | None:
        """Return which rows of the results of an operation are samples, if it has computed each row by itself."""
        found: list[tuple[_Joined, int]] = []
        for tensor, its, _ in marked:
            joined = self._marks[_key(tensor)].joined if its & JOINED else None
            dim = None if joined is None else joined.dim_of(tensor)
            if its & JOINED and (joined is None or dim is None):
                return None
            if joined is not None and dim is not None:
                found.append((joined, dim))
        (first, at), *others = found
        if any((each.own, each.rows.rows, dim) != (first.own, first.rows.rows, at) for each, dim in others):
            return None
        is_moved = name in _JOINING | _ORDERING | _PICKING
        return None if is_moved else [first.of(each, at) for each in results]

    def _joined_by(self, name: str, tensors: Sequence[Tensor], along: int, result: Tensor) -> _Joined | None:
        """Return which rows are samples where tensors are joined; None where all are, or none is."""
        lengths = [1 if name == "stack" else each.shape[along] for each in tensors]
        kinds = [self._is_own(name, each, along) for each in tensors]
        own = [length for length, is_own in zip(lengths, kinds, strict=True) if is_own]
        if not own or None in kinds:
            return None
        are_others = [
            is_own is False and self._are_others(each, along, length, own[0], at)
            for at, (each, length, is_own) in enumerate(zip(tensors, lengths, kinds, strict=True))
        ]
        if not any(are_others):
            return None
        whose = [is_other for length, is_other in zip(lengths, are_others, strict=True) for _ in range(length)]
        rows = _Samples(int(result.storage_offset()), result.stride(along), len(whose))
        return _Joined(rows, frozenset(at for at, is_other in enumerate(whose) if not is_other))

    def _is_own(self, name: str, tensor: Tensor, along: int) -> bool | None:
        """Return whether a tensor's rows along a dimension are samples; None if they are of samples, and none."""
        bits = self._read(tensor)[0]
        if not bits:
            return False
        if name == "stack":
            return True if bits & ONE or self._is_one(tensor) else None
        if bits & (MIXED | ONE) or self._axis(tensor.shape) != along:
            return None
        is_certain = tensor.shape[along] in self._rows and sum(length in self._rows for length in tensor.shape) == 1
        is_sample = tensor.shape[along] in self._rows or self.has_several
        return True if is_sample and (self.like is None or is_certain) else None

    def _are_others(self, tensor: Tensor, along: int, length: int, own: int, at: int) -> bool:
        """Return whether rows that are not of the batch are as many with each part of it, or the same ones.

        Otherwise there is one for each sample, as noise and labels are.
        """
        is_of_memory, is_drawn = self.outside.is_of_memory(tensor)
        if not self._is_of_samples(length):
            return is_of_memory or not self.has_unmarked
        ratio = length / own
        if self._ratios.setdefault((*_users_places()[:2], at), ratio) != ratio:
            return True
        if is_drawn or not is_of_memory:
            return self.has_turns and length != own and (is_of_memory or not self.has_unmarked)
        rows = tensor.detach()
        return bool((rows != (rows if rows.ndim <= along else rows.narrow(along, 0, 1))).any())

    def _padded(self, tensor: Tensor, pads: Sequence[int], result: Tensor) -> _Joined | None:
        """Return which rows are samples after others of one value were added to them."""
        at = self._axis(tensor.shape)
        if at is None or not self._is_own("cat", tensor, at) or tensor.shape[at] >= result.shape[at]:
            return None
        before = pads[2 * (tensor.ndim - 1 - at)]
        rows = _Samples(int(result.storage_offset()), result.stride(at), result.shape[at])
        return _Joined(rows, frozenset(range(before, before + tensor.shape[at])))

    def _written_to(self, view: Tensor, source: Tensor) -> _Joined | None:
        """Return which rows of a larger tensor are samples, where a view of it was overwritten with samples."""
        base, at = view._base, self._axis(view.shape)
        if base is None or at is None or not self._is_own("cat", source, self._axis(source.shape) or 0):
            return None
        known = self._marks.get(_key(base))
        if known is not None and not known.storage.has_gone() and known.joined is None:
            return None
        dim = next((dim for dim, step in enumerate(base.stride()) if step == view.stride(at)), None)
        if dim is None or base.shape[dim] <= view.shape[at]:
            return None
        rows = _Samples(int(base.storage_offset()), base.stride(dim), base.shape[dim])
        before = known.joined.own if known is not None and known.joined is not None else frozenset()
        return _Joined(rows, before | rows.touched_by(view))

    def _is_written_to(self, args: Any, marked: Sequence[Tensor]) -> bool:
        """Return whether samples are written into a tensor that has more rows than there are."""
        into, source = args[0], next((each for each in reversed(args) if isinstance(each, Tensor)), None)
        if source is None or source is into or not any(each is source for each in marked) or self._read(into)[0]:
            return False
        at = self._axis(source.shape)
        is_own = at is not None and self._is_own("cat", source, at)
        return bool(is_own) and at is not None and at < into.ndim and into.shape[at] != source.shape[at]

    def _orders(
        self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> set[Hashable]:
        """Return the orders of samples that meet in a result; more than one if samples stand beside others."""
        name, tensor, index = func._schema.name.partition("::")[2], args[0] if args else None, None
        found: set[Hashable] = set()
        if name in _ORDERING and isinstance(tensor, Tensor) and (own := self._order_of(tensor)) is not None:
            dims = _dims_of(func, args, kwargs)
            places, index = self._places(name, args, dims, tensor, results)
            if places is not None:
                columns = places.reshape(len(places), -1)
                if bool((columns != columns[:, :1]).any()):
                    return {own, object()}  # other samples for each number of one
                at = columns[:, 0].tolist()
                own = tuple(own[place] for place in at) if isinstance(own, tuple) and own else tuple(at)
                own = () if own == tuple(range(len(at))) else own
            inputs, found = [each for each in inputs if each is not tensor and each is not index], {own}
        return found | {order for each in inputs if (order := self._order_of(each)) is not None}

    def _order_of(self, tensor: Tensor) -> Hashable | None:
        """Return the order of the samples of a tensor; of an unmarked one, if its numbers are places in another.

        A packed sequence has no dimension for its samples, and their order.
        """
        axis = self._axis(tensor.shape)
        mark = self._marks.get(_key(tensor))
        if mark is not None and not mark.storage.has_gone():
            is_single = axis is not None or not mark.bits & MIXED
            return mark.order if is_single and mark.bits & BATCH else None
        if axis is None:
            return None
        length, is_number = tensor.shape[axis], tensor.is_floating_point() or tensor.dtype == torch.bool
        if is_number or length not in self._rows or self._is_drawn(tensor):
            return None
        numbers = tensor.movedim(axis, 0).reshape(length, -1)[:, 0].tolist()
        return tuple(numbers) if numbers != sorted(numbers) and sorted(numbers) == [*range(length)] else None

    def _places(
        self, name: str, args: Any, dims: Sequence[int] | None, tensor: Tensor, results: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return where an operation takes its samples from, with the argument that says so; None if they stay.

        They stay, too, in an order that was drawn.
        """
        axis = self._axis(tensor.shape)
        shape = results[0].shape
        if axis is None or len(shape) <= axis or shape[axis] != tensor.shape[axis]:
            return None, None
        places = torch.arange(shape[axis], device=tensor.device)
        along = {dim % tensor.ndim for dim in dims or [-1]}
        if name in ("flip", "roll"):
            along = {dim % tensor.ndim for dim in (args[-1] if name == "flip" or len(args) > 2 else range(tensor.ndim))}
            shifts = dict(zip(sorted(along), args[1], strict=False)) if name == "roll" else {}
            moved = places.flip(0) if name == "flip" else places.roll(shifts.get(axis, 0))
            return (moved, None) if axis in along else (None, None)
        if name == "sort":
            return (results[1].movedim(axis, 0), None) if axis in along else (None, None)
        if name in ("index_select", "gather"):
            index = args[2] if args[1] % tensor.ndim == axis else None
        else:
            index = args[1][axis] if len(args[1]) > axis else None
        if index is None or index.dtype == torch.bool or self._is_drawn(index):
            return None, index
        return index.movedim(axis, 0) if index.ndim == tensor.ndim and name == "gather" else index, index

    def _is_drawn(self, tensor: Any) -> bool:
        drawn = self._drawn.get(_key(tensor)) if isinstance(tensor, Tensor) else None
        return drawn is not None and not drawn.has_gone()

    def _covers(self, tensor: Tensor, dims: Sequence[int] | None) -> bool:
        """Return whether `dims` of a tensor, or all of it for None, contain several samples."""
        if not tensor.ndim or tensor.numel() < 2:
            return False
        if not dims:
            return True
        axis = self._axis(tensor.shape)
        return axis is not None and axis in {dim % tensor.ndim for dim in dims}

    def _axis(self, shape: Sequence[int]) -> int | None:
        """Return the dimension that counts samples; None if there is none."""
        for at, length in enumerate(shape):
            if length in self._rows:
                return at
        return 0 if shape and self._is_of_samples(shape[0]) else None

    def _is_of_samples(self, length: int) -> bool:
        return length > 0 and any(length % rows == 0 for rows in self._rows)

    def _is_one(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of one sample of a larger tensor."""
        mark = self._marks[_key(tensor)]
        return tensor.numel() * min(self._rows) <= mark.extent and tensor.is_contiguous()

    # -- numbers that leave torch

    def _note_left(self, marked: Sequence[tuple[Tensor, int, str]], value: Any) -> None:
        """Note a number of the batch that becomes one of Python's."""
        for _, bits, line in marked:
            if not bits & (MIXED | HIDDEN):
                self._ones.append(value)
            self.has_least = self.has_least or bool(bits & COUNT)
            if bits & (MIXED | HIDDEN) and (type(value) is float or bits & COUNT) and type(value) is not bool:
                self._line = line or "a statistic"
                if value != round(value):
                    self._left[value] = self._line

    def _comes_back(self, name: str, args: Any, kwargs: Any, results: Sequence[Tensor]) -> str:
        """Return the line of a number that has left, if it comes back; as part of a new tensor that may be."""
        for each in (*args, *kwargs.values()):
            if type(each) is float and each in self._left:
                return self._left[each]
        if name in _NEW and results and results[0].is_floating_point() and results[0].numel() <= _MOST_NEW:
            values = results[0].detach()
            if self._axis(values.shape) is None and bool((values != values.round()).any()):
                return self._line
        return ""

    def _note_counts(self, name: str, inputs: Sequence[Any]) -> None:
        for each in inputs:
            is_number = type(each) is Tensor and each.numel() == 1 and not each.is_meta  # of no compiler, or vmap
            if is_number and not each.requires_grad and each.dtype != torch.bool:
                self.counts.add(_RAISED if name in _LEAST and not each else float(each))

    def note_leaves(self, tensor: Tensor) -> None:
        """Note a tensor whose numbers NumPy or Python takes."""
        self.counts.add(_UNKNOWN)
        self.has_least = self.has_least or self.marks
        self.outside.note_leaves(tensor)
        if self.marks and tensor.numel() > 1 and self._read(tensor)[0] & BATCH:
            self._taken.append(tensor)

    def _bits_of_new(self, tensor: Tensor) -> int:
        """Return the marks of a tensor whose memory torch has not filled; of the batch's length, it may be `MADE`."""
        if not (self._taken or len(self._ones) > 1) or self._axis(tensor.shape) is None:
            return 0
        numbers = tensor.detach().reshape(-1)
        taken = [torch.as_tensor(each, device="cpu").detach() for each in self._taken]
        if any(torch.equal(each.to(numbers).reshape(-1), numbers) for each in taken if each.numel() == len(numbers)):
            return BATCH
        return BATCH if self._ones[-len(numbers) :] == numbers.tolist() else BATCH | MADE

    # -- marks

    def _read(self, tensor: Tensor) -> tuple[int, str]:
        found = self._marks.get(_key(tensor))
        if found is None or found.storage.has_gone():
            return 0, ""
        samples, has_fewer = found.samples, 0 < tensor.numel() < found.extent
        # Of a tensor with a graph, `sample_independence` finds it: recurrent cells take fewer samples on purpose.
        if found.joined is not None:
            rows = found.joined.rows.touched_by(tensor)
            if not rows & found.joined.own:
                return 0, ""
            return (found.bits & ~JOINED if rows == found.joined.own else found.bits), found.line
        if samples is not None and has_fewer and not tensor.requires_grad:
            return found.bits | (PICKED if len(samples.touched_by(tensor)) < samples.rows else 0), found.line
        return found.bits, found.line

    def _mark(self, tensor: Tensor, bits: int, line: str, order: Hashable = (), joined: _Joined | None = None) -> None:
        storage = tensor.untyped_storage()
        before = self._marks.get(storage._cdata)
        extent, samples = tensor.numel(), self._samples_of(tensor) if bits & ~(COUNT | SOME) == BATCH else None
        if before is not None and not before.storage.has_gone():
            bits, line = bits | self._read(tensor)[0] | before.bits & JOINED, before.line or line
            extent, samples = max(extent, before.extent), before.samples
            joined = before.joined if joined is None else joined
        self._marks[storage._cdata] = _Mark(SeenMemory(storage), bits, line, extent, samples, order, joined)

    def _samples_of(self, tensor: Tensor) -> _Samples | None:
        """Return where the samples of a new tensor are; None if no dimension has their number."""
        at = next((at for at, length in enumerate(tensor.shape) if length in self._rows), None)
        if at is None or not tensor.stride(at):
            return None
        return _Samples(int(tensor.storage_offset()), tensor.stride(at), tensor.shape[at])


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without memory
        return 0


def _dims_of(func: Any, args: Any, kwargs: Any) -> Sequence[int] | None:
    """Return the argument `dim` of an operation; None if it is not given."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            dims = kwargs.get("dim", args[at] if at < len(args) else None)
            return dims if dims is None or isinstance(dims, (list, tuple)) else [dims]
    return None


def _divides_a_loss(name: str, args: Any, marked: Sequence[tuple[Tensor, int, str]], at: int) -> bool:
    """Return whether the marked input at `at` is a count by which a single number with a graph is divided."""
    tensor, bits, _ = marked[at]
    if name not in ("div", "div_") or not bits & COUNT or tensor.numel() != 1 or len(args) < 2:
        return False
    return args[1] is tensor and args[0].requires_grad and args[0].numel() == 1


def _users_places() -> list[tuple[str, int]]:
    """Return the lines that compute something now."""
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in users_frames(_FRAMES)]


def _users_line() -> str:
    """Return the source of the line that computes something now: of the notebook, or else of the innermost library."""
    frames = _users_places()
    own = [place for place in frames if is_users(place[0])] or frames
    line = linecache.getline(*own[0]).strip() if own else ""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
