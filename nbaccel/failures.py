"""What kind of failure is this: one table of symptoms, with its sources. Pure; asked in kernel and ranks.

A later layer decides what to do about a kind (retry, restart, give up); this file only names it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

__all__ = ["Failure", "classify"]


class Failure(enum.Enum):
    """Kinds of failure, by what a person would do next."""

    OUT_OF_MEMORY = "out of memory"
    PEER_LOST = "another rank was lost, or failed first"
    INTERRUPTED = "interrupted"
    USER = "an error in the program"


@dataclass(frozen=True, slots=True)
class _Symptom:
    kind: Failure
    type_names: frozenset[str]
    message: re.Pattern[str]
    source: str


def _symptom(kind: Failure, type_names: str, message: str, source: str) -> _Symptom:
    return _Symptom(kind, frozenset(type_names.split()), re.compile(message, re.IGNORECASE), source)


_TABLE = (
    _symptom(Failure.INTERRUPTED, "KeyboardInterrupt RunStopped", "", "our stop, or SIGINT"),
    _symptom(Failure.OUT_OF_MEMORY, "OutOfMemoryError MemoryError", "", "torch.cuda.OutOfMemoryError, CPython"),
    _symptom(Failure.OUT_OF_MEMORY, "RuntimeError AcceleratorError", r"out of memory", "CUDA, cuBLAS and NCCL texts"),
    _symptom(Failure.OUT_OF_MEMORY, "RuntimeError", r"CUBLAS_STATUS_ALLOC_FAILED", "cuBLAS handle creation"),
    _symptom(Failure.OUT_OF_MEMORY, "RuntimeError", r"DefaultCPUAllocator: can't allocate memory", "c10 CPU allocator"),
    _symptom(Failure.PEER_LOST, "PeerFailed", "", "our own, where a rank waits for what another one prepares"),
    _symptom(
        Failure.PEER_LOST,
        "RuntimeError DistBackendError DistNetworkError DistStoreError ConnectionError",
        r"connection (closed|reset) by peer|connection refused|broken pipe|socket (closed|timeout)"
        r"|remote (process )?(has )?(exited|closed)|connectFullMesh|recvError|writev|readv",
        "gloo transport/tcp/pair.cc, NCCL remote errors",
    ),
)


def classify(type_name: str, message: str) -> Failure:
    """The kind of a failure, from its class name and text.

    >>> classify("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:3").name
    'PEER_LOST'
    >>> classify("ValueError", "expected 10 classes, got 11").name
    'USER'
    """
    for symptom in _TABLE:
        if type_name.rpartition(".")[2] in symptom.type_names and symptom.message.search(message):
            return symptom.kind
    return Failure.USER
