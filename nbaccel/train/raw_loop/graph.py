"""Find, before a backward runs, which leaves its graph reaches and which products a scaler made. Runs in ranks.

`users_scalars` also finds the user's variables that hold a part of a loss, such as the loss before scaling. The factor
of torch's GradScaler changes while a loop trains, and is not part of the divisor of a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nbaccel.train.distributed.callers import users_frames, variables_of
from nbaccel.train.raw_loop.terms import LossTerms

__all__ = [
    "ScalerRule",
    "forget_scaled",
    "graph_of",
    "is_compiled",
    "is_scaled",
    "leave_scalers",
    "leaves_of",
    "runs_backwards_inside",
    "users_scalars",
    "watch_scalers",
]

with torch.enable_grad():  # a notebook may have it off
    _ACCUMULATES = type(torch.ones(1, requires_grad=True, device="cpu").expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

_REENTRANT = ("CheckpointFunctionBackward",)
"""Nodes that run a backward of their own, whose leaves are not visible in the graph around them."""


def leaves_of(roots: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the leaves that a backward from `roots` adds gradients to, in an order that the graph alone decides.

    Also return the nodes in it that were made by a Python function of autograd's.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> leaves_of([(w * 2).sum()])[0][0] is w
        True
    """
    leaves, of_python, _ = graph_of(roots)
    return leaves, of_python


def graph_of(roots: Sequence[Tensor]) -> tuple[list[Tensor], list[Any], list[type]]:
    """Return the same as `leaves_of`, and the kinds of all other nodes, the first ones below the first root."""
    found = {id(root): root for root in roots if root.requires_grad and root.grad_fn is None}
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    of_python: list[Any] = []
    kinds: list[type] = []
    while stack:
        node = stack.pop()
        kinds.append(type(node))
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            of_python.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if type(following) is _ACCUMULATES:
                    leaf = following.variable  # type: ignore[union-attr]
                    found[id(leaf)] = leaf
                else:
                    stack.append(following)
    return list(found.values()), of_python, kinds


def runs_backwards_inside(nodes: Sequence[Any]) -> bool:
    """Return whether one of `nodes` is a checkpoint that itself runs a forward again, and a backward."""
    return any(type(node).__name__ in _REENTRANT for node in nodes)


def is_compiled(nodes: Sequence[Any]) -> bool:
    """Return whether one of `nodes` is the backward of a function made by ``torch.compile``."""
    return any(type(node).__name__ == "CompiledFunctionBackward" for node in nodes)


_FRAMES = 4


def users_scalars(reading: LossTerms, most: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return tensors in the user's innermost frames whose value is made of the same terms, and the terms' numbers."""
    if len(reading.scalars) < 2:
        return []
    wanted = {scalar.node: scalar.terms for scalar in reading.scalars[1:]}
    found: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
    for frame in users_frames(_FRAMES):
        for value in list(variables_of(frame).values()):
            if type(value) is Tensor and value.requires_grad and value.numel() == 1 and value.grad_fn in wanted:
                found[id(value)] = value, wanted[value.grad_fn]
    order = {scalar.node: place for place, scalar in enumerate(reading.scalars)}
    return sorted(found.values(), key=lambda pair: order[pair[0].grad_fn])[:most]


_last: list[Any] = []
_defers: list[Callable[[Any], bool]] = []
_rules: list[ScalerRule] = []


class ScalerRule(Protocol):
    """Decides which calls of scalers are left out beside those that wait for another part of their batch."""

    def withholds_scaler(self, call: str, optimizer: Any) -> bool:
        """Return whether a call is left out: "unscale_", "step" or "update"; the last one has no optimizer."""

    def rescale(self, factor: Tensor) -> None:
        """Note that a scaler has multiplied its scale by `factor`."""


def watch_scalers(defers: Callable[[Any], bool], rules: Sequence[ScalerRule] = ()) -> None:
    """Record losses that a scaler has scaled, until `leave_scalers`.

    Args:
        defers: Returns whether a call of a scaler has to wait; the call then does nothing. Called with the optimizer,
            if one is about to step.
        rules: Asked if it has not.
    """
    _defers[:] = [defers]
    _rules[:] = rules
    kind: Any = torch.amp.GradScaler
    original = kind.scale
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if _defers and isinstance(scaled, Tensor) and scaled is not outputs:
            _last[:] = [scaled.grad_fn, scaler._scale]
        return scaled

    kind.scale = scale
    for name in ("unscale_", "step", "update"):
        setattr(kind, name, _unless_deferred(getattr(kind, name), name))


def leave_scalers() -> None:
    """Stop recording, and drop the last product: a graph leads to the weights of its model."""
    _defers.clear()
    _rules.clear()
    _last.clear()


def _unless_deferred(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = None if name == "update" else kwargs.get("optimizer", args[0] if args else None)
        if _defers and _defers[0](optimizer if name == "step" else None):
            return None
        if any(rule.withholds_scaler(name, optimizer) for rule in _rules):
            return None
        before = getattr(scaler, "_scale", None) if _rules and name == "update" else None  # none if it is disabled
        before = None if before is None else before.clone()
        found = original(scaler, *args, **kwargs)
        for rule in _rules if before is not None else ():
            rule.rescale(scaler._scale / before)
        return found

    return call


def is_scaled(node: Any) -> bool:
    """Return whether `node` is the product that the last call of a scaler has made."""
    return bool(_last) and node is _last[0]


def without_scale(root: Tensor, value: float) -> float | Tensor | None:
    """Return `value`, that of a loss, divided by the factor of the scaler that has made `root`; None if it is unknown.

    A factor on a device is not waited for: the result is a tensor there.
    """
    if not is_scaled(root.grad_fn):
        return value
    factor = _last[1]  # not what the graph has saved: a backward frees that
    return None if factor is None else value / (factor.item() if factor.device.type == "cpu" else factor)


def forget_scaled() -> None:
    """Drop the product after its backward, so that its graph is freed."""
    _last.clear()
