"""Names that programs import from ``accelerate.utils.operations``. This module defines nothing."""

from __future__ import annotations

from nbaccel.errors import CollectiveMismatch as DistributedOperationException
from nbaccel.missing_names import missing_from
from nbaccel.train.batches import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from nbaccel.train.functions import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")
