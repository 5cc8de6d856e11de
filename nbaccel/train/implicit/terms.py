"""Terms: splits a loss into a sum by reading its graph from the root to the reductions over samples. Runs in ranks.

Ranks that each have a part of the batch have gradients of other losses than that of the whole batch: a mean over 3
samples is not one over 8. Where a loss is a sum of terms, each a mean or a sum over samples, the gradient of the whole
batch is the sum of each term's gradient in each rank, times a number that follows from the two divisors (`Term`). A
graph of another form has an obstacle, in words. Nothing here knows ranks, and nothing waits for a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nbaccel.values import frozen

__all__ = ["LossTerms", "Scalar", "Term", "lengths_below", "obstacle_below", "read", "shapes_below"]


@frozen
class Term:
    """One reduction over samples in the graph of a loss.

    node: the autograd node of the reduction.
    count: the divisor of the reduction itself: the elements of a mean, the total weight of `nll_loss` (a 0-d tensor);
        None for a sum. Counts of parts sum to the count of the whole.
    constant: the product of the divisors of the term between the reduction and the root; negative where it is
        subtracted. A 0-d tensor where the number is on a device; infinite there where the loss is multiplied by zero.
    is_of_parameters: it is computed from parameters alone, such as a weight decay, without a batch. One row of a
        one-element tensor looks the same, so the reading of the largest batch decides.
    elements: how many numbers a sum adds; 0 for other terms.
    """

    node: Any
    count: Tensor | float | None
    constant: Tensor | float
    is_of_parameters: bool
    elements: int = 0


@frozen
class Scalar:
    """A node above the terms, or one of them, whose value is a linear combination of `terms` (their indices)."""

    node: Any
    terms: tuple[int, ...]


@frozen
class LossTerms:
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

    scaled: returns whether a node is the multiplication by a gradient scaler's scale, which no `constant` may contain.
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
    is_shared = False
    for node in reversed(order):
        above = constants[node]
        for child, divisor in links[node]:
            passed = above if divisor is None or scaled(node) else _product(above, _number(divisor))
            if child in constants:
                is_shared = True
                passed = _parallel(constants[child], passed)
            constants[child] = passed

    found = [node for node in reversed(order) if node in counts]
    terms = tuple(Term(node, counts[node], constants[node], node in pure, _elements(node)) for node in found)
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


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LEAF = "torch::autograd::AccumulateGrad"
_MEANS, _SUMS, _PRODUCTS = _names("Mean"), _names("Sum Nansum"), _names("Dot Vdot Mm Bmm")  # products of one element
_COUNTED = _names("NllLoss NllLoss2D")
_LOSSES_OF_ROWS = _names("MultiMarginLoss MultilabelMarginLoss")  # their means count rows, not elements
_DISTANCES = _names("MseLoss SmoothL1Loss HuberLoss")
_WITH_REDUCTION = _COUNTED | _LOSSES_OF_ROWS | _DISTANCES
_WITH_REDUCTION |= _names("BinaryCrossEntropy BinaryCrossEntropyWithLogits KlDiv SoftMarginLoss")
_REDUCTIONS = _MEANS | _SUMS | _PRODUCTS | _WITH_REDUCTION
_VIEWS = _names("View UnsafeView ReshapeAlias Squeeze Unsqueeze Permute Transpose T Expand")
_SAME = _VIEWS | _names("Clone Alias ToCopy AsStrided torch::autograd::CopyBackwards")
_GATHERED = _names("Stack Cat GatherBackward")  # the last is DataParallel's
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


@cache
def _kind_of(name: str) -> str:
    stem, _, number = name.partition("Backward")
    return stem if number.isdigit() else name


def _kind(node: Any) -> str:
    """Return the operation of a node without its overload, "Mean"; for a Python function its name, "MineBackward"."""
    return _kind_of(node.name())


def _shape(edge: tuple[Any, int]) -> tuple[int, ...]:
    node, output = edge
    try:
        return tuple(node._input_metadata[output].shape)
    except (AttributeError, IndexError, RuntimeError):  # a nested tensor has none
        return ()


def _links(node: Any) -> list[_Link] | str:
    """Return the values of which this one is a linear function; none for a reduction over samples; or the obstacle."""
    kind, edges = _kind(node), node.next_functions
    graphs = [edge for edge in edges if edge[0] is not None]
    if not graphs or (len(graphs) == 1 and _kind(graphs[0][0]) == _LEAF and kind not in _REDUCTIONS):
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
    if kind in _SAME and prod(_shape(edges[0])) == 1:
        return [(edges[0][0], None)]
    if kind in ("Mean", "Sum", "Select"):
        values = _values(edges[0])
        if values is not None:
            if kind == "Select":
                index = node._saved_index
                return [(values[_signed(index) if len(values) > 1 else 0], None)]
            return [(value, float(len(values)) if kind == "Mean" else None) for value in values]
    if kind in _REDUCTIONS and (kind not in _WITH_REDUCTION or node._saved_reduction):
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
        edges, kind = node.next_functions, _kind(node)
        if _shape((node, output)) == ():
            found.append(node)
        elif kind in _GATHERED or (kind in _VIEWS and prod(_shape(edges[0])) == 1):
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
        is_known = kind in _WORDS or kind in _WITH_REDUCTION | _SAME | _PICKS | {"Select", "Addmm"}
        return "a loss with no mean or sum" if is_known else f"an operation that is not known ({node.name()})"
    return f"the {_WORDS[kind]} of {under}"


def _reduction_under(node: Any) -> str:
    """Return what a number was made of, in words; "" where it is a single element of a tensor all the way down."""
    if prod(_shape(node.next_functions[0])) > 1:
        return "samples"
    seen, waiting = {None, node}, [node]
    while waiting:
        for child, output in waiting.pop().next_functions:
            if child not in seen and prod(_shape((child, output))) == 1:
                seen.add(child)
                if _kind(child) in _REDUCTIONS:
                    return "a sum" if _kind(child) in _SUMS | _PRODUCTS else "a mean"
                waiting.append(child)
    return ""


def _count(node: Any) -> Tensor | float | None:
    """Return the divisor of a reduction."""
    kind = _kind(node)
    if kind in _SUMS | _PRODUCTS or (kind in _WITH_REDUCTION and node._saved_reduction == 2):
        return None
    if kind in _COUNTED:
        return _number(node._saved_total_weight)
    under = next(edge for edge in node.next_functions if edge[0] is not None)
    shape = _shape(under)
    if kind in _LOSSES_OF_ROWS:
        return float(shape[0]) if len(shape) > 1 else 1.0
    while kind == "Mean" and _kind(under[0]) == "Mean":  # a mean of means divides by both
        under = under[0].next_functions[0]
        shape = _shape(under)
    return float(prod(shape))


def _elements(node: Any) -> int:
    """Return how many numbers a sum adds."""
    if _kind(node) not in _SUMS and not (_kind(node) in _WITH_REDUCTION and node._saved_reduction == 2):
        return 0
    return prod(_shape(next(edge for edge in node.next_functions if edge[0] is not None)))


# --- Numbers: floats on the CPU, elsewhere tensors, which are not waited for ---


def _number(value: Any) -> Tensor | float:
    if isinstance(value, _Factor):
        by = _number(value.by)
        return 1 / by if isinstance(by, Tensor) or by else 1.0  # nothing comes from a term times zero
    if not isinstance(value, Tensor):
        return float(value)
    return float(value) if value.device.type == "cpu" else value.detach().reshape(()).float()


def _product(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    return other if isinstance(one, float) and one == 1.0 else one * other


def _parallel(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """Return the divisor of a term that is in the loss twice, divided by `one` and by `other`."""
    inverse = 1 / one + 1 / other
    return 1 / inverse if isinstance(inverse, Tensor) or inverse else one


# --- Terms without a batch ---

_ELEMENTWISE = _DISTANCES | _names(
    "Add Sub Rsub Mul Div Neg Pow Abs Sqrt Rsqrt Exp Expm1 Log Log1p Log2 Reciprocal Sigmoid LogSigmoid Tanh Softplus "
    "Relu Clamp ClampMin ClampMax Sgn Sign Erf Sin Cos Maximum Minimum"
)
_SHAPING = (_SAME | _names("Slice Triu Tril Diagonal Cat Stack")) - {"Expand", "AsStrided"}
_REDUCING = _MEANS | _SUMS
_REDUCING |= _names("Norm LinalgVectorNorm Amax Amin Max Min Logsumexp Softmax LogSoftmax Std Var Prod Trace")
_OF_PARAMETERS = _ELEMENTWISE | _SHAPING | _REDUCING
_MATRIX = _names("Mm Bmm Mv Dot Vdot LinalgDet LinalgSlogdet LinalgSvd")
_MOST_NODES_OF_PARAMETERS = 2000


def _is_of_parameters(top: Any) -> bool:
    """Return whether the value is made only of leaves, numbers, and tensors of the leaves' own shapes."""
    seen, waiting = {top}, [top]
    has_products = has_other_leaves = False
    while waiting:
        node = waiting.pop()
        kind, edges = _kind(node), node.next_functions
        if kind == _LEAF:
            has_other_leaves |= not isinstance(node.variable, nn.Parameter)
            continue
        if kind in _MATRIX:
            has_products = True
        elif kind not in _OF_PARAMETERS:
            return False
        children = [edge for edge in edges if edge[0] is not None]
        if len(children) < len(edges) and (kind not in _ELEMENTWISE or not _keeps_shape(node, children)):
            return False
        fresh = {child for child, _ in children} - seen
        seen |= fresh
        waiting.extend(fresh)
        if len(seen) > _MOST_NODES_OF_PARAMETERS:
            return False
    return not (has_products and has_other_leaves)  # an input that requires a gradient is a leaf, too


