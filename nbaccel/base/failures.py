"""Kinds of failures, and what may be tried again: one table of symptoms, with its sources.

Pure; used in kernel and ranks. It only classifies: the layers that retry, restart or give up are elsewhere.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from nbaccel.base.values import frozen

__all__ = [
    "NEARLY_FULL",
    "Failure",
    "Recovery",
    "asked_bytes",
    "can_retry",
    "classify",
    "in_bytes",
    "is_of_host",
    "recovery_of",
]

NEARLY_FULL = 0.9
"""Fraction of the memory in use from which on an ambiguous error counts as out of memory."""


class Failure(enum.Enum):
    """Kinds of failure, by the reaction that they call for."""

    OUT_OF_MEMORY = "out of memory"
    DEVICE_LOST = "this process can no longer use its device"
    BROKEN_FORK = "a fork of a process that had used CUDA, or autograd's threads, and cannot use them"
    PEER_LOST = "another rank was lost, or failed first"
    INTERRUPTED = "interrupted"
    USER = "an error in the program"


class Recovery(enum.Enum):
    """Possible recoveries from a failure."""

    RETRY = "the same work in smaller pieces, in this process"
    RETRY_IF_NEARLY_FULL = "the same, if the memory was nearly full, and once per size; else nothing"
    RESTART = "the same work in a new process"
    NO = "nothing; it would fail again"


@frozen
class _Symptom:
    kind: Failure
    recovery: Recovery
    type_names: frozenset[str]
    message: str
    source: str
    is_of_host: bool = False


def _symptom(
    kind: Failure, recovery: Recovery, type_names: str, message: str, source: str, is_of_host: bool = False
) -> _Symptom:
    return _Symptom(kind, recovery, frozenset(type_names.split()), message, source, is_of_host)


_TORCH = "RuntimeError AcceleratorError OutOfMemoryError DistBackendError InductorError BackendCompilerFailed"
"""Class names of torch's errors.

