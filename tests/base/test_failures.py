"""What kind of failure an error is, and what may be tried again: the table row by row, both ways."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from nbaccel.base.failures import NEARLY_FULL, Failure, Recovery, can_retry, classify, is_of_host, recovery_of
from nbaccel.testing import MemLimit

AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)  # torch >= 2.8

NCCL_FULL_SHM = """NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), \
NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-sBJb8i (size 9637892), error: No space left on device (28)"""

NCCL_ONE_GPU = """NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50"""


def compilers(name: str, text: str) -> RuntimeError:
    """An error of torch's compilers, which are slow to import and want an error of their own to be made of."""
    error: RuntimeError = type(name, (RuntimeError,), {})(text)
    return error


ROWS = [
    # -- retry
    (Recovery.RETRY, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total …")),
    (Recovery.RETRY, torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB")),
    (Recovery.RETRY, torch.OutOfMemoryError()),
    (Recovery.RETRY, MemoryError()),
    (Recovery.RETRY, MemoryError("Unable to allocate 7.28 TiB for an array", "two arguments")),
    (Recovery.RETRY, RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 14.76 GiB total capacity)")),
    (Recovery.RETRY, RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB")),
    (Recovery.RETRY, RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB")),
    (Recovery.RETRY, RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.3 GB)")),
    (Recovery.RETRY, AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously …")),
    (Recovery.RETRY, RuntimeError("CUDA driver error: out of memory")),
    (Recovery.RETRY, RuntimeError("HIP error: out of memory")),
    (Recovery.RETRY, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    (Recovery.RETRY, RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")),
    (Recovery.RETRY, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    (Recovery.RETRY, RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    (Recovery.RETRY, RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED")),
    (Recovery.RETRY, RuntimeError("Triton Error [CUDA]: out of memory")),
    (Recovery.RETRY, RuntimeError("Triton Error [HIP]: out of memory")),
    (Recovery.RETRY, compilers("InductorError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")),
    (Recovery.RETRY, compilers("BackendCompilerFailed",
                               "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate")),
    (Recovery.RETRY, RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`")),
    (Recovery.RETRY, RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED")),
    (Recovery.RETRY, RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                                  "memory: you tried to allocate 8000000000000 bytes. Error code 12")),
    (Recovery.RETRY, RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: "
                                  "you tried to allocate 8000000000000 bytes.")),
    (Recovery.RETRY, RuntimeError("std::bad_alloc")),
    (Recovery.RETRY, RuntimeError("Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback …")),
    # -- retry if nearly full
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear …")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")),
    *((Recovery.RETRY_IF_NEARLY_FULL, RuntimeError(f"cuDNN error: CUDNN_STATUS_{code}")) for code in (
        "NOT_INITIALIZED", "NOT_SUPPORTED_GRAPH_PATTERN", "INTERNAL_ERROR_TEXTURE_CREATION_FAILED",
        "EXECUTION_FAILED", "EXECUTION_FAILED_CUDART")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("GET was unable to find an engine to execute this computation")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("Unable to find a valid cuDNN algorithm to run convolution")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasX`")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLt`")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLt`")),
    (Recovery.RETRY_IF_NEARLY_FULL,
     RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("CUDA driver error: 2")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("Invalid buffer size: 20.52 GB")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("input tensor must have fewer than INT_MAX elements")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("could not create a primitive")),
    (Recovery.RETRY_IF_NEARLY_FULL, RuntimeError("could not create a memory object")),
    # -- restart the process
    (Recovery.RESTART, RuntimeError("!handles_.at(i) INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:412")),
    (Recovery.RESTART, RuntimeError("CUDA driver error: device not ready")),
    (Recovery.RESTART, AcceleratorError("CUDA error: an illegal memory access was encountered")),
    (Recovery.RESTART, AcceleratorError("CUDA error: device-side assert triggered")),
    (Recovery.RESTART, RuntimeError("CUDA error: unspecified launch failure")),
    (Recovery.RESTART, RuntimeError("CUDA error: misaligned address")),
    (Recovery.RESTART, RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    (Recovery.RESTART, RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution")),
    (Recovery.RESTART, RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error")),
    (Recovery.RESTART, AcceleratorError("CUDA error: the launch timed out and was terminated")),
    (Recovery.RESTART, AcceleratorError("CUDA error: hardware stack error")),
    (Recovery.RESTART, AcceleratorError("CUDA error: invalid program counter")),
    (Recovery.RESTART, AcceleratorError("CUDA error: operation not supported on global/shared address space")),
    (Recovery.RESTART, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")),
    (Recovery.RESTART, torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1. ")),
    (Recovery.RESTART, torch.distributed.DistBackendError(
        "NCCL communicator was aborted on rank 1.  Original reason for failure was: NCCL error: unhandled cuda error")),
    (Recovery.RESTART, torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nncclUnhandledCudaError: 'out of memory'")),
    (Recovery.RESTART, torch.distributed.DistBackendError("NCCL error: remote process exited or network error")),
    # -- no
    (Recovery.NO, RuntimeError("we ran out of memory. sorry")),
    (Recovery.NO, ValueError("CUDA out of memory. is what the user typed")),
    (Recovery.NO, RuntimeError("out of resource: shared memory, Required: 114688, Hardware limit: 101376")),
    (Recovery.NO, RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 4]")),
    (Recovery.NO, RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that …")),
    (Recovery.NO, RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")),
    (Recovery.NO, RecursionError("maximum recursion depth exceeded")),
    (Recovery.NO, AssertionError("Torch not compiled with CUDA enabled")),
    (Recovery.NO, RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")),
    (Recovery.NO, RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`")),
    (Recovery.NO, RuntimeError("CUDA driver error: 201")),
    (Recovery.NO, AcceleratorError("CUDA error: no kernel image is available for execution on the device")),
    (Recovery.NO, AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")),
    (Recovery.NO, AcceleratorError("CUDA error: operation failed due to a previous error during capture")),
    (Recovery.NO, RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu.")),
    (Recovery.NO, RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, …")),
    (Recovery.NO, AcceleratorError("CUDA error: initialization error\nCUDA kernel errors might be …")),
    (Recovery.NO, RuntimeError("Unable to handle autograd's threading in combination with fork-based multiproc…")),
    (Recovery.NO, torch.distributed.DistBackendError(NCCL_FULL_SHM)),
    (Recovery.NO, torch.distributed.DistBackendError(NCCL_ONE_GPU)),
    (Recovery.NO, KeyboardInterrupt()),
    (Recovery.NO, RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")),
]  # fmt: skip

every_row = pytest.mark.parametrize(
    ("recovery", "error"), ROWS, ids=[f"{recovery.name}-{str(error)[:40]}" for recovery, error in ROWS]
)


@every_row
def test_criterion_31_every_row_of_the_table(recovery: Recovery, error: BaseException) -> None:
    assert recovery_of(error) is recovery


@every_row
def test_criterion_31_every_row_with_memory_nearly_full_and_not(recovery: Recovery, error: BaseException) -> None:
    fullness = {None: False, 0.0: False, NEARLY_FULL - 0.01: False, NEARLY_FULL: True, 1.0: True}
    for used_fraction, is_nearly_full in fullness.items():
        wanted = recovery is Recovery.RETRY or (recovery is Recovery.RETRY_IF_NEARLY_FULL and is_nearly_full)
        assert can_retry(error, used_fraction) is wanted


@every_row
def test_what_only_left_its_name_is_of_the_same_kind(recovery: Recovery, error: BaseException) -> None:
    kind = classify(type(error).__qualname__, str(error))
    assert (kind is Failure.OUT_OF_MEMORY) is (recovery is Recovery.RETRY)
    if recovery is Recovery.RESTART:
        assert kind in (Failure.DEVICE_LOST, Failure.PEER_LOST)


@every_row
def test_a_name_says_as_much_with_memory_nearly_full(recovery: Recovery, error: BaseException) -> None:
    kind = classify(type(error).__qualname__, str(error), NEARLY_FULL)
    assert (kind is Failure.OUT_OF_MEMORY) is (recovery in (Recovery.RETRY, Recovery.RETRY_IF_NEARLY_FULL))


def test_an_error_is_what_caused_it_but_not_what_was_being_handled() -> None:
    caused, handling = ValueError("step failed"), ValueError("step failed")
    caused.__cause__ = RuntimeError("again")
    caused.__cause__.__cause__ = MemoryError()
    handling.__context__ = MemoryError()
    assert recovery_of(caused) is Recovery.RETRY
    assert recovery_of(handling) is Recovery.NO


@pytest.mark.parametrize(
    ("text", "of_host"),
    [
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", False),
        ("Triton Error [CUDA]: out of memory", False),
    ],
)
def test_whose_memory_ran_out_is_known(text: str, of_host: bool) -> None:
    assert is_of_host(RuntimeError(text)) is of_host


def test_causes_that_go_in_a_circle_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert recovery_of(one) is Recovery.NO


def test_real_errors_of_this_machine_are_known() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50, dtype=np.uint8)
    with pytest.raises(RuntimeError) as limits, MemLimit(10):
        torch.empty(100)
    with pytest.raises(RuntimeError) as overflown:
        torch.empty(1 << 62, 1 << 10)
    assert recovery_of(torchs.value) is recovery_of(numpys.value) is recovery_of(limits.value) is Recovery.RETRY
    assert recovery_of(overflown.value) is Recovery.NO
    sent = pickle.loads(pickle.dumps(numpys.value))
    assert recovery_of(sent) is Recovery.RETRY
    assert classify(type(numpys.value).__qualname__, str(numpys.value)) is Failure.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("type_name", "message", "kind"),
    [
        ("KeyboardInterrupt", "", Failure.INTERRUPTED),
        ("nbaccel.errors.RunStopped", "", Failure.INTERRUPTED),
        ("PeerFailed", "rank 1 failed", Failure.PEER_LOST),
        ("ConnectionError", "[Errno 32] Broken pipe", Failure.PEER_LOST),
        ("DistBackendError", "NCCL error in: x.cpp:1, remote process exited", Failure.PEER_LOST),
        ("RuntimeError", "Connection Closed By Peer", Failure.PEER_LOST),
        ("torch.OutOfMemoryError", "", Failure.OUT_OF_MEMORY),
        ("AcceleratorError", "CUDA error: device-side assert triggered", Failure.DEVICE_LOST),
        ("AcceleratorError", "CUDA error: the launch timed out and was terminated", Failure.DEVICE_LOST),
        ("DistBackendError", "NCCL communicator was aborted on rank 1.", Failure.PEER_LOST),
        (
            "DistBackendError",
            "NCCL communicator was aborted on rank 1. Original reason: NCCL error: unhandled cuda error",
            Failure.DEVICE_LOST,
        ),
        ("DistBackendError", NCCL_FULL_SHM, Failure.USER),
        ("DistBackendError", NCCL_ONE_GPU, Failure.USER),
        ("InductorError", "OutOfMemoryError: CUDA out of memory. Tried to allocate", Failure.OUT_OF_MEMORY),
        ("BackendCompilerFailed", "backend='inductor' raised:\nCUDA out of memory.", Failure.OUT_OF_MEMORY),
        ("RuntimeError", "CUDA driver initialization failed, you might not have a CUDA gpu.", Failure.BROKEN_FORK),
        ("RuntimeError", "Cannot re-initialize CUDA in forked subprocess.", Failure.BROKEN_FORK),
        ("AcceleratorError", "CUDA error: initialization error", Failure.BROKEN_FORK),
        ("RuntimeError", "Unable to handle autograd's threading in combination with fork", Failure.BROKEN_FORK),
        ("AcceleratorError", "CUDA error: no kernel image is available for execution", Failure.USER),
        ("AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Failure.USER),
        ("ValueError", "connection refused", Failure.USER),
        ("RuntimeError", "we ran out of memory. sorry", Failure.USER),
    ],
)
def test_kinds_by_name_and_text(type_name: str, message: str, kind: Failure) -> None:
    assert classify(type_name, message) is kind
