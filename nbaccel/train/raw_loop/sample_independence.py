"""Look below the terms of a loss for signs that its samples depend on each other. Runs in ranks.

A batch can only be cut where each sample is computed by itself. The signs are shapes of values in the graph: samples
times samples, a statistic along the batch, samples picked by their place in it. Two other functions compare what lies
below the terms of a part with what lay there in the whole batch, or in other ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from nbaccel.train.raw_loop.node_kinds import (
    ELEMENTWISE,
    GATHERED,
    LEAF,
    MEANS,
    PICKS,
    REDUCING,
    SAME,
    SUMS,
    WITH_REDUCTION,
    from_below,
    kind_of,
    names,
    shape_at,
    signed,
)
from nbaccel.train.raw_loop.terms import LossTerms

__all__ = ["lengths_below", "obstacle_below", "shapes_below"]

_STATISTICS = (REDUCING - {"Trace"}) | names(
    "SafeSoftmax VarMean StdMean Sort Topk Kthvalue Median Nanmedian Mode Cumsum Cumprod Cummax Cummin Logcumsumexp "
    "Flip Roll"
)
_WITH_LENGTHS = _STATISTICS | WITH_REDUCTION
_DISTANCE_MATRICES = names("Cdist EuclideanDist")
_PAIRWISE = names("Mm Bmm Addmm Baddbmm Addbmm Mv Linear") | _DISTANCE_MATRICES
_CONVOLUTIONS = names(
    "Convolution ConvolutionOverrideable ConvDepthwise2D ConvDepthwise3D ConvTbc CudnnConvolution MiopenConvolution "
    "CudnnConvolutionTranspose MiopenConvolutionTranspose MiopenDepthwiseConvolution MkldnnConvolution MpsConvolution "
    "MpsConvolutionTranspose NnpackSpatialConvolution SlowConv2D SlowConv3D SlowConvDilated2D SlowConvDilated3D "
    "SlowConvTranspose2D SlowConvTranspose3D GridSampler2D GridSampler2DCpuFallback GridSampler3D CudnnGridSampler "
    "NativeGroupNorm Im2Col Col2Im"
)
"""Operations whose first dimension alone is that of samples."""

_SPATIAL = re.compile(r"(AvgPool|MaxPool|MaxUnpool|Upsample|ReflectionPad|ReplicationPad)\w*?([123])D")
"""Operations that mix along their last dimensions, as many as the name says."""

_MATRICES = ("Linalg", "Cholesky", "Lu", "Triangular", "Ormqr", "Geqrf")
"""Begins of names of operations on the last two dimensions."""

_ALONG_DIMS = names("FftR2C FftC2R FftC2C Unfold Glu LinalgCross Gather Renorm")

_BY_SAMPLE = (
    ELEMENTWISE
    | SAME
    | GATHERED
    | names(
        "Acos Acosh Addcdiv Addcmul Asin Asinh Atan Atan2 Atanh Angle Bernoulli Ceil Celu Clone Complex Conj "
        "ConjPhysical Copysign Cosh Deg2Rad Digamma Elu Eq Erfc Erfinv Exp2 Fill Floor Fmax Fmin Fmod Frac "
        "FusedDropout Ge Gelu Gt Hardshrink Hardsigmoid Hardswish Hardtanh Hypot I0 Igamma Igammac Ldexp Le "
        "LeakyRelu Lerp Lgamma Lift LiftFresh Log10 Log1P Logaddexp Logaddexp2 Logit Lt MaskedFill MaskedScatter "
        "MaskedSelect Mish Mvlgamma NanToNum NativeDropout Ne NegView Nextafter PinMemory Polar Polygamma "
        "PreluKernel Rad2Deg Remainder Round RreluWithNoise Rsub Silu Sinc Sinh Softshrink SpecialEntr "
        "SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr SpecialNdtri SpecialXlog1Py SpecialZeta Tan "
        "Threshold Trunc Where Xlogy Zero FakeQuantizePerTensorAffineCachemask "
        "FakeQuantizePerChannelAffineCachemask FakeQuantizeLearnablePerTensorAffine ChannelShuffle Chunk Diagonal "
        "DiagEmbed LazyClone NarrowCopy PixelShuffle PixelUnshuffle ReshapeCopy Select SelectScatter SliceScatter "
        "SliceInverse DiagonalScatter AsStridedScatter ConstantPadNd Tril Triu ViewAsComplex ViewAsReal ToDense "
        "ToSparse ToPaddedTensor ToMkldnn MkldnnReshape Coalesce Values BlockDiag Trace SplitWithSizes Split "
        "Slice Unbind UnsafeSplit UnsafeSplitWithSizes IndexPut IndexPutImpl IndexCopy IndexFill IndexSelect Put "
        "Scatter Take UnsafeIndex UnsafeIndexPut UnsafeMaskedIndex Embedding EmbeddingBag EmbeddingRenorm CtcLoss "
        "CudnnCtcLoss MiopenCtcLoss NativeLayerNorm FusedRmsNorm NativeBatchNorm NativeBatchNormLegit "
        "NativeBatchNormLegitNoTraining BatchNormWithUpdate BatchNormNoUpdate CudnnBatchNorm MiopenBatchNorm "
        "PackPaddedSequence ThnnFusedLstmCell ThnnFusedGruCell LstmMps AffineGridGenerator "
        "CudnnAffineGridGenerator Trilinear MkldnnLinear Matmul GroupedMm Addmv Addr StandardGamma Normal Poisson "
        "Uniform Exponential Cauchy LogNormal Geometric Random WeightNormInterface SparseAddmm SparseMask "
        "SparseMmReduceImpl SparseSampledAddmm SparseSparseMatmul SparseCooTensorWithDimsAndTensors SegmentReduce"
    )
)
"""Operations that compute each sample by itself, or whose signs are looked for elsewhere. A batch norm mixes samples on
purpose, which a line says; those of sparse tensors are of graphs that lie side by side in a batch."""

_COLLECTED = names("IndexAdd IndexReduce ScatterAdd ScatterReduce")


_TREATED = (
    _STATISTICS
    | WITH_REDUCTION
    | _PAIRWISE
    | _COLLECTED
    | names("Dot Vdot Pdist MkldnnRnnLayer CudnnRnn MiopenRnn Index Expand Repeat Nansum")
)
"""Operations whose signs `_sign` looks for."""

_SAVED_DIMS = ("_saved_dim", "_saved_dimension")


def obstacle_below(reading: LossTerms, rows: int, only: Collection[str] = ()) -> str:
    """Return why samples are not independent of each other below the terms; empty if there is no sign of it.

    The signs are shapes that contain the number of samples, `rows`, so a large batch shows more than a small one. Call
    it once per loop: it may walk the whole graph. BatchNorm, and the contents of a compiled part, show no sign.

    Args:
        only: Names of the nodes that are asked about, where others have shown no sign with a larger batch.
    """
    terms = [term.node for term in reading.terms if not term.is_of_parameters]
    if rows < 2 or not terms:
        return ""
    if not only and _are_one_by_one(terms, rows):
        return f"a loss for each sample ({len(terms)} of them)"
    everywhere = from_below(term.node for term in reading.terms)
    uses = Counter(child for node in everywhere for child, _ in node.next_functions)
    if any(uses[term.node] for term in reading.terms):
        return "a part of the loss that is used in another part of it"
    carries: set[Any] = {None}  # nodes whose values depend on the batch
    masked: set[Any] = set()  # those of them that hold some samples, picked by a mask
    plain = _plain_chains(terms, uses)
    if any(kind_of(node) == "UnsafeSplit" for node in everywhere):  # recurrent cells, which slice packed sequences
        plain.update(node for node in everywhere if kind_of(node) == "Slice")
    for node in from_below(terms):
        kind, edges = kind_of(node), node.next_functions
        if only and kind == LEAF:  # a tensor that is trained may be as long as a part by chance
            continue
        if _has_batch(node, kind, edges, carries, rows):
            carries.add(node)
            if _is_masked(node, kind, edges, rows) or any(child in masked for child, _ in edges):
                masked.add(node)
            if node in plain or (only and type(node).__name__ not in only):
                continue
            if sign := _sign(node, kind, edges, carries, rows) or _sign_of_masked(
                node, kind, edges, carries, masked, rows
            ):
                return sign
            if node not in masked and (sign := _sign_of_layer(node, kind, edges, carries, rows)):
                return sign
    return ""


def shapes_below(top: Any) -> int:
    """Return a number that depends on the shapes of all values of a term."""
    return hash(tuple(shape_at((node, 0)) for node in from_below([top])))


def lengths_below(tops: Iterable[Any], sizes: Collection[int]) -> list[int]:
    """Return the lengths of values in statistics of a graph, such as a softmax over a padded sequence.

    Args:
        sizes: Numbers of samples that ranks have. Multiples of these are left out, since they may be of the batch: the
            others are the same in all ranks, unless they depend on the samples.
    """
    found: set[int] = set()
    for node in from_below(tops):
        kind, edges = kind_of(node), [edge for edge in node.next_functions if edge[0] is not None]
        if kind in _WITH_LENGTHS and edges and (under := shape_at(edges[0])):
            dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
            along = range(len(under)) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
            is_time_first = len(under) > 1 and under[1] in sizes  # otherwise a mask may have picked the first ones
            found.update(under[at] for dim in along if (at := signed(dim) % len(under)) or is_time_first)
        elif "Attention" in kind and len(under := shape_at((node, 0))) == 4:
            found.add(under[2])
    return sorted(size for size in found if all(size % each for each in sizes))


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
    shape = next(shape_at(edge) for edge in term.next_functions if edge[0] is not None)
    return bool(shape) and shape[0] % rows == 0


def _plain_chains(terms: list[Any], uses: Counter[Any]) -> set[Any]:
    """Return the terms, and under them means of means and sums of sums: together each is one reduction."""
    plain = set(terms)
    for node in terms:
        kind = kind_of(node)
        while kind in MEANS | SUMS and kind_of(child := node.next_functions[0][0]) == kind and uses[child] == 1:
            plain.add(node := child)
    return plain


def _has_batch(node: Any, kind: str, edges: Any, carries: set[Any], rows: int) -> bool:
    """Return whether a value depends on the batch: from below, by an operand without a graph, or by picking."""
    if kind == LEAF:
        return not isinstance(node.variable, nn.Parameter) and rows in node.variable.shape
    children = [edge for edge in edges if edge[0] is not None]
    if kind in PICKS or any(child in carries for child, _ in children):
        return True
    if kind in ("Expand", "Repeat"):
        return rows in shape_at((node, 0))
    if len(children) == len(edges):
        return False
    if kind in ("Mv", "Dot", "Vdot"):  # a weight times a vector, as in a spectral norm, does not depend on the batch
        return edges[0][0] is None and kind == "Mv"
    if kind in _PAIRWISE:
        return any(child is None for child, _ in _operands(kind, edges))
    return all(shape_at(edge) != shape_at((node, 0)) for edge in children)  # a mask of a weight keeps its shape


def _sign(node: Any, kind: str, edges: Any, carries: set[Any], rows: int) -> str:
    """Return what speaks against independent samples at a node that depends on the batch."""
    shape = shape_at((node, 0))
    if kind in _PAIRWISE:
        return _sign_of_product(kind, _operands(kind, edges), shape, carries, rows)
    if kind in _STATISTICS or kind in WITH_REDUCTION | {"Dot", "Vdot"}:
        return _sign_of_statistic(node, kind, edges, shape, carries, rows)
    if kind in ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "Unbind"):
        return _sign_of_recurrence(node, kind, edges, shape, rows)
    if kind in _COLLECTED:
        is_along = signed(node._saved_dim) == 0 and any(
            rows in shape_at(edge)[:1] for edge in edges if edge[0] in carries
        )
        return "a sum over groups of samples" if is_along and shape[:1] != (rows,) else ""
    if kind in ("Index", "Slice", "Split", "SplitWithSizes"):
        return _sign_of_pick(node, kind, shape_at(edges[0]), shape, rows)
    if kind in ELEMENTWISE or kind in ("Expand", "Repeat", "Where"):
        return _sign_of_broadcast(kind, edges, shape, carries, rows)
    if "Attention" in kind and len(shape) == 4:
        batch, _, along, _ = shape
        is_mixed = (along == rows and batch != rows) or (along % rows == 0 and batch % rows != 0)
        return "an attention along the batch" if is_mixed else ""
    return _compared(rows, rows) if kind == "Pdist" else ""


def _sign_of_layer(node: Any, kind: str, edges: Any, carries: set[Any], rows: int) -> str:
    """Detect a batch in a dimension along which an operation computes; one that is not known may do so in any."""
    kind = kind.partition("Backward")[0]  # of the graph of a gradient
    if kind in _TREATED | _BY_SAMPLE or "Attention" in kind or _is_of_others(node):
        return ""
    under = _shape_of_input(node, edges, carries)
    axis = _axis_of(under, rows)
    if axis is None:
        return ""
    spatial = _SPATIAL.match(kind)
    if spatial:
        is_mixed = axis >= len(under) - int(spatial[2])
    elif kind.startswith(_MATRICES) and kind not in _ALONG_DIMS:
        is_mixed = axis >= len(under) - 2
    elif kind in _ALONG_DIMS:
        found = next((getattr(node, name) for name in _SAVED_DIMS if hasattr(node, name)), ())
        dims = (found,) if isinstance(found, int) else found or ()
        is_mixed = axis in {signed(dim) % len(under) for dim in dims}
    else:
        is_mixed = axis > 0 or kind not in _CONVOLUTIONS
    return f"an operation along the batch ({kind.lower()})" if is_mixed else ""


def _is_of_others(node: Any) -> bool:
    """Return whether a node is a Python function of a program's, or of C++ outside of torch's operations."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) or "::" in node.name()