If only the name of an error is left, its bases are unknown, so all of them are listed.
"""

_TABLE = (
    _symptom(Failure.INTERRUPTED, Recovery.NO, "KeyboardInterrupt RunStopped", "", "our stop, or SIGINT"),
    _symptom(Failure.PEER_LOST, Recovery.NO, "PeerFailed", "",
             "our own, where a rank waits for what another one prepares"),
    # Errors that no other batch and no other process changes: the advice is in `launch.diagnosis`.
    _symptom(Failure.USER, Recovery.NO, _TORCH,
             r"(creating|attaching to) shared memory segment /dev/shm/nccl-|failed to extend /dev/shm/nccl-",
             "NCCL shmutils.cc: /dev/shm is full"),
    _symptom(Failure.USER, Recovery.NO, _TORCH, r"Duplicate GPU detected", "NCCL init.cc: two ranks on one GPU"),
    _symptom(Failure.USER, Recovery.NO, _TORCH, r"no kernel image is available",
             "CUDA runtime API: torch was built without code for this GPU"),
    _symptom(Failure.USER, Recovery.NO, _TORCH, r"CUDA-capable device\(s\) is/are busy or unavailable",
             "CUDA runtime API: another process holds a GPU in exclusive mode, or the mode forbids computing"),
    _symptom(Failure.BROKEN_FORK, Recovery.NO, _TORCH,
             r"Cannot re-initialize CUDA in forked subprocess|CUDA driver initialization failed"
             r"|CUDA error: initialization error|Unable to handle autograd's threading",
             "torch/cuda/__init__.py, CUDAFunctions.cpp, autograd/engine.cpp"),
    # A process that cannot go on, whatever the text says about memory.
    _symptom(Failure.PEER_LOST, Recovery.RESTART, _TORCH,
             r"NCCL communicator was aborted(?!.*(?i:cuda error))",
             "torch NCCLUtils.cpp: a group that was cut, which says so if this side's own device was why"),
    _symptom(Failure.PEER_LOST, Recovery.RESTART, _TORCH,
             r"NCCL error.*(?i:remote (process )?(has )?(exited|closed)|connection (closed|reset|refused)|broken pipe)",
             "torch ProcessGroupNCCL.cpp, ncclRemoteError and ncclSystemError"),
    _symptom(Failure.DEVICE_LOST, Recovery.RESTART, _TORCH, r"NCCL error|ncclUnhandledCudaError",
             "torch ProcessGroupNCCL.cpp: the communicator is gone"),
    _symptom(Failure.DEVICE_LOST, Recovery.RESTART, _TORCH, r"handles_\.at\(i\).*INTERNAL ASSERT",
             "torch CUDACachingAllocator.cpp: expandable segments after a failed map, pytorch #188008"),
    _symptom(Failure.DEVICE_LOST, Recovery.RESTART, _TORCH,
             r"CUDA driver error: device not ready|illegal memory access|device-side assert|unspecified launch failure"
             r"|misaligned address|an illegal instruction was encountered|uncorrectable (ECC|NVLink)"
             r"|the launch timed out and was terminated|hardware stack error|invalid program counter"
             r"|(?i:over nvlink or a hardware error)|operation not supported on global/shared address space",
             "CUDA runtime API, errors that stay with the context"),
    # Memory that ran out.
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, "OutOfMemoryError", "", "torch.OutOfMemoryError, of every device"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, "MemoryError _ArrayMemoryError", "", "CPython, numpy", True),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH,
             r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA|HPU|MPS backend|CPU) out of memory\b", "torch's allocators, and vendors'"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH,
             r"\b(CUDA|HIP|CUDA driver) error: out of memory\b|\bhipErrorOutOfMemory\b",
             "c10/cuda: the runtime's own; not an OutOfMemoryError, ComfyUI #13210"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH,
             r"\bCUBLAS_STATUS_ALLOC_FAILED\b|\bCUBLAS_STATUS_NOT_INITIALIZED\b.*\bcublasCreate\b",
             "cuBLAS: workspace, handle"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH,
             r"\bCUDNN_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED\b"
             r"|\bCUSOLVER_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b",
             "cuDNN (the first since 9), cuSOLVER, cuFFT: status codes"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH, r"\bCUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED\b",
             "cuDNN since 9", True),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH, r"\bTriton Error \[(CUDA|HIP)\]: out of memory\b",
             "triton: a compiled kernel is loaded, or launched, past torch's allocator"),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH,
             r"\bDefaultCPUAllocator: (can't allocate memory|not enough memory)",
             "c10/core/impl/alloc_cpu.cpp: Linux, Windows", True),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH, r"^std::bad_alloc\b", "libstdc++, through torch", True),
    _symptom(Failure.OUT_OF_MEMORY, Recovery.RETRY, _TORCH, r"\bCaught OutOfMemoryError in replica\b",
             "torch/_utils.py, DataParallel: the original type does not always survive"),
    # Errors of libraries whose workspace did not fit, and of other causes.
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH,
             r"\bCUDNN_STATUS_(NOT_INITIALIZED|NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)(_\w+)?\b"
             r"|(?i:unable to find an engine to execute)|Unable to find a valid cuDNN algorithm",
             "cuDNN with its sub-codes, torch-max-mem"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH,
             r"\bCUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)\b", "cuBLAS, torch-max-mem"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH,
             r"\bCUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b.*\bcusolverDnCreate\b", "cuSOLVER: its handle"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH, r"\bCUFFT_(INTERNAL_ERROR|SETUP_FAILED)\b",
             "cuFFT: a plan that does not fit, as seen on a full H100"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH, r"\bCUDA driver error: 2(?!\d)",
             "ATen/cuda/Exceptions.h, where it writes the number alone (HIP): that of out of memory"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH,
             r"\bInvalid buffer size\b|\bINT_MAX\b|\bcanUse32BitIndexMath\b",
             "MPS, and kernels with 32-bit indices: torch-max-mem"),
    _symptom(Failure.USER, Recovery.RETRY_IF_NEARLY_FULL, _TORCH,
             r"^could not (create|execute) a (primitive|memory)",
             "oneDNN: code, scratch memory; the text leaves out the status, which may also be that of a bug "
             "(oneDNN #914, #1500)", True),
    _symptom(Failure.PEER_LOST, Recovery.NO,
             "RuntimeError DistBackendError DistNetworkError DistStoreError ConnectionError",
             r"(?i:connection (closed|reset) by peer|connection refused|broken pipe|socket (closed|timeout)"
             r"|remote (process )?(has )?(exited|closed)|connectFullMesh|recvError|writev|readv)",
             "gloo transport/tcp/pair.cc, NCCL remote errors"),
)  # fmt: skip
"""Symptoms; the first row that matches counts. An error that matches none is one in the program, and is not retried."""


def classify(type_name: str, message: str, used_fraction: float | None = None) -> Failure:
    """Return the kind of a failure, from its class name and text.

    Args:
        used_fraction: Share of the memory that was in use when it failed; None if unknown.

    Example:
        >>> classify("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:3").name
        'PEER_LOST'
        >>> classify("ValueError", "expected 10 classes, got 11").name
        'USER'
        >>> classify("RuntimeError", "could not create a primitive", used_fraction=0.99).name
        'OUT_OF_MEMORY'
    """
    symptom = _find(frozenset([type_name.rpartition(".")[2]]), message)
    if symptom is None:
        return Failure.USER
    if symptom.recovery is Recovery.RETRY_IF_NEARLY_FULL and _is_nearly_full(used_fraction):
        return Failure.OUT_OF_MEMORY
    return symptom.kind


def recovery_of(error: BaseException) -> Recovery:
    """Return the possible recovery from `error`, by the first error in its chain of causes that determines it.

    Only ``raise … from`` counts: an error that was merely being handled when `error` was raised is not its cause.

    Example:
        >>> recovery_of(MemoryError()).name
        'RETRY'
        >>> recovery_of(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")).name
        'RETRY_IF_NEARLY_FULL'
        >>> recovery_of(RuntimeError("CUDA error: device-side assert triggered")).name
        'RESTART'
        >>> recovery_of(RuntimeError("we ran out of memory. sorry")).name
        'NO'
    """
    symptom = _symptom_of(error)
    return Recovery.NO if symptom is None else symptom.recovery


def is_of_host(error: BaseException) -> bool:
    """Return whether `error`, if it is about memory, is about the host's memory and not a device's.

    Example:
        >>> is_of_host(RuntimeError("could not create a primitive")), is_of_host(RuntimeError("HIP out of memory."))
        (True, False)
    """
    symptom = _symptom_of(error)
    return symptom is not None and symptom.is_of_host


def can_retry(error: BaseException, used_fraction: float | None = None) -> bool:
    """Return whether the same work may succeed in smaller pieces, in this process.

    Args:
        used_fraction: Share of the memory that was in use when it failed; None if unknown.

    Example:
        >>> error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
        >>> can_retry(error, used_fraction=0.95), can_retry(error, used_fraction=0.5), can_retry(error)
        (True, False, False)
    """
    match recovery_of(error):
        case Recovery.RETRY:
            return True
        case Recovery.RETRY_IF_NEARLY_FULL:
            return _is_nearly_full(used_fraction)
        case _:
            return False


_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ASKED = rf"(?i:tried to allocate|unable to allocate) ([\d.]+) ?({'|'.join(_UNITS)})\b"


def in_bytes(number: str, unit: str) -> int:
    """Return a size of torch's error texts in bytes.

    Example:
        >>> in_bytes("2.50", "KiB")
        2560
    """
    return int(float(number) * _UNITS[unit])


def asked_bytes(text: str) -> int:
    """Return the size of the allocation that failed, by the text of the error; 0 if the text does not give it.

    Example:
        >>> asked_bytes("Tried to allocate 2.00 GiB."), asked_bytes("you tried to allocate 64 bytes.")
        (2147483648, 64)
    """
    found = re.search(_ASKED, text)
    return 0 if found is None else in_bytes(found[1], found[2])


def _is_nearly_full(used_fraction: float | None) -> bool:
    return used_fraction is not None and used_fraction >= NEARLY_FULL


def _symptom_of(error: BaseException) -> _Symptom | None:
    """Return the first symptom in the chain of causes."""
    found = (_find(frozenset(base.__name__ for base in type(link).__mro__), str(link)) for link in _causes(error))
    return next((symptom for symptom in found if symptom is not None), None)


def _find(type_names: frozenset[str], message: str) -> _Symptom | None:
    for symptom in _TABLE:
        # `re` compiles each pattern here, once: compiling all would be a twentieth of nbaccel's import.
        if symptom.type_names & type_names and re.search(symptom.message, message, re.DOTALL):
            return symptom
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