def _keeps_shape(node: Any, children: Iterable[tuple[Any, int]]) -> bool:
    """Return whether operands without a graph broadcast nothing; losses reduce operands of one shape."""
    return _kind(node) in _DISTANCES or any(_shape(edge) == _shape((node, 0)) for edge in children)


# --- Below the terms ---

_STATISTICS = (_REDUCING - {"Trace"}) | _names(
    "SafeSoftmax VarMean StdMean Sort Topk Kthvalue Median Nanmedian Mode Cumsum Cumprod Cummax Cummin Logcumsumexp "
    "Flip Roll"
)
_DISTANCE_MATRICES = _names("Cdist EuclideanDist")
_PAIRWISE = _names("Mm Bmm Addmm Baddbmm Addbmm Mv Linear") | _DISTANCE_MATRICES
_COLLECTED = _names("IndexAdd IndexReduce ScatterAdd ScatterReduce")
_PICKS = _names("Embedding EmbeddingBag Index IndexSelect Gather")


def obstacle_below(reading: LossTerms, rows: int) -> str:
    """Return why samples are not independent of each other below the terms; empty if there is no sign of it.

    The signs are shapes that contain the number of samples, `rows`, so a large batch shows more than a small one. Call
    it once per loop: it may walk the whole graph. BatchNorm, and the contents of a compiled part, show no sign.
    """
    terms = [term.node for term in reading.terms if not term.is_of_parameters]
    if rows < 2 or not terms:
        return ""
    if _are_one_by_one(terms, rows):
        return f"a loss for each sample ({len(terms)} of them)"
    everywhere = _from_below(term.node for term in reading.terms)
    uses = Counter(child for node in everywhere for child, _ in node.next_functions)
    if any(uses[term.node] for term in reading.terms):
        return "a part of the loss that is used in another part of it"
    carries: set[Any] = {None}  # nodes whose values depend on the batch
    masked: set[Any] = set()  # those of them that hold some samples, picked by a mask
    plain = _plain_chains(terms, uses)
    if any(_kind(node) == "UnsafeSplit" for node in everywhere):  # recurrent cells, which slice packed sequences
        plain.update(node for node in everywhere if _kind(node) == "Slice")
    for node in _from_below(terms):
        kind, edges = _kind(node), node.next_functions
        if _has_batch(node, kind, edges, carries, rows):
            carries.add(node)
            if _is_masked(node, kind, edges, rows) or any(child in masked for child, _ in edges):
                masked.add(node)
            if node in plain:
                continue
            if sign := _sign(node, kind, edges, carries, rows) or _sign_of_masked(
                node, kind, edges, carries, masked, rows
            ):
                return sign
    return ""


