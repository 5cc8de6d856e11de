"""Terms: splits a loss into a sum by reading its graph from the root to the reductions over samples. Runs in ranks.

Ranks that each have a part of the batch have gradients of other losses than that of the whole batch: a mean over 3
samples is not one over 8. Where a loss is a sum of terms, each a mean or a sum over samples, the gradient of the whole
batch is the sum of each term's gradient in each rank, times a number that follows from the two divisors (`Term`). A
graph of another form has an obstacle, in words. Nothing here knows ranks, and nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from nbaccel.base.values import frozen
from nbaccel.train.raw_loop.node_kinds import (
    COUNTED,
    DISTANCES,
    ELEMENTWISE,
    GATHERED,
    LEAF,
    LOSSES_OF_ROWS,
    PICKS,
    PRODUCTS,
    REDUCING,
    REDUCTIONS,
    SAME,
    SUMS,
    VIEWS,
    WITH_REDUCTION,
    kind_of,
    names,
    shape_at,
    signed,
)

__all__ = ["LossTerms", "Scalar", "Term", "read"]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One reduction over samples in the graph of a loss.

    Args:
        node: The autograd node of the reduction.
        count: The divisor of the reduction itself: the elements of a mean, the total weight of `nll_loss` (a 0-d
            tensor); None for a sum. Counts of parts sum to the count of the whole.
        constant: The product of the divisors of the term between the reduction and the root; negative where it is
            subtracted. A 0-d tensor where the number is on a device; infinite there where the loss is multiplied by
            zero.
        is_of_parameters: It is computed from parameters alone, such as a weight decay, without a batch. One row of a
            one-element tensor looks the same, so the reading of the largest batch decides.
        elements: How many numbers a sum adds; 0 for other terms.
        is_zero: It is multiplied by a zero, which `constant` does not contain.
    """

    node: Any
    count: Tensor | float | None
    constant: Tensor | float
    is_of_parameters: bool
    elements: int = 0
    is_zero: bool = False


class Scalar(NamedTuple):
    """A node above the terms, or one of them, whose value is a linear combination of `terms` (their indices)."""

    node: Any
    terms: tuple[int, ...]


class LossTerms(NamedTuple):
    """The terms of a loss, or the obstacle because of which it is no sum of terms; `scalars` has the root first.

    The order is that of the graph: the same in all ranks that run one program.
    """

    terms: tuple[Term, ...]
    obstacle: str
    scalars: tuple[Scalar, ...]


class _NoSum(Exception):
    """The loss is no weighted sum of terms; the message gives the reason."""


def read(root: Tensor, scaled: Callable[[Any], bool] = lambda node: False) -> LossTerms:
    """Read the top of the graph of `root`, a number with a graph.

    Args:
        scaled: Returns whether a node is the multiplication by a gradient scaler's scale, which no `constant` may
            contain.
    """
    if root.numel() != 1:
        return LossTerms((), "backward of a tensor that is no single number", ())
    try:
        return _read(root.grad_fn, scaled)
    except _NoSum as reason:
        return LossTerms((), str(reason), ())
    except RuntimeError:  # its saved values were freed; the backward's own error explains it better
        return LossTerms((), "a graph that a backward has used up", ())


def _read(root: Any, scaled: Callable[[Any], bool]) -> LossTerms:
    counts: dict[Any, Tensor | float | None] = {}  # by reduction
    pure: set[Any] = set()  # values of parameters alone
    links: dict[Any, list[_Link]] = {}
    order = []  # every node after those below it
    waiting = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in links:
            below = _links(node)
            if isinstance(below, str):
                if not _is_of_parameters(node):
                    raise _NoSum(below)
                pure.add(node)
                counts[node], below = None, []
            elif not below:
                counts[node] = _count(node)
                if _is_of_parameters(node):
                    pure.add(node)
            links[node] = below
            waiting.append((node, True))
            waiting.extend((child, False) for child, _ in below)

    constants: dict[Any, Tensor | float] = {root: 1.0}
    zeros: set[Any] = set()
    is_shared = False
    for node in reversed(order):
        above = constants[node]
        for child, divisor in links[node]:
            passed = above if divisor is None or scaled(node) else _product(above, _number(divisor))
            is_zero = node in zeros or (type(divisor) is _Factor and _is_zero(divisor.by))
            if child in constants:
                is_shared = True
                if is_zero:
                    continue
                passed = passed if child in zeros else _parallel(constants[child], passed)
                zeros.discard(child)
            elif is_zero:
                zeros.add(child)
            constants[child] = passed

    found = [node for node in reversed(order) if node in counts]
    terms = tuple(
        Term(node, counts[node], constants[node], node in pure, _elements(node), node in zeros) for node in found
    )
    reached: dict[Any, tuple[int, ...]] = {node: (index,) for index, node in enumerate(found)}
    for node in order:
        if node not in reached:
            together = sum((reached[child] for child, _ in links[node]), ())
            reached[node] = tuple(sorted(set(together))) if is_shared else together
    return LossTerms(terms, "", tuple(Scalar(node, reached[node]) for node in reversed(order)))


