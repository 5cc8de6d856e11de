"""GPU trouble: obstacles that keep a GPU from computing, found before anything starts. Runs in kernels and scripts.

There is one sentence for each: torch has no code for it, its compute mode lets no process in, others hold its memory.
The module reads the results of a survey and constants of the loaded torch; it touches no device, so ranks can still be
forked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.asking_cuda import ask_torch
from nbaccel.base.gpu_holders import is_holder
from nbaccel.base.hardware import ComputeMode, Gpu
from nbaccel.base.quantities import in_gb

__all__ = [
    "TorchBuild",
    "before_a_run",
    "holder_name",
    "troubles",
]

CONTEXT_BYTES = 500_000_000
"""Bytes of a GPU that CUDA's context, cuBLAS and cuDNN take before the first tensor: 250 to 500 MB."""

_INTEGRATED = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)}
"""Jetsons: code for their generation does not run on all of them, and torch for them is built by others."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The GPUs for which torch was built.

    Args:
        flags: ("sm_75", "compute_90"); empty for a build without CUDA.
    """

    version: str
    flags: tuple[str, ...]

    @classmethod
    def loaded(cls) -> TorchBuild | None:
        """Return the build of this process's torch; None if torch is not loaded, or cannot be asked without harm.

        Reading the list, a constant, registers torch's handler for forks, which marks all later forks as broken
        (torch/csrc/cuda/Module.cpp, `THCPModule_getArchFlags`). So it is read only if CUDA is in use already.
        """
        torch: Any = sys.modules.get("torch")
        core, version = getattr(torch, "_C", None), getattr(torch, "version", None)
        if core is None or version is None or getattr(version, "hip", None):
            return None
        if version.cuda is None:
            return cls(str(torch.__version__), ())
        read = getattr(core, "_cuda_getArchFlags", None)
        if read is None or not torch.cuda.is_initialized():
            return None
        flags = tuple((read() or "").split())
        return cls(str(torch.__version__), flags) if flags else None

    @classmethod
    def installed(cls) -> TorchBuild | None:
        """Return the build of the torch that a separate process loads; the first call takes some seconds."""
        answer = ask_torch()
        return cls(answer.torch_version, answer.flags) if answer.torch_version else None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether torch has code for such a GPU, or code that its driver can compile for it.

        Machine code ("sm_86") runs on the same generation from its own number on, "compute" on all newer ones; with the
        suffix "a" either is for that one GPU, with "f" for its generation (CUDA programming guide, 5.1).

        Example:
            >>> build = TorchBuild("2.10.0+cu128", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
            >>> [build.runs_on(gpu) for gpu in ((6, 0), (7, 0), (7, 5), (8, 9), (9, 0), (12, 0))]
            [False, False, True, True, True, True]
            >>> TorchBuild("", ("sm_90a", "compute_80")).runs_on((12, 0)), TorchBuild("", ("sm_90a",)).runs_on((9, 0))
            (True, True)
        """
        if capability == (0, 0) or capability in _INTEGRATED:
            return True
        return any(_runs(flag, capability) for flag in self.flags)

    def __str__(self) -> str:
        return f"torch {self.version}"


def _runs(flag: str, capability: tuple[int, int]) -> bool:
    kind, _, number = flag.partition("_")
    digits = number.rstrip("af")
    if kind not in ("sm", "compute") or not digits.isdecimal():
        return True  # another vendor, or a new notation
    code = (int(digits) // 10, int(digits) % 10)
    if number.endswith("a"):
        return code == capability
    is_newer = capability >= code
    return is_newer and (capability[0] == code[0] or (kind == "compute" and number == digits))


def _nothing(device: str) -> int:
    return 0


def before_a_run(gpus: Sequence[Gpu], freed_on: Callable[[str], int] = _nothing) -> list[str]:
    """Return the sentences about the GPUs that a run is about to use.

    Args:
        freed_on: Returns the bytes that will be freed on a device before the run, by its name, "cuda:0".
    """
    return list(troubles(gpus, holder_name, TorchBuild.loaded(), freed_on))


def troubles(
    gpus: Sequence[Gpu],
    name_of: Callable[[int], str],
    build: TorchBuild | None,
    freed_on: Callable[[str], int] = _nothing,
) -> Iterator[str]:
    """Yield a sentence for each obstacle that will keep one of `gpus` from computing.

    Args:
        name_of: Returns the program that holds memory, by its process id as the driver reports it; empty if it is not
            visible.
        freed_on: See `before_a_run`.
    """
    if gpus and build is not None and not build.flags:
        yield (
            f"{build} is built without CUDA, so no rank can use {'the GPU' if len(gpus) == 1 else 'the GPUs'}: install "
            "a build for CUDA (pip install torch, from an index without /cpu), or use --cpu."
        )
    for gpu in gpus:
        who = f"GPU {gpu.index} {gpu.name}"
        if build is not None and build.flags and not build.runs_on(gpu.compute_capability):
            yield (
                f"{who} has compute capability {_dotted(gpu.compute_capability)}, and {build} has code for "
                f"{', '.join(build.flags)} only: what it computes there will fail (no kernel image is available). "
                "Install a build that has it, use other GPUs (--devices), or --cpu."
            )
        if gpu.compute_mode is ComputeMode.PROHIBITED:
            yield (
                f"{who} lets no process compute (compute mode prohibited): an administrator changes that by nvidia-smi "
                "-c DEFAULT; use other GPUs (--devices), or --cpu."
            )
        if gpu.compute_mode is ComputeMode.EXCLUSIVE and gpu.processes:
            yield (
                f"{who} takes one process at a time (compute mode exclusive), and has one: {_held(gpu, name_of)}. End "
                "it; if it is this notebook, which has used CUDA, restart the kernel."
            )
        elif gpu.total_bytes and gpu.free_bytes + freed_on(f"cuda:{gpu.index}") < CONTEXT_BYTES:
            yield (
                f"{who} is full: {in_gb(gpu.free_bytes)} of {in_gb(gpu.total_bytes)} are free, and a process takes up "
                f"to {in_gb(CONTEXT_BYTES)} before its first tensor; {_held(gpu, name_of)}."
            )


def holder_name(pid: int) -> str:
    """Return the name of a program that holds memory of a GPU, never its command line: that holds tokens and passwords.

    It is empty if the program is gone, or if the process id means another program here than for the driver (in a
    container).
    """
    import psutil

    if pid == os.getpid() and is_holder(pid):
        return "this one"
    try:
        return str(psutil.Process(pid).name()) if is_holder(pid) else ""
    except psutil.Error:
        return ""


def _held(gpu: Gpu, name_of: Callable[[int], str]) -> str:
    """Return which processes hold the GPU's memory, the largest first."""
    if not gpu.processes:
        return "who holds it the driver does not tell here"
    held = sorted(gpu.processes, key=lambda holder: -(holder[1] or 0))
    return "; ".join(
        f"{'an unknown amount' if count is None else in_gb(count)} held by process {pid} "
        f"({name_of(pid) or 'not visible from here'})"
        for pid, count in held
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
