"""UpdatesByHand: finds parameters that change, rank by rank, without a step of torch's optimizers. Runs in ranks.

``p -= lr * p.grad`` is such an update; so are the optimizers of fastai and of Keras. All of them need a backward. So at
the beginning of some backwards, the ranks compare a number for the values that the backward reaches and that nothing is
known to synchronise, if these have changed since the last comparison. It ends with the first verdict; then
`torch.autograd.backward` is torch's own again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from nbaccel.errors import NotPrepared
from nbaccel.launch.rank.parameters import fingerprint, number

__all__ = ["Judge", "UpdatesByHand"]

_MOST_EMPTY = 3  # comparisons that found only synchronised values: the loop does no updates by hand
_LOOKS = frozenset({1, *(2**power + 1 for power in range(10))})
"""Numbers of the backwards before which values are read: the 1st, to know what changes, then 2, 3, 5 ... 513."""


class Judge(Protocol):
    """Knows the other work of the ranks, and reports the findings."""

    def has_exchanged(self) -> bool:
        """Return whether this rank has entered a collective in this task."""

    def settled(self) -> set[int]:
        """Return ids of parameters that something synchronises, or whose optimizers have been judged already."""

    def keeps(self, leaf: Any) -> bool:
        """Return whether the watch of this task keeps `leaf` equal in all ranks."""

    def compare_values(self, key: int, found: int) -> tuple[list[int], list[int]]:
        """Return the peers whose values differ at `key`, and those that did not answer in time."""

    def refuse_values(self, apart: list[int]) -> None:
        """Raise for parameters that differ."""

    def say_apart(self, apart: list[int]) -> None:
        """Warn of other tensors that differ."""

    def say_same(self, is_model: bool) -> None:
        """Warn of the same work in all ranks."""


class UpdatesByHand:
    """Watches the backwards of one task."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._count = 0
        self._empty = 0
        self._before: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id: reached leaves, and their values
        self._original: Callable[..., Any] | None = None
        self._watched: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Begin a task; also called with `torch.autograd` when it is imported later."""
        self.end()
        autograd: Any = sys.modules.get("torch.autograd")
        if autograd is None:
            return
        self._count = self._empty = 0
        original = self._original = autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._watched is not None:
                self._count += 1
                if self._count in _LOOKS:
                    self._try_to_look(tensors)
            return original(tensors, *args, **kwargs)

        self._watched = autograd.backward = watched

    def end(self) -> None:
        """Stop watching."""
        autograd: Any = sys.modules.get("torch.autograd")
        if autograd is not None and self._watched is not None and autograd.backward is self._watched:
            autograd.backward = self._original  # else other code has wrapped it, and `watched` only passes calls on
        self._watched = self._original = None
        self._before.clear()

    def _try_to_look(self, tensors: Any) -> None:
        """Compare the values that this backward reaches.

        Raises:
            NotPrepared: by the judge. A type of tensor that cannot be compared is not the program's error.
        """
        try:
            self._look(tensors)
        except NotPrepared:
            raise
        except Exception:
            self.end()

    def _look(self, tensors: Any) -> None:
        settled = self._judge.settled()
        leaves = [leaf for leaf in _leaves(tensors) if id(leaf) not in settled and not self._is_kept(leaf)]
        self._empty += not leaves
        if self._empty == _MOST_EMPTY or self._count == max(_LOOKS):
            self.end()
            return
        values = [(leaf, fingerprint([leaf]) or 0) for leaf in leaves]
        known = [(leaf, value) for leaf, value in values if self._is_known(leaf)]
        has_changed = any(self._before[id(leaf)][1] != value for leaf, value in known)
        self._before |= {id(leaf): (weakref.ref(leaf), value) for leaf, value in values}
        if not has_changed:
            return
        found = number(repr([value for _, value in known]).encode())
        key = number(f"by hand {self._count}".encode()) ^ 1  # even, where numbers of optimizers' steps are odd
        apart, missing = self._judge.compare_values(key, found)
        self.end()
        is_model = any(isinstance(leaf, sys.modules["torch"].nn.Parameter) for leaf, _ in known)
        if apart and is_model:
            self._judge.refuse_values(apart)
        elif apart:
            self._judge.say_apart(apart)
        elif not missing and not self._judge.has_exchanged():
            self._judge.say_same(is_model=is_model)

    def _is_kept(self, leaf: Any) -> bool:
        return _is_sharded(leaf) or self._judge.keeps(leaf)

    def _is_known(self, leaf: Any) -> bool:
        """Return whether a backward that was watched has reached the leaf before."""
        known = self._before.get(id(leaf))
        return known is not None and known[0]() is leaf


def _is_sharded(leaf: Any) -> bool:
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(leaf, tensors.DTensor)


def _leaves(tensors: Any) -> Iterator[Any]:
    """Yield the tensors that get gradients by a backward from `tensors`."""
    roots = [tensors] if hasattr(tensors, "grad_fn") else list(tensors)
    nodes = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
