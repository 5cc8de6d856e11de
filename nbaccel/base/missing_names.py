"""Names and modules of Accelerate that nbaccel lacks, and the alternative to each. Runs anywhere; imports no torch.

The modules of this package that stand for one of Accelerate's end with ``__getattr__ = missing_from(__name__)``, so
that an import of such a name fails with one sentence. `AbsentModules` makes modules that have no file here. Classes and
functions that programs import at their top and use only under a flag (``if args.deepspeed:``) can be imported, and
refuse when they are called: more programs run that way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["AbsentModules", "missing_from"]

_BESIDE = "it works on models, whoever trains them: import it from accelerate, which may be installed beside nbaccel"
_ONE_DEVICE = (
    'it has no counterpart here. To make a model fit: Accelerator(strategy="fsdp"), by which each rank holds a part of '
    "it, mixed_precision, gradient_accumulation_steps with a smaller batch, accelerator.gradient_checkpointing(model)"
)
_FP8 = 'there is no fp8 here: use mixed_precision="bf16" or "fp16"'
_TRACKER = (
    "hand an object on nbaccel.tracking.GeneralTracker to log_with, or log by the library itself on the main process"
)
_FOLDER = "use accelerator.save_state(folder), load_state(folder) and register_for_checkpointing(...)"
_LAUNCH = "use `nbaccel launch` on the command line, or nbaccel.launch(function, num_processes=...) in Python"
_PLAIN = "a few lines of Python do the same"
_INNER = "it is a part of Accelerate's inside; nbaccel has no counterpart"

_UNDER_A_FLAG: dict[str, str] = {
    _ONE_DEVICE: """
        DeepSpeedPlugin MegatronLMPlugin TorchTensorParallelPlugin ParallelismConfig
        TorchContextParallelConfig TorchTensorParallelConfig DeepSpeedSequenceParallelConfig
        DummyOptim DummyScheduler DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper
        HfDeepSpeedConfig get_active_deepspeed_plugin MegatronLMDummyDataLoader MegatronLMDummyScheduler
    """,
    _FOLDER: "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer merge_fsdp_weights",
    _FP8: "FP8RecipeKwargs AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs",
}
"""Names that can be imported and refuse when they are called, by the alternative."""

_NOT_HERE: dict[str, str] = {
    _BESIDE: """
        attach_layerwise_casting_hooks LayerwiseCastingHook attach_execution_device_hook
        attach_align_device_hook attach_align_device_hook_on_blocks
        extract_submodules_state_dict OffloadedWeightsLoader quantize_and_offload_8bit get_parameter_device
        PrefixedDataset get_state_dict_offloaded_model get_state_dict_from_offload id_tensor_storage
        ensure_weights_retied prepare_pippy replace_with_bnb_layers get_quantized_model_device_map
        get_keys_to_not_convert has_4bit_bnb_layers compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 has_compiled_regions has_repeated_blocks is_repeated_blocks convert_model
        has_transformer_engine_layers
    """,
    _FP8: """
        contextual_fp8_autocast apply_fp8_autowrap convert_model_to_fp8_ao has_ao_layers FP8BackendType
        filter_first_and_last_linear_layers check_cuda_fp8_capability torchao_required
        is_transformer_engine_mxfp8_available
    """,
    _ONE_DEVICE: """
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
    _FOLDER: "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
    _LAUNCH: """
        launch_command launch_command_parser test_launch PrepareForLaunch prepare_simple_launcher_cmd_env
        prepare_multi_gpu_env prepare_deepspeed_cmd_env prepare_tpu prepare_sagemager_args_inputs
    """,
    "a prepared loader follows from accelerator.prepare(loader) or prepare_data_loader(loader)": """
        DataLoaderStateMixin DataLoaderAdapter MpDeviceLoaderWrapper
    """,
    "use `taskset` or `numactl` around the program": "set_numa_affinity override_numa_affinity",
    "nbaccel does not know these devices": "install_xla is_tpu_available is_habana_gaudi1 get_current_device_type",
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

_ABSENT: dict[str, str] = {
    "checkpointing": _FOLDER,
    "commands": _LAUNCH,
    "inference": _BESIDE,
    "parallelism_config": _ONE_DEVICE,
    "test_utils": "import it from accelerate, which may be installed beside nbaccel",
    "utils.ao": _FP8,
    "utils.deepspeed": _ONE_DEVICE,
    "utils.fsdp_utils": _ONE_DEVICE,
    "utils.launch": _LAUNCH,
    "utils.megatron_lm": _ONE_DEVICE,
    "utils.rich": "import rich",
    "utils.torch_xla": "nbaccel does not know these devices",
    "utils.transformer_engine": _FP8,
}
"""Modules of Accelerate, with everything in them, and the alternative to each."""

_ABSENT_PACKAGES = ("commands", "test_utils")


def missing_from(module: str, *elsewhere: str, inside: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of `module`, which stands for one of Accelerate's.

    elsewhere: modules in which a name is looked up first, since Accelerate shows most names in several places.
    inside: submodules whose names the package shows, too. They look up others in the package: only their own count.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if not name.startswith("__"):
            for submodule in inside:
                try:
                    other = import_module(f"{module}.{submodule}")
                except ModuleNotFoundError as error:
                    if not str(error.name).startswith("nbaccel.features."):
                        raise
                    continue  # it names what a feature has that is not there
                if name in other.__all__:
                    return getattr(other, name)
            for other in map(import_module, elsewhere):
                if (found := _shown(other, name)) is not _NOWHERE:
                    return found
        if name in _refusing():
            return _refused(name)
        instead = _instead().get(name, _absent(module))
        if instead:
            _refuse(f"{module} has no {name}: {instead}.", module, name)
        _refuse(f"module {module!r} has no attribute {name!r}", module, name)

    return __getattr__


class AbsentModules:
    """Makes the modules of Accelerate that have no file here, so that imports from them name the alternative.

    A finder and loader of `importlib`, whose base classes take milliseconds to import. It is asked last, when no other
    finder has found the module.
    elsewhere: modules in which their names are looked up first.
    """

    def __init__(self, *elsewhere: str) -> None:
        self._elsewhere = elsewhere

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        instead = _absent(fullname) if fullname.startswith("nbaccel.") else ""
        if not instead:
            return None
        inside = fullname.removeprefix("nbaccel.")
        if inside not in _ABSENT:
            raise ModuleNotFoundError(f"{fullname} is not here: {instead}.", name=fullname)
        loader: Any = self  # it has a loader's methods
        return ModuleSpec(fullname, loader, is_package=inside in _ABSENT_PACKAGES)

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python's own kind of module is made."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"Not here: {_absent(name)}."
        module.__getattr__ = missing_from(name, *self._elsewhere)  # type: ignore[method-assign]


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


def _absent(module: str) -> str:
    """Return the alternative to `module`, or to the module that contains it; empty if it exists here."""
    inside = module.removeprefix("nbaccel.")
    for known, instead in _ABSENT.items():
        if inside == known or inside.startswith(f"{known}."):
            return instead
    return ""


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
