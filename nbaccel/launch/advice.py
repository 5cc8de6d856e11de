"""Advice: the next step for errors whose own text does not name it in the terms of a notebook.

Pure; runs in the kernel.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from nbaccel.failures import Failure, classify
from nbaccel.launch.hostmemory import HostMemory
from nbaccel.launch.loaderworkers import WorkerEnd
from nbaccel.launch.report import Link, signal_name

__all__ = ["advice"]

_LITTLE_SHARED_MEMORY = (
    "/dev/shm is full, and DataLoader workers pass batches through it: use num_workers=0, smaller batches or a lower "
    "prefetch_factor, or start the container with --shm-size."
)
_FEW_FILES = (
    "This process may open no more files, and DataLoader workers pass each tensor as one: call "
    "torch.multiprocessing.set_sharing_strategy('file_system') in the cell, or use num_workers=0."
)

_FULL_FOR_NCCL = (
    "/dev/shm is full, and NCCL passes through it what GPUs without a direct way exchange: start the container with "
    "--shm-size=1g, or set os.environ['NCCL_SHM_DISABLE'] = '1' in a cell before, which is slower."
)
_ONE_GPU_FOR_TWO = (
    "Two ranks use one GPU, and NCCL wants one for each: put the model on accelerator.device, or on the device that is "
    "current when the rank begins, instead of a number, or use fewer ranks (-n)."
)
_NO_CODE = (
    "torch, or the extension that the traceback names, was built without code for this GPU; %accelerate doctor says "
    "for which torch was. Install a build that has it (of torch: one for CUDA 12.6, cu126, for GPUs older than the T4, "
    "one for a newer CUDA for the latest), or use --cpu."
)
_BUSY = (
    "The GPU takes one process at a time (exclusive mode) and another one holds it, or it takes none: `nvidia-smi` "
    "shows who, and the mode. It may be this notebook, if it has used CUDA: restart its kernel. An administrator lets "
    "several in by `nvidia-smi -c DEFAULT`."
)
_WORKER_ON_DEVICE = (
    "A worker of a DataLoader used CUDA, which no fork of a process that uses it can: let the data set return tensors "
    "of the CPU and move batches in the loop, or give the DataLoader multiprocessing_context='spawn'."
)
_BROKEN_FORK = (
    "The rank is a fork of the notebook, which has used CUDA, or a backward of autograd, in a way that no fork "
    "survives: restart the kernel, and ranks can be forked again, or let them start from a clean process by --start "
    "zygote (in launch: start_method='zygote')."
)
_SILENT_DRIVER = (
    "The driver of the GPU does not let this process in: `nvidia-smi` in a terminal says why. After an update of the "
    "driver the machine has to be restarted; --cpu runs without a GPU meanwhile."
)

_WRAPPED_MODEL = (
    r"The model was prepared, so it is wrapped for training in several ranks; what your class adds to a model is under "
    r"the wrapper: accelerator.unwrap_model(model).\1"
)

_OTHER_CARD = (
    "Each rank computes on a GPU of its own, and a number such as 'cuda:0' names the same GPU in all ranks. "
    "In its place write device = 'cuda', or device = accelerator.device."
)
_NO_SUCH_CARD = (
    "There is no GPU of that number: a cell that names no rank, or that says 'cuda:0', has each rank see its own GPU "
    "alone, as cuda:0. Leave the number out: device = 'cuda'."
)

_TABLE = (
    (re.compile(r"(creating|attaching to) shared memory segment /dev/shm/nccl-|failed to extend /dev/shm/nccl-"),
     _FULL_FOR_NCCL),
    (re.compile(r"Duplicate GPU detected"), _ONE_GPU_FOR_TWO),
    (re.compile(r"no kernel image is available"), _NO_CODE),
    (re.compile(r"CUDA-capable device\(s\) is/are busy or unavailable"), _BUSY),
    (re.compile(r"in DataLoader worker process .*(Cannot re-initialize CUDA|CUDA error: initialization error)", re.S),
     _WORKER_ON_DEVICE),
    (re.compile(r"unable to (allocate|open|resize|mmap) .*shared memory|<(/torch_|filename).*No space left"),
     _LITTLE_SHARED_MEMORY),
    (re.compile(r"DataLoader worker .* killed by signal: Bus error"), _LITTLE_SHARED_MEMORY),
    (re.compile(r"Too many open files|received \d+ items of ancdata"), _FEW_FILES),
    (re.compile(r"^AttributeError: '(?:Replica|DistributedDataParallel)' object has no attribute '(\w+)'", re.M),
     _WRAPPED_MODEL),
    (re.compile(r"same device.*\bcuda:(\d+)\b.*\bcuda:(?!\1\b)\d|"
                r"device_ids\[0\].* found one of them on device: cuda|got device_ids .*module parameters .*cuda", re.S),
     _OTHER_CARD),
    (re.compile(r"CUDA error: invalid device ordinal"), _NO_SUCH_CARD),
)  # fmt: skip
"""Patterns of error texts, each with its advice.