# --- One node ---

_Link = tuple[Any, Any]
"""A node of which a value is a linear function, and its divisor on the way: a number, a 0-d tensor, `_Factor`."""


@frozen
class _Factor:
    """A multiplication, as a divisor."""

    by: Any


_WORDS = {
    kind: words.replace("_", " ")
    for words, kinds in {
        "power": "Pow",
        "root": "Sqrt Rsqrt",
        "logarithm": "Log Log1p",
        "exponential": "Exp",
        "absolute_value": "Abs",
        "limit": "Clamp ClampMin ClampMax Relu Softplus",
        "norm": "Norm LinalgVectorNorm",
        "maximum": "Max Amax Maximum",
        "minimum": "Min Amin Minimum",
        "variance": "Var Std",
        "logarithm_of_a_sum_of_exponentials": "Logsumexp",
        "reciprocal": "Reciprocal Div",
    }.items()
    for kind in kinds.split()
}


def _links(node: Any) -> list[_Link] | str:
    """Return the values of which this one is a linear function; none for a reduction over samples; or the obstacle."""
    kind, edges = kind_of(node), node.next_functions
    graphs = [edge for edge in edges if edge[0] is not None]
    if not graphs or (len(graphs) == 1 and kind_of(graphs[0][0]) == LEAF and kind not in REDUCTIONS):
        return "a loss with no mean or sum"
    if kind in ("Add", "Sub", "Rsub"):
        return _added(node, kind)
    if kind in ("Mul", "Div") and len(graphs) == 1:
        is_left = edges[0][0] is not None
        if kind == "Mul":
            return [(graphs[0][0], _Factor(node._saved_other if is_left else node._saved_self))]
        if is_left and node.name()[-1] in "01":  # the others round
            return [(graphs[0][0], node._saved_other)]
    if kind == "Neg":
        return [(graphs[0][0], -1.0)]
    if kind in SAME and prod(shape_at(edges[0])) == 1:
        return [(edges[0][0], None)]
    if kind in ("Mean", "Sum", "Select"):
        values = _values(edges[0])
        if values is not None:
            if kind == "Select":
                index = node._saved_index
                return [(values[signed(index) if len(values) > 1 else 0], None)]
            return [(value, float(len(values)) if kind == "Mean" else None) for value in values]
    if kind in REDUCTIONS and (kind not in WITH_REDUCTION or node._saved_reduction):
        return []
    return _why(node, kind)


def _added(node: Any, kind: str) -> list[_Link]:
    """Return the two sides of a sum or difference, if they have graphs; `alpha` multiplies the one on the right."""
    edges = node.next_functions
    alpha = node._saved_alpha if hasattr(node, "_saved_alpha") else 1
    right = alpha if kind == "Add" else -alpha
    factors = (right, 1) if kind == "Rsub" else (1, right)
    return [
        (child, None if factor == 1 else _Factor(factor))
        for (child, _), factor in zip(edges, factors, strict=False)
        if child is not None
    ]


def _values(edge: tuple[Any, int]) -> list[Any] | None:
    """Return the nodes of the 0-d losses that were combined to this vector; None if there are none."""
    waiting, found = [edge], []
    while waiting:
        node, output = waiting.pop()
        if node is None:
            return None
        edges, kind = node.next_functions, kind_of(node)
        if shape_at((node, output)) == ():
            found.append(node)
        elif kind in GATHERED or (kind in VIEWS and prod(shape_at(edges[0])) == 1):
            waiting.extend(reversed(edges))
        else:
            return None
    return found


def _why(node: Any, kind: str) -> str:
    """Return why the loss is no sum of terms at this node."""
    if kind in ("Mul", "Div") and all(child is not None for child, _ in node.next_functions):
        return f"a {'product' if kind == 'Mul' else 'quotient'} of two losses"
    if kind == "CompiledFunctionBackward":
        return "a compiled loss, which cannot be looked into"
    under = _reduction_under(node)
    if kind not in _WORDS or not under:
        is_known = kind in _WORDS or kind in WITH_REDUCTION | SAME | PICKS | {"Select", "Addmm"}
        return "a loss with no mean or sum" if is_known else f"its parts cannot be added up after {kind.lower()}"
    return f"the {_WORDS[kind]} of {under}"


