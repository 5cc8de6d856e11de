"""Names and modules of Accelerate that nbaccel lacks, and the alternative to each. Runs anywhere; imports no torch.

The modules of this package that stand for one of Accelerate's end with ``__getattr__ = missing_from(__name__)``, so
that an import of such a name fails with one sentence. Classes and functions that programs import at their top and use
only under a flag (``if args.megatron:``) can be imported, and refuse when they are called: more programs run that way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from opcode import opmap
from types import ModuleType
from typing import Any, NoReturn

__all__ = [
    "BESIDE",
    "FOLDER",
    "FP8",
    "FROM_ACCELERATE",
    "LAUNCH",
    "NO_SUCH_DEVICES",
    "ONE_DEVICE",
    "missing_from",
    "refuse_module",
]

FROM_ACCELERATE = "import it from accelerate, which may be installed beside nbaccel"
BESIDE = f"it works on models, whoever trains them: {FROM_ACCELERATE}"
ONE_DEVICE = (
    'it has no counterpart here. To make a model fit: Accelerator(strategy="fsdp"), by which each rank holds a part of '
    "it, mixed_precision, gradient_accumulation_steps with a smaller batch, accelerator.gradient_checkpointing(model)"
)
FP8 = 'there is no fp8 here: use mixed_precision="bf16" or "fp16"'
_TRACKER = (
    "hand an object on nbaccel.tracking.GeneralTracker to log_with, or log by the library itself on the main process"
)
FOLDER = "use accelerator.save_state(folder), load_state(folder) and register_for_checkpointing(...)"
LAUNCH = "use `nbaccel launch` on the command line, or nbaccel.launch(function, num_processes=...) in Python"
NO_SUCH_DEVICES = "nbaccel does not know these devices"
_PLAIN = "a few lines of Python do the same"
_INNER = "it is a part of Accelerate's inside; nbaccel has no counterpart"

_UNDER_A_FLAG: dict[str, str] = {
    ONE_DEVICE: """
        MegatronLMPlugin TorchTensorParallelPlugin ParallelismConfig
        TorchContextParallelConfig TorchTensorParallelConfig DeepSpeedSequenceParallelConfig
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper
        get_active_deepspeed_plugin MegatronLMDummyDataLoader MegatronLMDummyScheduler
    """,
    FOLDER: "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer merge_fsdp_weights",
    FP8: "FP8RecipeKwargs AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs",
}
"""Names that can be imported and refuse when they are called, by the alternative."""

_NOT_HERE: dict[str, str] = {
    BESIDE: """
        attach_layerwise_casting_hooks LayerwiseCastingHook attach_execution_device_hook
        attach_align_device_hook attach_align_device_hook_on_blocks
        extract_submodules_state_dict OffloadedWeightsLoader quantize_and_offload_8bit get_parameter_device
        PrefixedDataset get_state_dict_offloaded_model get_state_dict_from_offload id_tensor_storage
        ensure_weights_retied prepare_pippy replace_with_bnb_layers get_quantized_model_device_map
        get_keys_to_not_convert has_4bit_bnb_layers compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 has_compiled_regions has_repeated_blocks is_repeated_blocks convert_model
        has_transformer_engine_layers
    """,
    FP8: """
        contextual_fp8_autocast apply_fp8_autowrap convert_model_to_fp8_ao has_ao_layers FP8BackendType
        filter_first_and_last_linear_layers check_cuda_fp8_capability torchao_required
        is_transformer_engine_mxfp8_available
    """,
    ONE_DEVICE: """
        fsdp2_load_full_state_dict fsdp2_switch_optimizer_parameters fsdp2_prepare_model AbstractTrainStep BertTrainStep
        GPTTrainStep T5TrainStep avg_losses_across_data_parallel_group get_module_class_from_name
        map_pytorch_optim_to_deepspeed deepspeed_required fsdp2_apply_ac fsdp2_canonicalize_names get_fsdp2_grad_scaler
        get_model_tp_size model_has_dtensor add_model_config_to_megatron_parser parse_bert_config parse_glm4_moe_config
        parse_gpt2_config parse_llama_config parse_t5_config
    """,
    _TRACKER: """
        register_tracker_class
        LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers
    """,
    FOLDER: "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
    LAUNCH: """
        launch_command launch_command_parser test_launch PrepareForLaunch prepare_simple_launcher_cmd_env
        prepare_multi_gpu_env prepare_deepspeed_cmd_env prepare_tpu prepare_sagemager_args_inputs
    """,
    "a prepared loader follows from accelerator.prepare(loader) or prepare_data_loader(loader)": """
        DataLoaderStateMixin DataLoaderAdapter MpDeviceLoaderWrapper
    """,
    "use `taskset` or `numactl` around the program": "set_numa_affinity override_numa_affinity",
    NO_SUCH_DEVICES: "install_xla is_tpu_available is_habana_gaudi1 get_current_device_type",
    "`nbaccel doctor` shows the machine; torch.cuda and psutil are asked for the rest": """
        get_gpu_info get_driver_version check_cuda_p2p_ib_support get_cpu_distributed_information CPUInformation
        is_xccl_available
    """,
    _PLAIN: "are_libraries_initialized convert_dict_to_env_variables is_torch_xpu_tensor is_weights_only_available",
    _INNER: """
        patch_optimizer_step move_to_device do_nothing ThreadLocalSharedDict
        gather_tensor_shape verify_operation chained_operation check_os_kernel SageMakerDistributedType
        ComputeEnvironment CustomDtype TensorInformation is_tensor_information get_data_structure get_shape
        initialize_tensors ConvertOutputsToFp32 CannotPadNestedTensorWarning is_import_timer_available
        is_bitsandbytes_multi_backend_available is_pippy_available check_device_same fallback_allocate
        compute_module_total_buffer_size get_module_leaves get_module_size_with_ties
    """,
}
"""Names that cannot be imported, by the alternative."""


def missing_from(module: str, *elsewhere: str, inside: Sequence[str] = (), instead: str = "") -> Callable[[str], Any]:
    """Return the ``__getattr__`` of `module`, which stands for one of Accelerate's.

    Args:
        inside: Submodules whose names the package shows, too. They look up others in the package: only their own count.
        instead: The alternative to the whole module, where nbaccel has nothing of it.
        *elsewhere: Modules in which a name is looked up first, since Accelerate shows most names in several places.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if not name.startswith("__"):
            for submodule in inside:
                other = import_module(f"{module}.{submodule}")
                if name in other.__all__:
                    return getattr(other, name)
            for other in map(import_module, elsewhere):
                if (found := _shown(other, name)) is not _NOWHERE:
                    return found
        if name in _refusing():
            return _refused(name)
        if alternative := _instead().get(name, instead):
            _refuse(f"{module} has no {name}: {alternative}.", module, name)
        _refuse(f"module {module!r} has no attribute {name!r}", module, name)

    return __getattr__


