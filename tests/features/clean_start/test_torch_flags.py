"""Torch's switches in a process that starts with torch's own: they stand there as where they were captured.

Each test sets them in forks of this process, whose own switches nobody has touched.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import Pipe, Process
from typing import Any

import pytest
import torch

from nbaccel.features.clean_start import torch_flags
from nbaccel.features.clean_start.torch_flags import TorchFlags
from nbaccel.launching.ipc.thread_flags import OF_A_THREAD, read_flags, set_flags

SETTERS = [
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_device('meta')",
    "torch.set_default_device('cuda')",
    "torch.set_default_device('cuda:1')",
    "torch.device('meta').__enter__()",
    "torch.set_grad_enabled(False)",
    "torch.use_deterministic_algorithms(True)",
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "torch.utils.deterministic.fill_uninitialized_memory = False",
    "torch.autograd.set_detect_anomaly(True)",
    "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    "torch.set_warn_always(True)",
    "torch.multiprocessing.set_sharing_strategy('file_system')",
    "torch.set_printoptions(precision=2, threshold=float('inf'), sci_mode=False)",
    "torch.__future__.set_swap_module_params_on_conversion(True)",
    "torch.__future__.set_overwrite_module_params_on_conversion(True)",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)",
    "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "torch.backends.cuda.preferred_linalg_library('magma')",
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "torch.backends.cuda.enable_math_sdp(False)",
    "torch.backends.cuda.enable_cudnn_sdp(False)",
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "torch.backends.mha.set_fastpath_enabled(False)",
    "torch.backends.cudnn.enabled = False",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn.depthwise_kernel = 'cudnn'",
    "torch.backends.miopen.immediate = True",
    "torch.backends.mkldnn.enabled = False",
    "torch.backends.mkldnn.deterministic = True",
    "torch.backends.quantized.engine = 'onednn'",
]

SETTERS_SINCE_2_9 = [
    "torch.set_float32_matmul_precision('high'); torch.set_float32_matmul_precision('highest')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'bf16'",
    "torch.backends.cudnn.fp32_precision = 'ieee'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.conv.fp32_precision = 'none'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.fp32_precision = 'bf16'",
    "torch.backends.mkldnn.set_flags(_fp32_precision='bf16')",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
    "torch.backends.mkldnn.rnn.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.backends.cudnn.allow_tf32 = True; torch.backends.fp32_precision = 'ieee'",
]
"""Of the newer interface to TF32, and where the older one shows in it."""

since_2_9 = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch 2.9 brought precisions by operation"
)

READINGS = [
    "torch.get_default_dtype()",
    "[str(mode.device) for mode in torch.overrides._get_current_function_mode_stack()]",
    "torch.is_grad_enabled()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.is_deterministic_algorithms_warn_only_enabled()",
    "torch.utils.deterministic.fill_uninitialized_memory",
    "torch.is_anomaly_enabled()",
    "torch.is_anomaly_check_nan_enabled()",
    "torch.is_warn_always_enabled()",
    "torch.multiprocessing.get_sharing_strategy()",
    "dict(vars(torch._tensor_str.PRINT_OPTS))",
    "torch.__future__.get_swap_module_params_on_conversion()",
    "torch.__future__.get_overwrite_module_params_on_conversion()",
    "torch.get_float32_matmul_precision()",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.fp32_precision",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.mkldnn.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.mkldnn.conv.fp32_precision",
    "torch.backends.mkldnn.rnn.fp32_precision",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "str(torch.backends.cuda.preferred_linalg_library())",
    "torch.backends.cuda.flash_sdp_enabled()",
    "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()",
    "torch.backends.cuda.cudnn_sdp_enabled()",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
    "torch.backends.mha.get_fastpath_enabled()",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.depthwise_kernel",
    "torch.backends.miopen.immediate",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.deterministic",
    "torch.backends.quantized.engine",
]


def apart(function: Callable[[], Any]) -> Any:
    """What `function` returns in a fork of this process."""
    receiver, sender = Pipe(duplex=False)
    process = Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        receiver.close()
        process.join()
        process.close()


def found() -> dict[str, Any]:
    """What torch answers here; of an answer that it refuses, how."""

    def answer(reading: str) -> Any:
        try:
            return eval(reading)
        except (AttributeError, RuntimeError) as error:
            return type(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {reading: answer(reading) for reading in READINGS}


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one[name], other[name]) for name in READINGS if one[name] != other[name]}


def notebook(code: str) -> tuple[TorchFlags, dict[str, Any]]:
    """What is captured in a notebook that has run `code`, and what it finds there itself afterwards."""

    def runs() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(code)
            except (AttributeError, TypeError):
                return None
            except RuntimeError as error:
                if "expects a bool, but got tuple" in str(error):
                    return None
                if "has not been compiled with" not in str(error):  # else the switch is set all the same
                    raise
        return TorchFlags.capture(), found()

    captured: tuple[TorchFlags, dict[str, Any]] | None = apart(runs)
    if captured is None:
        pytest.skip(f"torch {torch.__version__} has no such switch")
    return captured


def in_rank(flags: TorchFlags, code: str = "") -> dict[str, Any]:
    """What a fresh process finds once `flags` are applied and `code` has run."""

    def runs() -> dict[str, Any]:
        flags.apply()
        exec(code)
        return found()

    rank: dict[str, Any] = apart(runs)
    return rank


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What a process finds where nobody has set anything."""
    found_there: dict[str, Any] = apart(found)
    return found_there