def _shape_of_input(node: Any, edges: Any, carries: set[Any]) -> tuple[int, ...]:
    """Return the shape of the value that an operation computes with, which has no graph in a first layer."""
    if edges and edges[0][0] is not None:
        return shape_at(edges[0]) if edges[0][0] in carries else ()
    saved = getattr(node, "_saved_input", None)
    saved = getattr(node, "_saved_self", None) if saved is None else saved
    return tuple(saved.shape) if isinstance(saved, torch.Tensor) else shape_at((node, 0))


def _axis_of(shape: tuple[int, ...], rows: int) -> int | None:
    """Return the dimension that counts samples; None if there is no sign of one."""
    if rows in shape:
        return shape.index(rows)
    return 0 if shape and shape[0] and shape[0] % rows == 0 else None


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
    if is_frozen and kind not in _DISTANCE_MATRICES | {"Mv"}:  # a constant; its other side is of the batch
        side, inner = (1, -2) if operands[0][0] is None else (0, -1)
        under = shape_at(operands[side])
        others = prod(under[:inner]) if len(under) > 1 else rows
        return "a sum along the batch" if len(under) > 1 and under[inner] == rows and others % rows else ""
    if kind in _DISTANCE_MATRICES or is_frozen:
        return ""
    return "a sum along the batch" if shape_at(operands[0])[-1] % rows == 0 else ""


