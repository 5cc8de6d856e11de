"""Two ranks on one card, by NCCL. Runs in the programs of this folder; needs no card to be imported.

NCCL refuses two ranks on one device, which it recognises by the machine's hash and the device's bus. NCCL_HOSTID sets
that hash, so ranks with different ones count as two machines and talk through sockets of the loopback. NVIDIA supports
none of this: it is for tests, on a machine that has one card, and `driver.py` says whether it works there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nbaccel.launching.ipc.spec import Devices

__all__ = ["enter", "let_ranks_share", "who_chooses_devices"]

_NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Few channels: kernels of both ranks have to be on the card at once. A peer that aborts or dies closes its sockets, as
one on another machine would: torch's watchdog would end this process for that (see `ProcessGroup._form`)."""


def enter(device: str) -> None:
    """In each rank, before it touches a device: where there is a single one, be a machine of its own."""
    import torch

    if device == "cuda" and torch.cuda.device_count() < 2:
        os.environ |= _NCCL
        os.environ["NCCL_HOSTID"] = f"nbaccel-rank-{os.environ['RANK']}"


@dataclass(frozen=True)
class _Shared(Devices):
    """One card for all ranks."""

    def environ(self) -> dict[str, str]:
        return {}


def who_chooses_devices() -> list[ModuleType]:
    """The modules that know `choose_devices` by name."""
    from nbaccel.launching import plan, preflight  # noqa: F401  # loaded, to be found

    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "nbaccel"]
    return [module for module in ours if vars(module).get("choose_devices") is preflight.choose_devices]


def let_ranks_share(device: str) -> None:
    """In the process that launches, kernel or script: two ranks may have its one card. Forked ranks inherit it."""
    from nbaccel.base.hardware import Survey
    from nbaccel.train import setup

    gpus = Survey.take().gpus
    if device != "cuda" or len(gpus) != 1:
        return
    set_up = setup.setup_rank

    def choose(requested: int | None, *_: Any, **__: Any) -> Devices:
        wanted = requested or 1
        return _Shared(wanted, gpus * wanted)

    def entering(*arguments: Any, **options: Any) -> Any:
        enter(device)
        return set_up(*arguments, **options)

    for module in who_chooses_devices():
        vars(module)["choose_devices"] = choose
    vars(setup)["setup_rank"] = entering
