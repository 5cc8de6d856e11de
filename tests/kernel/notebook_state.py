"""The state of a process that a run could leave traces in, as words that can be compared. Runs in kernels of tests."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import decimal
import faulthandler
import gc
import hashlib
import locale
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

State = dict[str, dict[str, str]]
"""What there is by part of the process and by name."""


def state() -> State:
    """The process as it is now. What a test reads first is what it imports: call it twice."""
    return {part.__name__.strip("_"): {str(name): str(value) for name, value in part().items()} for part in _PARTS}


def changes(before: State, after: State) -> list[str]:
    """One line for each difference."""
    return [
        f"{part}: {name}: {before[part].get(name, 'nothing')} -> {after[part].get(name, 'nothing')}"
        for part in before
        for name in sorted(before[part].keys() | after[part].keys())
        if before[part].get(name) != after[part].get(name)
    ]


def _digest(value: Any) -> str:
    return hashlib.sha1(pickle.dumps(value)).hexdigest()[:12]


def _counted(items: Iterable[str]) -> dict[str, int]:
    return dict(Counter(items))


def _who(*values: Any) -> list[str]:
    """Which objects these are; bound methods are made anew at each look."""
    return [f"{getattr(value, '__qualname__', type(value).__name__)} of {_home(value)}" for value in values]


def _home(value: Any) -> str:
    return hex(id(getattr(value, "__self__", value)))


# --- the parts ----------------------------------------------------------------------------------------------------


def _environment() -> dict[str, Any]:
    return dict(os.environ)


def _signals() -> dict[str, Any]:
    status = Path("/proc/thread-self/status").read_text()
    handlers = {signal.Signals(number).name: signal.getsignal(number) for number in set(signal.Signals)}
    return handlers | dict(re.findall(r"^(Sig\w+):\s*(\S+)$", re.sub(r"SigQ.*", "", status), re.MULTILINE))


def _threads() -> dict[str, Any]:
    """Look several times: IPython starts a thread in the first cell after a fork; without history it ends at once."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return _counted(thread.name for thread in threading.enumerate()) | {"all": min(counts)}


def _warnings() -> dict[str, Any]:
    return {"filters": warnings.filters, "showwarning": _who(warnings.showwarning)}


def _random_states() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "python": _digest(random.getstate()),
        "numpy": _digest(numpy.random.get_state()),
        "torch": _digest(torch.get_rng_state().tolist()),
        "torch's seed": torch.initial_seed(),
    }


def _loggers() -> dict[str, Any]:
    known = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        name: [logger.level, logger.handlers, logger.filters, logger.propagate, logger.disabled]
        for name, logger in known.items()
        if isinstance(logger, logging.Logger)
    } | {"disabled below": logging.root.manager.disable, "class": _who(logging.getLoggerClass())}


def _hooks() -> dict[str, Any]:
    names = ["excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdout", "stderr", "stdin"]
    return {
        **{f"sys.{name}": _who(getattr(sys, name)) for name in names},
        **{f"builtins.{name}": _who(value) for name, value in vars(builtins).items() if name != "_"},
        "threading.excepthook": _who(threading.excepthook),
        "trace": [sys.gettrace(), sys.getprofile()],
        "asynchronous generators": sys.get_asyncgen_hooks(),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "atexit": atexit._ncallbacks(),
        "faulthandler": faulthandler.is_enabled(),
        "tracemalloc": tracemalloc.is_tracing(),
        "socket timeout": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal": decimal.getcontext(),
        "patched": _who(subprocess.Popen, subprocess.Popen.__init__, threading.Thread.start, os.fork, os._exit),
    }


def _limits() -> dict[str, Any]:
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    return limits | {
        "umask": re.findall(r"^Umask:\s*(\S+)$", Path("/proc/self/status").read_text(), re.MULTILINE),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom score": Path("/proc/self/oom_score_adj").read_text().strip(),
        "cores": sorted(os.sched_getaffinity(0)),
        "group and session": [os.getpgid(0), os.getsid(0)],
    }


def _open_files() -> dict[str, Any]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # the folder's own
            continue
    return _counted(links)


def _folders() -> dict[str, Any]:
    """The test gives the kernel a folder of its own for temporary files."""
    shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    return {"temporary": sorted(os.listdir(tempfile.gettempdir())), "shared memory": shared, "cwd": os.getcwd()}