def refuse_module(module: str, instead: str) -> NoReturn:
    """Raise the error of a module of Accelerate that is not here, whatever is imported from it, or that is run."""
    raise ModuleNotFoundError(f"{module} is not here: {instead}.", name=module)


_NOWHERE = object()


def _shown(module: ModuleType, name: str) -> Any:
    """Return the value of `name` in `module`, its own or from elsewhere; `_NOWHERE` if there is none."""
    if name in module.__all__:
        return getattr(module, name)
    look_elsewhere = vars(module).get("__getattr__")
    try:
        return _NOWHERE if look_elsewhere is None else look_elsewhere(name)
    except AttributeError:
        return _NOWHERE


def _refuse(sentence: str, module: str, name: str) -> NoReturn:
    """Raise an AttributeError, or an ImportError for ``from module import name``.

    Python would turn an AttributeError there into an ImportError with another text, and `hasattr` does not take an
    ImportError for a no: so the kind of access matters.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__getattr__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
        raise ImportError(sentence, name=module)
    raise AttributeError(sentence, name=name)


@functools.cache
def _refusing() -> dict[str, str]:
    return _by_name(_UNDER_A_FLAG)


@functools.cache
def _instead() -> dict[str, str]:
    return _by_name(_NOT_HERE)


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {name: instead for instead, several in names.items() for name in several.split()}


@functools.cache
def _refused(name: str) -> type:
    """Return a class without objects; it can be used in annotations and in `isinstance`, which is never true."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: N807
        raise NotImplementedError(f"{name}: {_refusing()[name]}.")

    return type(name, (), {"__new__": __new__, "__doc__": f"Not here: {_refusing()[name]}.", "__module__": __name__})
