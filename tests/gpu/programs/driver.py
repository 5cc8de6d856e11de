"""``driver.py cuda|cpu CASES``: what the driver does behind torch's back.

Facts on which the choice of a start method rests: by what a process that has called cuInit can be told from one that
has only asked NVML, and what a fork of it can still do. ``cpu`` runs the same without a driver, which proves this
program and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.facts import fact, tell_cases

_CHILD_S = 15.0
_UVM = "/dev/nvidia-uvm"


def descriptors() -> list[str]:
    """The driver's files that this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the folder's own
            continue
    return sorted({link for link in links if "nvidia" in link})


def threads() -> list[str]:
    return sorted(Path(f"/proc/self/task/{name}/comm").read_text().strip() for name in os.listdir("/proc/self/task"))


def cu_init(device: str) -> int:
    """What cuInit says: 0 is success, 3 is "not initialized", which is what a fork of a process that had it hears."""
    if device == "cpu":
        return 100  # "no device", as on a machine without a card
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def in_a_fork(ask: Callable[[], Any]) -> Any:
    """What `ask` returns in a forked child; a word where it does not come back."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = json.dumps(ask()).encode()
        except BaseException as error:
            answer = json.dumps(f"{type(error).__name__}: {error}").encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], _CHILD_S)
    said = os.read(reading, 1 << 16) if ready else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    return json.loads(said) if said else ("died" if ready else f"hung for {_CHILD_S:g} s")


def _told(**found: Any) -> dict[str, Any]:
    for name, value in found.items():
        fact(name, value)
    return found


def nvml(device: str) -> dict[str, Any]:
    """A process that has only asked NVML, as the notebook does."""
    from nbaccel.base.hardware import Survey

    survey = Survey.take()
    return _told(
        descriptors=descriptors(),
        has_uvm=_UVM in descriptors(),
        gpus=len(survey.gpus),
        cuinit_in_fork=in_a_fork(lambda: cu_init(device)),
    )


def counted(device: str) -> dict[str, Any]:
    """A process in which torch has counted the devices by NVML, which it keeps open."""
    import torch

    from nbaccel.base.forkable import loaded_driver, why_forks_fail

    before = descriptors()
    is_loaded_before = loaded_driver() is not None
    count = torch.cuda.device_count()
    driver = loaded_driver()
    return _told(
        before=before,
        count=count,
        is_available=torch.cuda.is_available(),
        descriptors=descriptors(),
        is_loaded=[is_loaded_before, driver is not None],
        driver_says=None if driver is None else driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())),
        why_forks_fail=why_forks_fail(),
        in_a_fork=in_a_fork(lambda: torch.ones(2, device=device).sum().item()),
    )


def cuinit(device: str) -> dict[str, Any]:
    """A process in which something has called cuInit: cupy, numba, jax, or torch below its flag."""
    before = descriptors()
    began = time.perf_counter()
    first = cu_init(device)
    return _told(
        cuinit_s=round(time.perf_counter() - began, 3),
        cuinit=first,
        before=before,
        descriptors=descriptors(),
        has_uvm=_UVM in descriptors(),
        threads=threads(),
        cuinit_in_fork=in_a_fork(lambda: cu_init(device)),
    )


def _tried(step: Callable[[], Any]) -> str:
    """Empty, or what was raised."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _torch_after(device: str, did: str, step: Callable[[], Any]) -> dict[str, Any]:
    import torch

    def backward() -> None:
        torch.ones(1, requires_grad=True).sum().backward()

    def fork() -> dict[str, Any]:
        return {
            "cuinit": cu_init(device),
            "is_in_bad_fork": torch.cuda._is_in_bad_fork(),
            "backward": _tried(backward),
            "on_device": _tried(lambda: torch.ones(1, device=device).sum().item()),
        }

    error = _tried(step)
    return _told(
        **{did: error or "done"},
        is_initialized=torch.cuda.is_initialized(),
        descriptors=descriptors(),
        has_uvm=_UVM in descriptors(),
        autograd_threads=[name for name in threads() if name.startswith("pt_autograd")],
        threads=len(threads()),
        fork=in_a_fork(fork),
    )


def backward(device: str) -> dict[str, Any]:
    """A process that has done a backward pass on the host, and nothing on a device."""
    import torch

    return _torch_after(device, "cpu_backward", lambda: torch.ones(1, requires_grad=True).sum().backward())


def pinned(device: str) -> dict[str, Any]:
    """A process that has pinned memory, and done nothing on a device."""
    import torch

    return _torch_after(device, "pin_memory", lambda: torch.ones(1).pin_memory())


def contexts(device: str) -> dict[str, Any]:
    """A process that has computed on its first device: on which devices it has a context, and how large that is."""
    import torch

    from nbaccel.base.hardware import Survey

    before = Survey.take().gpus
    began = time.perf_counter()
    torch.ones(1, device=device).sum().item()
    first_s = time.perf_counter() - began
    after = Survey.take().gpus
    return _told(
        first_value_s=round(first_s, 2),
        processes=[[pid for pid, _ in gpu.processes] for gpu in after],
        own_pid=os.getpid(),
        new_processes=[len(b.processes) - len(a.processes) for a, b in zip(before, after, strict=True)],
        grew_mb=[(b.used_bytes - a.used_bytes) // 10**6 for a, b in zip(before, after, strict=True)],
    )


def machine(device: str) -> dict[str, Any]:
    """What the machine is, for whoever reads the facts of a run that was elsewhere."""
    import torch

    from nbaccel.base.hardware import Survey

    survey = Survey.take()
    has_card = device != "cpu"
    return _told(
        cards=[
            f"{gpu.name}, {gpu.compute_capability}, {gpu.total_bytes // 10**6} MB, {gpu.compute_mode}"
            for gpu in survey.gpus
        ],
        arch_list=torch.cuda.get_arch_list() if has_card else [],
        cudnn=torch.backends.cudnn.version() if has_card else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_card else None,
        cores=survey.cpu_count,
        ram_gb=round(survey.ram.total_bytes / 1e9, 1),
        shm_mb=shutil.disk_usage("/dev/shm").total // 10**6 if Path("/dev/shm").is_dir() else None,
        kernel=survey.kernel_release,
        python=sys.version.split()[0],
        has_triton=_tried(lambda: __import__("triton")) == "",
        can_peer=torch.cuda.can_device_access_peer(0, 1) if has_card and torch.cuda.device_count() > 1 else None,
    )


def _summed(device: str) -> float:
    import torch
    import torch.distributed as dist
    from one_card import enter

    enter(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=_id(device))
    ones = torch.full((1000,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(ones)
    total = float(ones.sum())
    dist.destroy_process_group()
    return total


def _id(device: str) -> Any:
    import torch

    return torch.device("cuda", 0) if device == "cuda" else None


def one_card(device: str) -> dict[str, Any]:
    """Two ranks by NCCL on one card, which refuses them unless they seem to be on two machines."""
    from nbaccel.testing import run_ranks

    began = time.perf_counter()
    totals = run_ranks(2, _summed, device, timeout_s=45)
    return _told(works=totals == [3000.0, 3000.0], totals=totals, took_s=round(time.perf_counter() - began, 1))


CASES = {case.__name__: case for case in (nvml, counted, cuinit, backward, pinned, contexts, machine, one_card)}


if __name__ == "__main__":
    tell_cases(CASES, sys.argv[1:])