def _processes() -> dict[str, Any]:
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    tracker = multiprocessing.resource_tracker._resource_tracker
    return {
        "children": sorted(int(pid) for pid in " ".join(children).split()),
        "of multiprocessing": sorted(map(repr, multiprocessing.process._children)),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "finalizers": len(multiprocessing.util._finalizer_registry),
        "tracker": [getattr(tracker, "_pid", None), getattr(tracker, "_fd", None)],
        "current": multiprocessing.current_process(),
    }


def _matplotlib() -> dict[str, Any]:
    import matplotlib
    import matplotlib.pyplot

    matplotlib.get_backend()
    return {
        **matplotlib.rcParams,
        "figures": matplotlib.pyplot.get_fignums(),
        "interactive": matplotlib.is_interactive(),
    }


def _ipython() -> dict[str, Any]:
    from IPython import get_ipython

    shell = get_ipython()
    formatters = shell.display_formatter.formatters
    return {
        **{f"on {event}": _who(*callbacks) for event, callbacks in shell.events.callbacks.items()},
        **{
            f"shows {name}": [len(f.type_printers), len(f.deferred_printers), f.enabled]
            for name, f in formatters.items()
        },
        "transforms syntax": _who(*shell.ast_transformers),
        "transforms text": _who(*shell.input_transformers_cleanup, *shell.input_transformers_post),
        "magics": {kind: len(magics) for kind, magics in shell.magics_manager.magics.items()},
        "shows errors": _who(shell.showtraceback, shell.CustomTB, shell.showsyntaxerror),
        "custom errors": shell.custom_exceptions,
        "publishes": _who(shell.display_pub, shell.displayhook, shell.display_pub.publish),
        "names": sorted(name for name in shell.user_ns if not name.startswith("_")),
        "is asked": _who(shell.kernel.shell_handlers["execute_request"], shell.run_cell, shell.run_cell_async),
        "widgets": len(getattr(shell.kernel.comm_manager, "comms", {})) if hasattr(shell.kernel, "comm_manager") else 0,
    }


def _imports() -> dict[str, Any]:
    return dict.fromkeys(sys.modules, "imported") | {
        "path": sys.path,
        "finders": sys.meta_path,
        "hooks": sys.path_hooks,
    }


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.nn.modules.module as modules

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "default": [torch.get_default_dtype(), torch.get_default_device()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "precision": torch.get_float32_matmul_precision(),
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "process group": dist.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "hooks of all modules": [len(hooks) for hooks in vars(modules).values() if isinstance(hooks, OrderedDict)],
        "patched": _who(
            torch.nn.Module.__call__,
            torch.nn.Module._call_impl,
            torch.Tensor.backward,
            torch.autograd.backward,
            torch.optim.Optimizer.step,
            torch.optim.Optimizer.__init__,
            torch.optim.SGD.step,
            torch.utils.data.DataLoader.__iter__,
            torch.utils.data.DataLoader.__init__,
            torch.nn.parallel.DistributedDataParallel.__init__,
            torch.load,
            torch.save,
            dist.init_process_group,
            dist.all_reduce,
        ),
        "printed": torch._tensor_str.PRINT_OPTS,
    }


def _numpy() -> dict[str, Any]:
    import numpy

    return {"errors": numpy.geterr(), "printed": numpy.get_printoptions()}


def _asyncio() -> dict[str, Any]:
    loop = (
        asyncio.get_running_loop() if asyncio._get_running_loop() else asyncio.get_event_loop_policy().get_event_loop()
    )
    handlers = getattr(loop, "_signal_handlers", {})
    return {
        "policy": _who(asyncio.get_event_loop_policy()),
        "loop": [hex(id(loop)), loop.get_debug(), loop.get_exception_handler(), sorted(handlers)],
        "tasks": len(asyncio.all_tasks(loop)),
    }


def _collector() -> dict[str, Any]:
    return {
        "enabled": gc.isenabled(),
        "thresholds": gc.get_threshold(),
        "frozen": gc.get_freeze_count(),
        "callbacks": _who(*gc.callbacks),
        "debug": gc.get_debug(),
    }


_PARTS: list[Callable[[], dict[str, Any]]] = [
    _environment,
    _signals,
    _threads,
    _warnings,
    _random_states,
    _loggers,
    _hooks,
    _limits,
    _open_files,
    _folders,
    _processes,
    _matplotlib,
    _ipython,
    _imports,
    _torch,
    _numpy,
    _asyncio,
    _collector,
]