def _reduction_under(node: Any) -> str:
    """Return what a number was made of, in words; "" where it is a single element of a tensor all the way down."""
    if prod(shape_at(node.next_functions[0])) > 1:
        return "samples"
    seen, waiting = {None, node}, [node]
    while waiting:
        for child, output in waiting.pop().next_functions:
            if child not in seen and prod(shape_at((child, output))) == 1:
                seen.add(child)
                if kind_of(child) in REDUCTIONS:
                    return "a sum" if kind_of(child) in SUMS | PRODUCTS else "a mean"
                waiting.append(child)
    return ""


def _count(node: Any) -> Tensor | float | None:
    """Return the divisor of a reduction."""
    kind = kind_of(node)
    if kind in SUMS | PRODUCTS or (kind in WITH_REDUCTION and node._saved_reduction == 2):
        return None
    if kind in COUNTED:
        return _number(node._saved_total_weight)
    under = next(edge for edge in node.next_functions if edge[0] is not None)
    shape = shape_at(under)
    if kind in LOSSES_OF_ROWS:
        return float(shape[0]) if len(shape) > 1 else 1.0
    while kind == "Mean" and kind_of(under[0]) == "Mean":  # a mean of means divides by both
        under = under[0].next_functions[0]
        shape = shape_at(under)
    return float(prod(shape))


def _elements(node: Any) -> int:
    """Return how many numbers a sum adds."""
    if kind_of(node) not in SUMS and not (kind_of(node) in WITH_REDUCTION and node._saved_reduction == 2):
        return 0
    return prod(shape_at(next(edge for edge in node.next_functions if edge[0] is not None)))


# --- Numbers: floats on the CPU, elsewhere tensors, which are not waited for ---


def _number(value: Any) -> Tensor | float:
    if isinstance(value, _Factor):
        by = _number(value.by)
        return 1 / by if isinstance(by, Tensor) or by else 1.0  # see `Term.is_zero`
    if not isinstance(value, Tensor):
        return float(value)
    return float(value) if value.device.type == "cpu" else value.detach().reshape(()).float()


def _is_zero(factor: Any) -> bool:
    return not factor if not isinstance(factor, Tensor) else factor.device.type == "cpu" and not factor


def _product(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    return other if isinstance(one, float) and one == 1.0 else one * other


def _parallel(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """Return the divisor of a term that is in the loss twice, divided by `one` and by `other`."""
    if 0.0 in [each for each in (one, other) if isinstance(each, float)]:
        return 0.0
    inverse = 1 / one + 1 / other
    return 1 / inverse if isinstance(inverse, Tensor) or inverse else one


# --- Terms without a batch ---

_SHAPING = (SAME | names("Slice Triu Tril Diagonal Cat Stack")) - {"Expand", "AsStrided"}
_OF_PARAMETERS = ELEMENTWISE | _SHAPING | REDUCING
_MATRIX = names("Mm Bmm Mv Dot Vdot LinalgDet LinalgSlogdet LinalgSvd")
_MOST_NODES_OF_PARAMETERS = 2000


def _is_of_parameters(top: Any) -> bool:
    """Return whether the value is made only of leaves, numbers, and tensors of the leaves' own shapes."""
    seen, waiting = {top}, [top]
    has_products = has_other_leaves = False
    while waiting:
        node = waiting.pop()
        kind, edges = kind_of(node), node.next_functions
        if kind == LEAF:
            has_other_leaves |= not isinstance(node.variable, nn.Parameter)
            continue
        if kind in _MATRIX:
            has_products = True
        elif kind not in _OF_PARAMETERS:
            return False
        children = [edge for edge in edges if edge[0] is not None]
        if len(children) < len(edges) and (kind not in ELEMENTWISE or not _keeps_shape(node, children)):
            return False
        fresh = {child for child, _ in children} - seen
        seen |= fresh
        waiting.extend(fresh)
        if len(seen) > _MOST_NODES_OF_PARAMETERS:
            return False
    return not (has_products and has_other_leaves)  # an input that requires a gradient is a leaf, too


def _keeps_shape(node: Any, children: Iterable[tuple[Any, int]]) -> bool:
    """Return whether operands without a graph broadcast nothing; losses reduce operands of one shape."""
    return kind_of(node) in DISTANCES or any(shape_at(edge) == shape_at((node, 0)) for edge in children)
