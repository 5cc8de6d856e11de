"""TorchFlags: torch's switches as the notebook left them, for ranks of a clean process. Used in both."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nbaccel.launching.ipc.thread_flags import OF_A_THREAD, TorchFlag, by_functions, read_flags, set_flags, unwarned

__all__ = ["TorchFlags"]


@dataclass(frozen=True, slots=True)
class TorchFlags:
    """Values by the names of switches; none if torch is not loaded.

    The kernel captures the switches as the notebook left them. Each switch is read and set separately: one that this
    torch lacks or refuses is left out, and does not stop a rank from starting. Reading changes nothing, starts no CUDA
    and loads no library. A switch that has the right value already is not touched: switches that were never set stay
    unset, so that each of torch's two interfaces to TF32 keeps working if the notebook has used only that one.

    Not covered: blocks that are open around a launch, other than `torch.no_grad()` and `torch.device()` (autocast,
    inference mode, hooks on saved tensors); the configuration of the compiler; `torch.set_default_tensor_type` with a
    type of CUDA, which cannot be set without starting CUDA.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> TorchFlags:
        return cls(read_flags(_FLAGS))

    def apply(self) -> None:
        """Set the switches that differ in this process."""
        set_flags(_FLAGS, self.values)


def _attribute(path: str) -> TorchFlag:
    owner, _, name = path.rpartition(".")
    return TorchFlag(attrgetter(path), lambda torch, value: setattr(attrgetter(owner)(torch), name, value))


# --- numbers of 32 bits -------------------------------------------------------------------------------------

_PRECISIONS = (
    "backends.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)
"""Torch's interface since 2.9.

An operation without its own precision returns that of its backend, and a backend the first one; so parents come first
here, and a child is set only if it differs from the value of its parents.
"""


# The error: https://github.com/pytorch/pytorch/pull/189955; the warning:
# https://github.com/huggingface/transformers/issues/42371.
def _older(getter: str, setter: str, chosen: Mapping[str, str]) -> TorchFlag:
    """Return a switch of the interface before 2.9, which raises once the newer one has been used.

    Args:
        chosen: Value of each attribute of the newer one while neither was used. The older one is not read then, since
            torch 2.9 warns of its use.
    """
    older = by_functions(getter, setter) if setter else _attribute(getter)

    def read(torch: Any) -> Any:
        with contextlib.suppress(AttributeError):  # no newer interface
            if all(attrgetter(path)(torch) == value for path, value in chosen.items()):
                raise LookupError("nobody has chosen")
        with unwarned():
            return older.read(torch)

    return TorchFlag(read, older.write)


def _set_precision_of_mkldnn(torch: Any, value: str) -> None:
    """Set the precision; assigning to the attribute would set the first parent instead, as of torch 2.13."""
    torch.backends.mkldnn.set_flags(_fp32_precision=value)


# --- numbers of 16 bits -------------------------------------------------------------------------------------


def _reduction(dtype: str) -> TorchFlag:
    """Return the switch for sums of 16 bits within a product; newer torch reports split products separately."""
    path = f"backends.cuda.matmul.allow_{dtype}_reduced_precision_reduction"
    plain = _attribute(path)

    def read(torch: Any) -> Any:
        try:
            return plain.read(torch), attrgetter(f"{path}_split_k")(torch)
        except AttributeError:
            return plain.read(torch)

    return TorchFlag(read, plain.write)


# --- the rest -----------------------------------------------------------------------------------------------


def _library(path: str) -> TorchFlag:
    """Return the switch of a function that reads the preferred library, and sets it by name."""

    def read(torch: Any) -> str:
        if torch.version.hip:
            raise LookupError("asking counts the devices")
        return str(attrgetter(path)(torch)().name).lower()

    return TorchFlag(read, lambda torch, value: attrgetter(path)(torch)(value))


def _deterministic(torch: Any) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(torch: Any, value: tuple[bool, bool]) -> None:
    mode, warn_only = value
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _anomaly(torch: Any) -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_FLAGS = {
    **OF_A_THREAD,
    "default_dtype": by_functions("get_default_dtype", "set_default_dtype"),
    "deterministic": TorchFlag(_deterministic, _set_deterministic),
    "anomaly": TorchFlag(_anomaly, lambda torch, value: torch.autograd.set_detect_anomaly(*value)),
    "warn_always": by_functions("is_warn_always_enabled", "set_warn_always"),
    "sharing_strategy": by_functions("multiprocessing.get_sharing_strategy", "multiprocessing.set_sharing_strategy"),
    "print_options": TorchFlag(
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: torch.set_printoptions(**value),
    ),
    # The older interface first: it also sets attributes of the newer one.
    "matmul_precision": _older(
        "get_float32_matmul_precision",
        "set_float32_matmul_precision",
        dict.fromkeys(("backends.cuda.matmul.fp32_precision", "backends.mkldnn.matmul.fp32_precision"), "none"),
    ),
    "cudnn_tf32": _older(
        "backends.cudnn.allow_tf32",
        "",
        dict.fromkeys(("backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"), "tf32"),
    ),
    **{path: _attribute(path) for path in _PRECISIONS},
    "backends.mkldnn.fp32_precision": TorchFlag(attrgetter("backends.mkldnn.fp32_precision"), _set_precision_of_mkldnn),
    "fp16_reduction": _reduction("fp16"),
    "bf16_reduction": _reduction("bf16"),
    "linalg_library": _library("backends.cuda.preferred_linalg_library"),
    "blas_library": _library("backends.cuda.preferred_blas_library"),
    **{
        f"{kind}_sdp": by_functions(f"backends.cuda.{kind}_sdp_enabled", f"backends.cuda.enable_{kind}_sdp")
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
    "math_sdp_reduction": by_functions(
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed", "backends.cuda.allow_fp16_bf16_reduction_math_sdp"
    ),
    **{
        f"{what}_module_params": by_functions(
            f"__future__.get_{what}_module_params_on_conversion", f"__future__.set_{what}_module_params_on_conversion"
        )
        for what in ("overwrite", "swap")
    },
    "mha_fastpath": by_functions("backends.mha.get_fastpath_enabled", "backends.mha.set_fastpath_enabled"),
    **{
        path: _attribute(path)
        for path in (
            "utils.deterministic.fill_uninitialized_memory",
            "backends.cuda.matmul.allow_fp16_accumulation",
            "backends.cudnn.enabled",
            "backends.cudnn.benchmark",
            "backends.cudnn.benchmark_limit",
            "backends.cudnn.deterministic",
            "backends.cudnn.depthwise_kernel",
            "backends.miopen.immediate",
            "backends.mkldnn.enabled",
            "backends.mkldnn.deterministic",
            "backends.mkldnn.allow_tf32",
            "backends.opt_einsum.enabled",
            "backends.opt_einsum.strategy",
            "backends.quantized.engine",
        )
    },
}