def shapes_below(top: Any) -> int:
    """Return a number that depends on the shapes of all values of a term."""
    return hash(tuple(_shape((node, 0)) for node in _from_below([top])))


def lengths_below(tops: Iterable[Any], sizes: Collection[int]) -> list[int]:
    """Return the lengths of values in statistics of a graph, such as a softmax over a padded sequence.

    sizes: numbers of samples that ranks have. Multiples of these are left out, since they may be of the batch: the
    others are the same in all ranks, unless they depend on the samples.
    """
    found: set[int] = set()
    for node in _from_below(tops):
        kind, edges = _kind(node), [edge for edge in node.next_functions if edge[0] is not None]
        if kind in _STATISTICS | _WITH_REDUCTION and edges and (under := _shape(edges[0])):
            dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
            along = range(len(under)) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
            is_time_first = len(under) > 1 and under[1] in sizes  # otherwise a mask may have picked the first ones
            found.update(under[at] for dim in along if (at := _signed(dim) % len(under)) or is_time_first)
        elif "Attention" in kind and len(under := _shape((node, 0))) == 4:
            found.add(under[2])
    return sorted(size for size in found if all(size % each for each in sizes))


def _from_below(tops: Iterable[Any]) -> list[Any]:
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


def _are_one_by_one(terms: list[Any], rows: int) -> bool:
    """Return whether there are as many equal terms as samples, as in a loop over them, none over all samples."""
    alike: dict[str, list[Any]] = {}
    for node in terms:
        alike.setdefault(node.name(), []).append(node)
    return any(
        len(nodes) % rows == 0 and (rows > 8 or not all(_begins_with(rows, node) for node in nodes))
        for nodes in alike.values()
    )


