"""Asking CUDA: asks torch's CUDA, in a separate process, for the GPUs and for those that torch was built for.

Runs in kernels and scripts, which must not ask themselves: a process that has asked CUDA for devices cannot be forked
any more. It takes some seconds, so it is for questions that nothing else answers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys

from nbaccel.base.values import frozen

__all__ = ["CudaAnswer", "Device", "ask_cuda", "ask_torch"]

_PATIENCE_S = 60.0
"""Seconds to wait: loading torch from a slow disk and waking the driver takes some ten; a driver may hang."""

_BURIAL_S = 1.0

_PROGRAM = """
import sys
sys.path[:] = {path!r}
import json, torch
flags = getattr(torch._C, "_cuda_getArchFlags", None)
flags = ("" if flags is None else flags() or "").split()
answer = {{"version": torch.__version__, "flags": flags, "devices": [], "error": ""}}
def of(number):
    one = torch.cuda.get_device_properties(number)
    return one.name, str(getattr(one, "uuid", "")), one.total_memory, (one.major, one.minor)
try:
    if {asks_driver}:
        torch.cuda.init()
        answer["devices"] = [of(number) for number in range(torch.cuda.device_count())]
except Exception as error:
    answer["error"] = str(error).strip().split("\\n")[0]
sys.stdout.write("\\n" + json.dumps(answer))
"""

Device = tuple[str, str, int, tuple[int, int]]
"""Name, UUID without a prefix (empty if unknown), bytes, compute capability."""


@frozen
class CudaAnswer:
    """The result of asking.

    Args:
        devices: In CUDA's order.
        error: Why there are none.
        torch_version, flags: Those of the torch that was asked, and the kinds of GPU that it has code for ("sm_75",
            "compute_90"); empty if it could not be asked, or is not built for CUDA.
    """

    devices: tuple[Device, ...] = ()
    error: str = ""
    torch_version: str = ""
    flags: tuple[str, ...] = ()


def ask_cuda() -> CudaAnswer:
    """Ask for devices; the answer is cached until the variables that choose devices change."""
    return _asked(True, *(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")))


def ask_torch() -> CudaAnswer:
    """Ask for which GPUs torch was built, and nothing that a driver would have to answer."""
    return _asked(False)


@functools.lru_cache(maxsize=8)
def _asked(asks_driver: bool, *chosen: str | None) -> CudaAnswer:
    path = [entry for entry in sys.path if isinstance(entry, str)]  # Python itself uses no others
    program = _PROGRAM.format(path=path, asks_driver=asks_driver)
    return _answer([sys.executable, "-c", program], _PATIENCE_S)


def _answer(command: list[str], patience_s: float) -> CudaAnswer:
    """Return the answer of the program.

    A killed process is not waited for long: a driver that hangs holds it for ever.
    """
    import subprocess  # some milliseconds, which every survey would pay

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        text, _ = process.communicate(timeout=patience_s)
        answer = json.loads(text.rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return CudaAnswer(error=f"no answer within {patience_s:g} s")
    except ValueError:
        return CudaAnswer(error=f"the process that asked it ended with exit code {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_BURIAL_S)
    return CudaAnswer(
        devices=tuple((name, uuid, total, (major, minor)) for name, uuid, total, (major, minor) in answer["devices"]),
        error=answer["error"],
        torch_version=answer["version"],
        flags=tuple(answer["flags"]),
    )
