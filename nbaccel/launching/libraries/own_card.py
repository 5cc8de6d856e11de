"""Let the local rank be the only GPU that a rank sees, for libraries that count GPUs by it. Runs in ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from nbaccel.base.world import World
from nbaccel.launching.ipc.import_hooks import when_loaded

__all__ = ["let_the_local_rank_be_the_only_card"]


def let_the_local_rank_be_the_only_card(world: World) -> None:
    """Patch these functions, in a rank that sees one GPU of several. Called once per process.

    Accelerate passes the local rank as the device to `DistributedDataParallel` and `torch.distributed.barrier`, and
    others call `torch.cuda.set_device` with it. In a rank that sees only its own GPU, this number means that GPU. Not
    covered: the number in a `torch.device` or in `.to`, which torch reads in compiled code.
    """
    if world.local_rank == 0:
        return  # that is its number anyway
    own = partial(_own, world.local_rank)
    when_loaded(
        {
            "torch.cuda": partial(_set_device, own),
            "torch.distributed.distributed_c10d": partial(_barrier, own),
            "torch.nn.parallel.distributed": partial(_parallel, own),
        }
    )


def _own(local_rank: int, device: Any) -> Any:
    """Return `device`, with 0 in place of the local rank, as a number, a text or a `torch.device`.

    A program that has made more GPUs visible, by the variable and before CUDA began, means the number as it is.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.device_count() > 1:
        return device
    if type(device) is list:
        return [_own(local_rank, each) for each in device]
    named = torch.device(device) if type(device) is str and device.startswith("cuda") else device
    number = named.index if type(named) is torch.device and named.type == "cuda" else named
    return 0 if type(number) is int and number == local_rank else device


def _set_device(own: Callable[[Any], Any], module: Any) -> None:
    torchs = module.set_device

    @functools.wraps(torchs)
    def set_device(device: Any) -> None:
        torchs(own(device))

    module.set_device = set_device


def _barrier(own: Callable[[Any], Any], module: Any) -> None:
    torchs = module.barrier

    @functools.wraps(torchs)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        if "device_ids" in kwargs:
            kwargs["device_ids"] = own(kwargs["device_ids"])
        return torchs(*args, **kwargs)

    module.barrier = barrier
    package = sys.modules.get("torch.distributed")
    if getattr(package, "barrier", None) is torchs:
        vars(package)["barrier"] = barrier


def _parallel(own: Callable[[Any], Any], module: Any) -> None:
    kind = module.DistributedDataParallel
    torchs = kind.__init__

    @functools.wraps(torchs)
    def init(
        parallel: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        torchs(parallel, module, own(device_ids), own(output_device), *args, **kw)

    kind.__init__ = init