def _begins_with(rows: int, term: Any) -> bool:
    shape = next(_shape(edge) for edge in term.next_functions if edge[0] is not None)
    return bool(shape) and shape[0] % rows == 0


def _plain_chains(terms: list[Any], uses: Counter[Any]) -> set[Any]:
    """Return the terms, and under them means of means and sums of sums: together each is one reduction."""
    plain = set(terms)
    for node in terms:
        kind = _kind(node)
        while kind in _MEANS | _SUMS and _kind(child := node.next_functions[0][0]) == kind and uses[child] == 1:
            plain.add(node := child)
    return plain


def _has_batch(node: Any, kind: str, edges: Any, carries: set[Any], rows: int) -> bool:
    """Return whether a value depends on the batch: from below, by an operand without a graph, or by picking."""
    if kind == _LEAF:
        return not isinstance(node.variable, nn.Parameter) and rows in node.variable.shape
    children = [edge for edge in edges if edge[0] is not None]
    if kind in _PICKS or any(child in carries for child, _ in children):
        return True
    if kind in ("Expand", "Repeat"):
        return rows in _shape((node, 0))
    if len(children) == len(edges):
        return False
    if kind in ("Mv", "Dot", "Vdot"):  # a weight times a vector, as in a spectral norm, does not depend on the batch
        return edges[0][0] is None and kind == "Mv"
    if kind in _PAIRWISE:
        return any(child is None for child, _ in _operands(kind, edges))
    return all(_shape(edge) != _shape((node, 0)) for edge in children)  # a mask of a weight keeps its shape


