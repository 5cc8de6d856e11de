"""Scalars: finds the user's variables that hold a part of a loss, such as the loss before scaling. Runs in ranks."""

from __future__ import annotations

from torch import Tensor

from nbaccel.train.implicit.terms import Reading
from nbaccel.train.implicit.users_code import users_frames, variables_of

__all__ = ["users_scalars"]

_FRAMES = 4


def users_scalars(reading: Reading, most: int) -> list[tuple[Tensor, tuple[int, ...]]]:
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
