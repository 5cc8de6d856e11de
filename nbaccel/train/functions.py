"""Functions for exchange between ranks, for programs without an Accelerator. Run in ranks, by every rank.

Each calls the method of the same name on this process's `PartialState`; a process alone gets its own value back.
Names and defaults are those of ``accelerate.utils``.
"""

from __future__ import annotations

from typing import Any

from nbaccel.train.distributed.partial_state import PartialState

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """Gather every tensor in `tensor`, those of all ranks joined along the first dimension, on every rank. Collective.

    Raises:
        CollectiveMismatch: the ranks called it with different structures or shapes.
        TypeError: tensors mixed with something else; see `gather_object`.

    >>> import torch
    >>> gather({"loss": torch.tensor([0.5])})
    {'loss': tensor([0.5000])}
    """
    return PartialState().gather(tensor)


def gather_object(object: Any) -> Any:
    """Gather picklable values of all ranks, on every rank: lists joined, mappings joined by key. Collective.

    >>> gather_object(["a", "b"])
    ['a', 'b']
    """
    return PartialState().collectives.gather_objects(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return `tensor` with every tensor in it reduced over the ranks; `tensor` is not changed. Collective.

    reduction: "mean" here and "sum" in `Accelerator.reduce`, as in Accelerate; "max" and "min" too.
    scale: factor of the result.
    """
    return PartialState().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return every tensor in `tensor` as rank `from_process` has it; shapes and dtypes must agree. Collective."""
    return PartialState().collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill `object_list`, in place, with the picklable objects that rank `from_process` has in its own. Collective.

    >>> broadcast_object_list(["a", 1])
    ['a', 1]
    """
    object_list[:] = PartialState().collectives.broadcast_objects(object_list, from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return `tensor` with every tensor in it padded along `dim` to the longest of all ranks. Collective.

    pad_index: the value of the padding, which is at the front with `pad_first`, else at the end.
    """
    return PartialState().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until every rank calls this. Collective."""
    PartialState().wait_for_everyone()
