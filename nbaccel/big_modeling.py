"""The names that programs import from ``accelerate.big_modeling``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = [
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

__getattr__ = missing_from(__name__, "nbaccel.hooks", "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.big_models.checkpoint_loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from nbaccel.features.big_models.device_plan import check_device_map, get_max_memory, infer_auto_device_map
    from nbaccel.features.big_models.dispatching import cpu_offload, disk_offload, dispatch_model
    from nbaccel.features.big_models.empty_weights import init_empty_weights, init_on_device
    from nbaccel.features.big_models.model_hooks import cpu_offload_with_hook