The texts are those of torch (StorageSharing.cpp, MapAllocator.cpp, dataloader.py), CUDA, NCCL and the system.
"""

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP, signal.SIGSYS}


def advice(links: Sequence[Link], host: HostMemory, *, is_fork: bool = True) -> str:
    """Return one line of advice on an error, the last of `links`; empty if the error's own text is enough.

    is_fork: the rank was a copy of the notebook's process.

    >>> host = HostMemory()
    >>> advice([Link("OSError", ["OSError: [Errno 24] Too many open files"], [])], host)[:37]
    'This process may open no more files, '
    >>> replica = Link("AttributeError", ["AttributeError: 'Replica' object has no attribute 'generate'"], [])
    >>> advice([replica], host)[-40:]
    'accelerator.unwrap_model(model).generate'
    >>> advice([Link("ValueError", ["ValueError: expected 10 classes, got 11"], [])], host)
    ''
    """
    if not links:
        return ""
    last = links[-1]
    text = "\n".join(last.headline)
    known = next((found.expand(line) for pattern, line in _TABLE if (found := pattern.search(text))), "")
    if not known and classify(last.type_name, text) is Failure.BROKEN_FORK:
        return _BROKEN_FORK if is_fork else _SILENT_DRIVER
    return known or ("" if last.worker is None else _dead_worker(last.worker, host))


def _dead_worker(end: WorkerEnd, host: HostMemory) -> str:
    """Say how a worker of a DataLoader ended, and what to do about it."""
    who = "A DataLoader worker of this rank" + (f" (process {end.pid})" if end.pid else "")
    if end.unknown_name and (end.exit_code is None or end.exit_code > 0):
        return (
            f"The workers of this DataLoader are started by {end.start_method}, so they cannot know "
            f"{end.unknown_name}, which is defined in the notebook. In ranks workers are forked, and know it, unless "
            "multiprocessing_context or set_start_method says otherwise: leave that out, or move "
            f"{end.unknown_name} into a module and import it."
        )
    if end.exit_code is None:
        return (
            f"{who} ended while it handed over a batch; how is not known. What it printed stands in the output. "
            "num_workers=0 reads the data in the rank itself."
        )
    if end.exit_code >= 0:
        return (
            f"{who} ended with exit code {end.exit_code}: by an error of its own, whose traceback it printed into the "
            "output, or by sys.exit or os._exit in code of the data set. num_workers=0 reads the data in the rank "
            "itself and shows where."
        )
    name = signal_name(-end.exit_code)
    if -end.exit_code == signal.SIGKILL:
        return (
            f"{who} was killed by {name}: {host.explain_kill()}. Each worker has a copy of what the data set holds: "
            "fewer of them (num_workers) need less memory."
        )
    if -end.exit_code == signal.SIGBUS:  # what a write to a full /dev/shm comes to in some versions of torch
        return f"{who} crashed with {name}. Most likely {_LITTLE_SHARED_MEMORY}"
    if -end.exit_code in _CRASHES:
        return (
            f"{who} crashed with {name}, in compiled code that reads the data. num_workers=0 shows whether it crashes "
            "in the rank itself too; a library that starts threads may not survive the fork of a worker."
        )
    return f"{who} was ended by {name}, which code of the data set or another process sent. Memory is not the cause."