def _sign(node: Any, kind: str, edges: Any, carries: set[Any], rows: int) -> str:
    """Return what speaks against independent samples at a node that depends on the batch."""
    shape = _shape((node, 0))
    if kind in _PAIRWISE:
        return _sign_of_product(kind, _operands(kind, edges), shape, carries, rows)
    if kind in _STATISTICS or kind in _WITH_REDUCTION | {"Dot", "Vdot"}:
        return _sign_of_statistic(node, kind, edges, shape, carries, rows)
    if kind in ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "Unbind"):
        return _sign_of_recurrence(node, kind, edges, shape, rows)
    if kind in _COLLECTED:
        is_along = _signed(node._saved_dim) == 0 and any(
            rows in _shape(edge)[:1] for edge in edges if edge[0] in carries
        )
        return "a sum over groups of samples" if is_along and shape[:1] != (rows,) else ""
    if kind in ("Index", "Slice", "Split", "SplitWithSizes"):
        return _sign_of_pick(node, kind, _shape(edges[0]), shape, rows)
    if kind in _ELEMENTWISE or kind in ("Expand", "Repeat", "Where"):
        return _sign_of_broadcast(kind, edges, shape, carries, rows)
    if "Attention" in kind and len(shape) == 4:
        batch, _, along, _ = shape
        is_mixed = (along == rows and batch != rows) or (along % rows == 0 and batch % rows != 0)
        return "an attention along the batch" if is_mixed else ""
    return _compared(rows, rows) if kind == "Pdist" else ""


def _compared(one: int, other: int) -> str:
    return f"samples are compared with each other (a matrix of {one} x {other})"


def _operands(kind: str, edges: Any) -> Any:
    return edges[:2] if kind in _DISTANCE_MATRICES | {"Linear"} else edges[-2:]


def _sign_of_product(kind: str, operands: Any, shape: tuple[int, ...], carries: set[Any], rows: int) -> str:
    """Detect samples times samples, or a sum over them. `x @ W` has one side without the batch, even if W is frozen."""
    is_frozen = any(child is None for child, _ in operands)
    if any(child not in carries for child, _ in operands if child is not None):
        return ""
    if len(shape) > 2 and prod(shape[:-2]) % rows == 0:  # matrices of each sample
        return ""
    if len(shape) > 1 and shape[-2] % rows == shape[-1] % rows == 0 and (shape[-2] == shape[-1] or not is_frozen):
        return _compared(*shape[-2:])
    if kind == "Mm" and operands[0][0] is None:
        return "a sum along the batch" if _shape(operands[1])[:1] == (rows,) else ""
    if kind in _DISTANCE_MATRICES or is_frozen:
        return ""
    return "a sum along the batch" if _shape(operands[0])[-1] % rows == 0 else ""


def _sign_of_statistic(node: Any, kind: str, edges: Any, shape: tuple[int, ...], carries: set[Any], rows: int) -> str:
    """Detect a value that is made of all samples and used further."""
    under = next(_shape(edge) for edge in edges if edge[0] in carries and edge[0] is not None)
    if not under or prod(under) % rows:
        return ""
    word = {"Mean": "a mean", "Sum": "a sum"}.get(kind, f"a statistic ({kind.lower()})")
    if prod(shape) == 1:
        return f"{word} of the whole batch that is used further" if prod(under) > 1 else ""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
    for dim in (dims,) if isinstance(dims, int) else dims or ():
        at = _signed(dim) % len(under)
        is_time = under[0] != rows and len(under) > 2 and under[1] == rows  # in front of the batch
        if (at == 0 and under[0] % rows == 0 and not is_time) or (under[at] == rows and under[0] % rows):
            return f"{word} along the batch"
    return ""


def _signed(index: int) -> int:
    """Return `index` as a signed number, since autograd shows negative numbers as unsigned ones."""
    return index - 2**64 if index >= 2**63 else index


