"""Classify autograd nodes by their operations, and read the shapes of their values. Runs in ranks.

A loss is read by its graph (`terms`), and so is what lies below its terms (`sample_independence`): both ask for the
operation of a node and the shapes of its values, and group operations in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

__all__ = [
    "COUNTED",
    "DISTANCES",
    "ELEMENTWISE",
    "GATHERED",
    "LEAF",
    "LOSSES_OF_ROWS",
    "MEANS",
    "PICKS",
    "PRODUCTS",
    "REDUCING",
    "REDUCTIONS",
    "SAME",
    "SUMS",
    "VIEWS",
    "WITH_REDUCTION",
    "from_below",
    "kind_of",
    "names",
    "shape_at",
    "signed",
]


def names(words: str) -> frozenset[str]:
    """Return the kinds in `words`, as `kind_of` gives them.

    Example:
        >>> sorted(names("Sum Nansum"))
        ['Nansum', 'Sum']
    """
    return frozenset(words.split())


LEAF = "torch::autograd::AccumulateGrad"
MEANS, SUMS, PRODUCTS = names("Mean"), names("Sum Nansum"), names("Dot Vdot Mm Bmm")  # products of one element
COUNTED = names("NllLoss NllLoss2D")
LOSSES_OF_ROWS = names("MultiMarginLoss MultilabelMarginLoss")  # their means count rows, not elements
DISTANCES = names("MseLoss SmoothL1Loss HuberLoss")
WITH_REDUCTION = COUNTED | LOSSES_OF_ROWS | DISTANCES
WITH_REDUCTION |= names("BinaryCrossEntropy BinaryCrossEntropyWithLogits KlDiv SoftMarginLoss")
REDUCTIONS = MEANS | SUMS | PRODUCTS | WITH_REDUCTION
VIEWS = names("View UnsafeView ReshapeAlias Squeeze Unsqueeze Permute Transpose T Expand")
SAME = VIEWS | names("Clone Alias ToCopy AsStrided torch::autograd::CopyBackwards")
GATHERED = names("Stack Cat GatherBackward")  # the last is DataParallel's

ELEMENTWISE = DISTANCES | names(
    "Add Sub Rsub Mul Div Neg Pow Abs Sqrt Rsqrt Exp Expm1 Log Log1p Log2 Reciprocal Sigmoid LogSigmoid Tanh Softplus "
    "Relu Clamp ClampMin ClampMax Sgn Sign Erf Sin Cos Maximum Minimum"
)
REDUCING = MEANS | SUMS
REDUCING |= names("Norm LinalgVectorNorm Amax Amin Max Min Logsumexp Softmax LogSoftmax Std Var Prod Trace")
PICKS = names("Embedding EmbeddingBag Index IndexSelect Gather")


@cache
def _without_overload(name: str) -> str:
    stem, _, number = name.partition("Backward")
    return stem if number.isdigit() else name


def kind_of(node: Any) -> str:
    """Return the operation of a node without its overload, "Mean"; for a Python function its name, "MineBackward"."""
    return _without_overload(node.name())


def shape_at(edge: tuple[Any, int]) -> tuple[int, ...]:
    """Return the shape of a value, which is an output of a node; () where it is not known."""
    node, output = edge
    try:
        return tuple(node._input_metadata[output].shape)
    except (AttributeError, IndexError, RuntimeError):  # a nested tensor has none
        return ()


def from_below(tops: Iterable[Any]) -> list[Any]:
    """Return all nodes of the graph, each after those below it."""
    order, seen = [], set()
    waiting = [(node, False) for node in tops]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting.extend((child, False) for child, _ in node.next_functions if child is not None)
    return order


def signed(index: int) -> int:
    """Return `index` as a signed number, since autograd shows negative numbers as unsigned ones."""
    return index - 2**64 if index >= 2**63 else index
