"""Graph of a backward: finds, before it runs, which leaves it will reach. Runs in ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_compiled", "leaves_of", "runs_backwards_inside"]

with torch.enable_grad():  # a notebook may have it off
    _ACCUMULATES = type(torch.ones(1, requires_grad=True, device="cpu").expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

_REENTRANT = ("CheckpointFunctionBackward",)
"""Nodes that run a backward of their own, whose leaves are not visible in the graph around them."""


def leaves_of(roots: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the leaves that a backward from `roots` adds gradients to, in an order that the graph alone decides.

    Also return the nodes in it that were made by a Python function of autograd's.

    >>> w = torch.ones(2, requires_grad=True)
    >>> leaves_of([(w * 2).sum()])[0][0] is w
    True
    """
    found = {id(root): root for root in roots if root.requires_grad and root.grad_fn is None}
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    of_python: list[Any] = []
    while stack:
        node = stack.pop()
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
    return list(found.values()), of_python


def runs_backwards_inside(nodes: Sequence[Any]) -> bool:
    """Return whether one of `nodes` is a checkpoint that itself runs a forward again, and a backward."""
    return any(type(node).__name__ in _REENTRANT for node in nodes)


def is_compiled(nodes: Sequence[Any]) -> bool:
    """Return whether one of `nodes` is the backward of a function made by ``torch.compile``."""
    return any(type(node).__name__ == "CompiledFunctionBackward" for node in nodes)