def _sign_of_recurrence(node: Any, kind: str, edges: Any, shape: tuple[int, ...], rows: int) -> str:
    """Detect a batch in the place of time: a recurrent layer goes along time and would mix the samples."""
    if kind == "Unbind":  # into the steps of a layer that is made of small operations
        shape = _shape(edges[0]) if node._saved_dim == 0 else ()
    if len(shape) != 3:
        return ""
    is_batch_first = kind in ("CudnnRnn", "MiopenRnn") and node._saved_batch_first
    batch, time = shape[:2] if is_batch_first else shape[1::-1]
    return "a recurrent layer along the batch" if time % rows == 0 and batch % rows else ""


def _sign_of_pick(node: Any, kind: str, under: tuple[int, ...], shape: tuple[int, ...], rows: int) -> str:
    """Detect samples picked by their place in the batch: pairs, a half. Not a mask, or one element of each sample."""
    if not under or under[0] != rows:
        return ""
    if kind != "Index":
        is_part = _signed(node._saved_dim) % len(under) == 0 and shape[0] < rows
    else:
        indices = [index for index in node._saved_indices if index is not None]
        is_part = len(indices) == 1 and indices[0].dtype != torch.bool
    return "samples that are picked by their place in the batch" if is_part else ""


def _is_masked(node: Any, kind: str, edges: Any, rows: int) -> bool:
    """Return whether a mask picks samples: their number then has no meaning any more."""
    if kind != "Index" or _shape(edges[0])[:1] != (rows,):
        return False
    first = node._saved_indices[0] if node._saved_indices else None
    return first is not None and first.dtype == torch.bool


def _sign_of_masked(node: Any, kind: str, edges: Any, carries: set[Any], masked: set[Any], rows: int) -> str:
    """Detect samples picked by a mask that are combined or summed: a mean of each class, pairs of two classes."""
    if not any(child in masked for child, _ in edges):
        return ""
    shape, unders = _shape((node, 0)), [_shape(edge) for edge in edges if edge[0] is not None and edge[0] in carries]
    if kind in ("Mm", "Cdist", "EuclideanDist"):
        both = all(child in carries for child, _ in _operands(kind, edges))
        return _compared(*shape[-2:]) if both and len(shape) == 2 else ""
    if kind in _STATISTICS:
        dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
        is_along = any(_signed(dim) % len(unders[0]) == 0 for dim in ((dims,) if isinstance(dims, int) else dims or ()))
        return "a statistic along samples that a mask has picked" if is_along and len(unders[0]) > 1 else ""
    if kind in _ELEMENTWISE and len(unders) == 2:
        one, two = ((1,) * (len(shape) - len(under)) + under for under in unders)
        meet = [at for at in range(len(shape)) if {one[at], two[at]} != {shape[at]}]
        if any(one[at] > 1 for at in meet) and any(two[at] > 1 for at in meet):
            others = [length for at, length in enumerate(shape) if at not in meet]
            return "" if any(length % rows == 0 for length in others) else _compared(*(shape[at] for at in meet[:2]))
    return ""


def _sign_of_broadcast(kind: str, edges: Any, shape: tuple[int, ...], carries: set[Any], rows: int) -> str:
    """Detect (rows, 1) with (1, rows): all samples meet, also where a target lacks a dimension by mistake."""
    unders = [_shape(edge) for edge in edges if edge[0] is not None and edge[0] in carries]
    if kind == "Repeat":
        return _compared(unders[0][0], rows) if unders[0] and shape[0] == unders[0][0] * rows else ""
    padded = [(1,) * (len(shape) - len(under)) + under for under in unders]
    is_unseen = kind == "Expand" or any(child is None for child, _ in edges)
    for one in padded:
        for i, j in product(range(len(shape)), repeat=2):
            if one[i] % rows or one[j] != 1 or shape[j] % rows or prod(shape[: min(i, j)]) % rows == 0:
                continue  # the last: these are dimensions of each sample
            if (is_unseen and one[i] == shape[j]) or any(two[i] == 1 and two[j] > 1 for two in padded):
                return _compared(one[i], shape[j])
    return ""