@pytest.mark.sample(12)
@pytest.mark.parametrize("code", [*SETTERS, *(pytest.param(code, marks=since_2_9) for code in SETTERS_SINCE_2_9)])
def test_a_rank_finds_what_the_notebook_has_set(code: str, fresh: dict[str, Any]) -> None:
    flags, there = notebook(code)
    assert differences(there, fresh), "nothing shows that it was set"
    assert differences(there, in_rank(flags)) == {}


def test_looking_changes_nothing_loads_nothing_and_starts_no_cuda() -> None:
    def looks() -> tuple[Any, ...]:
        loaded = set(sys.modules)
        before = found()
        TorchFlags.capture()
        return differences(before, found()), set(sys.modules) - loaded, torch.cuda.is_initialized()

    assert apart(looks) == ({}, set(), False)


def test_what_nobody_has_set_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []

    def record(name: str, torch: Any, value: Any) -> None:
        touched.append(name)

    for name, flag in torch_flags._FLAGS.items():
        recording = dataclasses.replace(flag, write=functools.partial(record, name))
        monkeypatch.setitem(torch_flags._FLAGS, name, recording)
    TorchFlags.capture().apply()
    assert touched == []
    dataclasses.replace(TorchFlags.capture(), values={"backends.cudnn.benchmark": True, "grad_enabled": True}).apply()
    assert touched == ["backends.cudnn.benchmark"]


def test_the_older_interface_to_tf32_works_in_a_rank_of_a_notebook_that_used_none_or_that_one() -> None:
    for code in ("", "torch.set_float32_matmul_precision('medium')", "torch.backends.cudnn.allow_tf32 = False"):
        flags, _ = notebook(code)
        rank = in_rank(flags, "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.allow_tf32 = True")
        assert rank["torch.get_float32_matmul_precision()"] == "high"
        assert rank["torch.backends.cuda.matmul.allow_tf32"] is True
        assert rank["torch.backends.cudnn.allow_tf32"] is True


@since_2_9
def test_an_operation_without_a_precision_of_its_own_goes_on_following_its_parents() -> None:
    flags, _ = notebook("torch.backends.fp32_precision = 'tf32'")
    assert in_rank(flags)["torch.backends.mkldnn.conv.fp32_precision"] == "tf32"
    rank = in_rank(flags, "torch.backends.fp32_precision = 'ieee'")
    assert rank["torch.backends.cuda.matmul.fp32_precision"] == "ieee"
    assert rank["torch.backends.mkldnn.conv.fp32_precision"] == "ieee"


@since_2_9
def test_an_operation_with_a_precision_of_its_own_keeps_it_when_its_parents_change() -> None:
    flags, _ = notebook("torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'")
    rank = in_rank(flags, "torch.backends.fp32_precision = 'none'")
    assert rank["torch.backends.cuda.matmul.fp32_precision"] == "ieee"
    assert rank["torch.backends.mkldnn.matmul.fp32_precision"] == "none"


@since_2_9
def test_the_older_interface_which_warns_in_torch_2_9_is_asked_only_where_somebody_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warnings are errors in these tests."""

    def old() -> str:
        warnings.warn("Please use the new API settings to control TF32 behavior", UserWarning, stacklevel=2)
        asked.append(True)
        return "high"

    asked: list[bool] = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", old)
    assert "matmul_precision" not in TorchFlags.capture().values
    assert not asked
    assert notebook("torch.set_float32_matmul_precision('high')")[0].values["matmul_precision"] == "high"


def test_a_switch_that_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> bool:
        raise RuntimeError("You have used mix of the legacy API and new API")

    before = TorchFlags.capture().values
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", refuses)
    monkeypatch.delattr(torch, "is_warn_always_enabled")
    assert TorchFlags.capture().values.keys() == before.keys() - {"flash_sdp", "warn_always"}


def test_a_switch_that_cannot_be_set_keeps_no_other_from_being_set() -> None:
    flags, there = notebook("torch.set_default_dtype(torch.float64); torch.backends.cudnn.benchmark = True")
    stubborn = "import torch; torch.set_default_dtype = None"

    def runs() -> dict[str, Any]:
        exec(stubborn)
        flags.apply()
        return found()

    assert differences(there, apart(runs)) == {"torch.get_default_dtype()": (torch.float64, torch.float32)}


def test_without_torch_there_is_nothing_to_capture_and_nothing_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    flags = TorchFlags.capture()
    flags.apply()
    assert not flags.values
    assert "torch" not in sys.modules


def test_a_thread_is_given_what_torch_keeps_per_thread() -> None:
    def runs() -> list[Any]:
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        flags = read_flags(OF_A_THREAD)
        seen: list[Any] = []

        def works() -> None:
            seen.append((torch.ones(1).device.type, torch.is_grad_enabled()))
            set_flags(OF_A_THREAD, flags)
            seen.append((torch.ones(1).device.type, torch.is_grad_enabled()))
            torch.set_default_device(None)
            seen.append(torch.ones(1).device.type)

        thread = threading.Thread(target=works)
        thread.start()
        thread.join()
        return [*seen, torch.ones(1).device.type]

    assert apart(runs) == [("cpu", True), ("meta", False), "cpu", "meta"]


def test_a_process_whose_switches_were_read_can_still_be_forked() -> None:
    program = """
import os, torch
from nbaccel.features.clean_start.torch_flags import TorchFlags
TorchFlags.capture()
pid = os.fork()
if pid == 0:
    os._exit(int(torch.cuda._is_in_bad_fork()))
print("broken" if os.waitpid(pid, 0)[1] else "good")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "good\n", answer.stderr