def _sign_of_statistic(node: Any, kind: str, edges: Any, shape: tuple[int, ...], carries: set[Any], rows: int) -> str:
    """Detect a value that is made of all samples and used further."""
    under = next(shape_at(edge) for edge in edges if edge[0] in carries and edge[0] is not None)
    if not under or prod(under) % rows:
        return ""
    word = {"Mean": "a mean", "Sum": "a sum"}.get(kind, f"a statistic ({kind.lower()})")
    if prod(shape) == 1:
        return f"the loss goes on with {word} over the whole batch" if prod(under) > 1 else ""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
    for dim in (dims,) if isinstance(dims, int) else dims or ():
        at = signed(dim) % len(under)
        is_time = under[0] != rows and len(under) > 2 and under[1] == rows  # in front of the batch
        if (at == 0 and under[0] % rows == 0 and not is_time) or (under[at] == rows and under[0] % rows):
            return f"{word} along the batch"
    return ""


def _sign_of_recurrence(node: Any, kind: str, edges: Any, shape: tuple[int, ...], rows: int) -> str:
    """Detect a batch in the place of time: a recurrent layer goes along time and would mix the samples."""
    if kind == "Unbind":  # into the steps of a layer that is made of small operations
        shape = shape_at(edges[0]) if node._saved_dim == 0 else ()
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
        is_part = signed(node._saved_dim) % len(under) == 0 and shape[0] < rows
    else:
        indices = [index for index in node._saved_indices if index is not None]
        is_part = len(indices) == 1 and indices[0].dtype != torch.bool
    return "samples that are picked by their place in the batch" if is_part else ""


