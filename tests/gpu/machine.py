"""What `make gpu` and `make bench-gpu` need before they begin: a card, torch for it, and some small packages.

Runs in the Python at hand, which may have nothing: it imports torch last, and nbaccel never. Whoever gives a machine
with CUDA has chosen its torch, so nothing here ever installs another one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["NOT_READY", "about", "kept_awake", "main", "use_once", "what_is_missing"]

NOT_READY = 2

_OURS = {
    "IPython": "ipython",
    "cloudpickle": "cloudpickle",
    "ipywidgets": "ipywidgets<9",
    "matplotlib": "matplotlib",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "safetensors": "safetensors",
    "tqdm": "tqdm",
}
_OF_TESTS = {
    "ipykernel": "ipykernel",
    "jupyter_client": "jupyter_client",
    "pytest": "pytest>=8",
    "pytest_timeout": "pytest-timeout",
}
_NEEDS = {"tests": _OURS | _OF_TESTS, "benchmarks": _OURS}
"""By what is to run: modules, and what pip calls them. None of them needs torch, so pip leaves that as it is."""

_PEERS = ("accelerate", "lightning")


def what_is_missing(
    purpose: str,
    root: Path = Path("/"),
    find: Callable[[str], Any] = importlib.util.find_spec,
    load_torch: Callable[[], Any] = lambda: importlib.import_module("torch"),
    count_devices: Callable[[], int] | None = None,
) -> str:
    """Why `purpose` ("tests" or "benchmarks") cannot run here, and the next move; empty where it can.

    root, find, load_torch, count_devices: stand in for the machine, in tests.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  # the Python at hand may be any
        return (
            f"nbaccel needs Python 3.11 or newer, and this is {sys.version.split()[0]}: make gpu GPU_PYTHON=python3.11"
        )
    if not any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg")):
        return "no CUDA device: there is no NVIDIA driver on this machine (no /dev/nvidiactl), and this needs a card."
    if find("torch") is None:
        return (
            f"{sys.executable} has no torch. Name the Python of this machine that has one for CUDA: "
            "make gpu GPU_PYTHON=/path/to/python"
        )
    missing = [package for module, package in _NEEDS[purpose].items() if find(module) is None]
    if missing:
        names = " ".join(f"'{name}'" if set("<>") & set(name) else name for name in missing)
        return f"missing: {', '.join(missing)}. This installs them and leaves torch alone:\n  {_pip(names)}"
    if purpose == "tests" and find is importlib.util.find_spec and _major("pytest") < 8:
        return "pytest 8 or newer is needed; this leaves torch alone:\n  " + _pip("'pytest>=8'")
    torch = load_torch()
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} of {sys.executable} was built without CUDA. Name a Python whose torch has it: "
            "make gpu GPU_PYTHON=/path/to/python"
        )
    if not (count_devices or torch.cuda.device_count)():
        return (
            f"no CUDA device: torch {torch.__version__} (CUDA {torch.version.cuda}) finds none here. nvidia-smi says "
            "whether the driver sees a card, and CUDA_VISIBLE_DEVICES whether this process may."
        )
    return ""


def _pip(packages: str) -> str:
    return f"{sys.executable} -m pip install {packages}"


def _major(package: str) -> int:
    return int(importlib.metadata.version(package).partition(".")[0])


def about() -> dict[str, Any]:
    """What stands beside every fact: torch, its CUDA, the driver, and the cards. By NVML, which makes no context."""
    import torch

    from nbaccel.base.hardware import Survey

    survey = Survey.take()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "cards": [gpu.name for gpu in survey.gpus],
    }


_FIRST_USE_S = 240.0
_FIRST_USE = """
import json, time
began = time.monotonic()
import torch
loaded = time.monotonic()
x = torch.randn(256, 256, device="cuda")
(x @ x).sum().item()
torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]).sum().item()
print(json.dumps({"load_torch_s": round(loaded - began, 1), "first_use_s": round(time.monotonic() - loaded, 1)}))
"""


def use_once() -> tuple[dict[str, Any], str]:
    """Use the card in a process of its own: how long that took, and why it could not be done; empty if it was.

    A fresh machine reads gigabytes of libraries from its disk, and no test is charged for that. A driver that is too
    old for this torch, or a card that lets nobody compute, is found here, and not in every test.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=False, timeout=_FIRST_USE_S
        )
    except subprocess.TimeoutExpired:
        return {}, f"the card was not usable after {_FIRST_USE_S:g} s: torch was still loading, or its driver hangs."
    if ran.returncode != 0:
        return {"error": ran.stderr[-2000:]}, f"the card cannot be used:\n{ran.stderr.strip()}"
    return json.loads(ran.stdout.splitlines()[-1]), ""


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep NVML open: without a persistence daemon the driver puts a card down when its last user leaves.

    Each process, and each look at the card's memory, would wait a second or more until it is up again.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:  # the tests say so themselves
        yield
        return
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    finally:
        pynvml.nvmlShutdown()


def main(arguments: Sequence[str]) -> int:
    """``python -m gpu.machine tests|benchmarks``: 0 where it can run, else a sentence and 2."""
    (purpose,) = arguments
    if why := what_is_missing(purpose):
        print(why, file=sys.stderr)
        return NOT_READY
    if purpose == "benchmarks":
        used, why = use_once()
        print(why or used, file=sys.stderr)
        if why:
            return NOT_READY
    absent = [name for name in _PEERS if importlib.util.find_spec(name) is None]
    if purpose == "benchmarks" and absent:
        import torch

        print(
            f"left out, since they are not installed: {', '.join(absent)}. This installs them, or fails where it would "
            f"have to change torch:\n  {_pip(' '.join([*absent, f'torch=={torch.__version__}']))}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
