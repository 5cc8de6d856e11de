"""Sizes of models and device maps, for programs that ask: ``accelerate.utils.modeling``. Runs anywhere.

It defines nothing; `nbaccel.utils` shows its names too.
"""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_non_persistent_buffers",
    "has_offloaded_params",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.big_models.checkpoint_loading import load_checkpoint_in_model, load_state_dict
    from nbaccel.features.big_models.device_plan import (
        check_device_map,
        check_tied_parameters_on_same_device,
        clean_device_map,
        get_balanced_memory,
        get_max_memory,
        infer_auto_device_map,
    )
    from nbaccel.features.big_models.model_hooks import align_module_device, has_offloaded_params
    from nbaccel.features.big_models.module_sizes import (
        calculate_maximum_sizes,
        check_tied_parameters_in_config,
        compute_module_sizes,
        convert_file_size_to_int,
        dtype_byte_size,
        find_tied_parameters,
        get_max_layer_size,
        get_non_persistent_buffers,
        named_module_tensors,
        retie_parameters,
        set_module_tensor_to_device,
    )
    from nbaccel.features.big_models.offload_folder import load_offloaded_weights
