"""Files, names, ports, wrappers: ``accelerate.utils.other``. It defines nothing. Runs anywhere."""

# ruff: noqa: F403, F405 - it shows every name of one module

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = [
    "GatheredParameters",
    "clean_state_dict_for_safetensors",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "is_compiled_module",
    "is_peft_model",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "recursive_getattr",
    "save",
    "str_to_bool",
    "wait_for_everyone",
    "write_basic_config",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.small_functions import *