def _is_masked(node: Any, kind: str, edges: Any, rows: int) -> bool:
    """Return whether a mask picks samples: their number then has no meaning any more."""
    if kind != "Index" or shape_at(edges[0])[:1] != (rows,):
        return False
    first = node._saved_indices[0] if node._saved_indices else None
    return first is not None and first.dtype == torch.bool


def _sign_of_masked(node: Any, kind: str, edges: Any, carries: set[Any], masked: set[Any], rows: int) -> str:
    """Detect samples picked by a mask that are combined or summed: a mean of each class, pairs of two classes."""
    if not any(child in masked for child, _ in edges):
        return ""
    shape, unders = (
        shape_at((node, 0)),
        [shape_at(edge) for edge in edges if edge[0] is not None and edge[0] in carries],
    )
    if kind in ("Mm", "Cdist", "EuclideanDist"):
        both = all(child in carries for child, _ in _operands(kind, edges))
        return _compared(*shape[-2:]) if both and len(shape) == 2 else ""
    if kind in _STATISTICS:
        dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
        is_along = any(signed(dim) % len(unders[0]) == 0 for dim in ((dims,) if isinstance(dims, int) else dims or ()))
        return "a statistic along samples that a mask has picked" if is_along and len(unders[0]) > 1 else ""
    if kind in ELEMENTWISE and len(unders) == 2:
        one, two = ((1,) * (len(shape) - len(under)) + under for under in unders)
        meet = [at for at in range(len(shape)) if {one[at], two[at]} != {shape[at]}]
        if any(one[at] > 1 for at in meet) and any(two[at] > 1 for at in meet):
            others = [length for at, length in enumerate(shape) if at not in meet]
            return "" if any(length % rows == 0 for length in others) else _compared(*(shape[at] for at in meet[:2]))
    return ""


def _sign_of_broadcast(kind: str, edges: Any, shape: tuple[int, ...], carries: set[Any], rows: int) -> str:
    """Detect (rows, 1) with (1, rows): all samples meet, also where a target lacks a dimension by mistake."""
    unders = [shape_at(edge) for edge in edges if edge[0] is not None and edge[0] in carries]
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
