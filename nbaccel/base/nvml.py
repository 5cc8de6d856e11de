"""NVML: the GPUs that a new CUDA process would see, asked without a CUDA context. In kernels and scripts.

A process that has asked can still be forked. If there is a driver that NVML cannot reach, CUDA is asked by
`asking_cuda`. It is loaded where there is a driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from nbaccel.base.asking_cuda import CudaAnswer, Device, ask_cuda
from nbaccel.base.gpu import NO_MORE, ComputeMode, Driver, Gpu, hides_all
from nbaccel.base.gpu_driver import has_nvidia_driver
from nbaccel.base.values import frozen

__all__ = ["look_for_gpus"]

_SILENT_AFTER_S = 20.0
"""Seconds to wait for NVML: it needs a second or so, even to wake the driver; a driver may hang for ever."""

_NVML_THREAD = "nbaccel-nvml"


def look_for_gpus(
    nvml: Any, env: Mapping[str, str], root: Path, ask: Callable[[], CudaAnswer] | None
) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the devices that a new CUDA process would see; CUDA is asked if a driver is there but NVML is silent."""
    visible, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if not has_nvidia_driver(root):
        gpus, driver = _ask_nvml(nvml, visible, order)
        return gpus, replace(driver, silence="")
    gpus, driver = _ask_nvml_within(_SILENT_AFTER_S, nvml, visible, order)
    if not driver.silence or hides_all(visible):
        return gpus, driver
    answer = (ask or ask_cuda)()
    if not answer.devices:
        return (), replace(driver, refusal=answer.error)
    numbers = _numbers(visible, len(answer.devices))
    return tuple(_as_cuda_has_it(index, device, numbers) for index, device in enumerate(answer.devices)), driver


def _as_cuda_has_it(index: int, device: Device, numbers: Sequence[int]) -> Gpu:
    name, uuid, total_bytes, capability = device
    is_mig = " MIG " in name
    is_known = bool(uuid) and not is_mig
    return Gpu(
        index,
        f"GPU-{uuid}" if is_known else "",
        name,
        total_bytes,
        compute_capability=capability,
        is_mig=is_mig,
        number=numbers[index] if numbers and not is_mig else None,
    )


def _ask_nvml_within(seconds: float, nvml: Any, visible: str | None, order: str) -> tuple[tuple[Gpu, ...], Driver]:
    """Do the same as `_ask_nvml`, but give up after `seconds`: a driver that hangs would block the notebook.

    If the thread of an earlier survey still waits, no other one is started.
    """
    silent = (), Driver(silence=f"no answer within {seconds:g} s")
    if any(thread.name == _NVML_THREAD for thread in threading.enumerate()):
        return silent
    answers: list[tuple[tuple[Gpu, ...], Driver]] = []
    failures: list[BaseException] = []

    def look() -> None:
        try:
            answers.append(_ask_nvml(nvml, visible, order))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look, name=_NVML_THREAD, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    return answers[0] if answers else silent


def _ask_nvml(nvml: Any, visible: str | None, order: str) -> tuple[tuple[Gpu, ...], Driver]:
    """Return the devices that a new CUDA process would see, in its order, and what else the driver says.

    CUDA shows a process either whole GPUs or a single MIG device, and this one if there is any ("CUDA Device
    Enumeration" in NVIDIA's guide to MIG); a list that starts with one has no second entry.

    Args:
        visible: The value of CUDA_VISIBLE_DEVICES, None when unset.
        order: That of CUDA_DEVICE_ORDER.
    """
    with _connected(nvml) as (connected, silence):
        boards, is_complete = ([], True) if connected is None else _boards(connected, order)
    uncut = tuple(board.gpu.name for board in boards if board.is_cut and not board.slices)
    misread = ""
    if visible is None:
        slices = [part for board in boards for part in board.slices]
        chosen = slices or [board.gpu for board in boards if not board.is_cut]
    else:
        chosen, misread = _select(visible, boards)
    chosen = [gpu for gpu in chosen if gpu.is_mig][:1] or chosen
    are_alike = len({board.gpu.name for board in boards}) == 1
    are_cut = any(board.is_cut for board in boards)
    is_certain = is_complete and not are_cut and (are_alike or order == "PCI_BUS_ID")
    numbers = _numbers(visible, len(chosen)) if is_certain else ()
    gpus = tuple(
        replace(gpu, index=index, number=numbers[index] if numbers else None) for index, gpu in enumerate(chosen)
    )
    names = tuple(board.gpu.name for board in boards)
    return gpus, Driver(silence=silence, names=names, uncut=uncut, misread=misread)


def _numbers(visible: str | None, count: int) -> Sequence[int]:
    """Return the numbers by which CUDA_VISIBLE_DEVICES means the first `count` devices; empty if it does not use them.

    Example:
        >>> _numbers(None, 2), _numbers("2, 3,-1", 2), _numbers("GPU-aaaa1111", 1)
        (range(0, 2), [2, 3], [])
    """
    if visible is None:
        return range(count)
    numbers = [int(entry) for entry in takewhile(str.isdecimal, map(str.strip, visible.split(",")))]
    return numbers if len(numbers) >= count else []


@frozen
class _Board:
    """A physical GPU.

    Args:
        is_cut: It is in MIG mode.
        slices: Its MIG devices, if there are some.
    """

    gpu: Gpu
    bus_id: str
    speed: float
    is_cut: bool = False
    slices: tuple[Gpu, ...] = ()

    @property
    def shown(self) -> Gpu | None:
        """Return the device that CUDA shows: the GPU, or its first MIG device; None in MIG mode without an instance."""
        return next(iter(self.slices), None) if self.is_cut else self.gpu


@contextmanager
def _connected(nvml: Any) -> Iterator[tuple[Any, str]]:
    """Yield NVML, open while the block runs; without a driver to talk to yield None, with the reason."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:  # no driver, or one that does not fit its kernel module
        yield None, str(error)
        return
    try:
        yield nvml, ""
    finally:
        nvml.nvmlShutdown()


def _boards(nvml: Any, order: str) -> tuple[list[_Board], bool]:
    """Return all GPUs in the order in which CUDA numbers them, and whether these are all that the driver counts.

    CUDA documents FASTEST_FIRST only as a heuristic. Cores times clock, then the bus, reproduces it for equal GPUs; for
    different ones only CUDA_DEVICE_ORDER=PCI_BUS_ID is certain, as the doctor reports.
    """
    count = _ask(nvml, 0, nvml.nvmlDeviceGetCount)
    boards = [
        _board(nvml, handle)
        for number in range(count)
        if (handle := _ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, number)) is not None  # fell off the bus
    ]
    boards.sort(key=lambda board: board.bus_id)
    if order != "PCI_BUS_ID":
        boards.sort(key=lambda board: -board.speed)
    return boards, len(boards) == count


def _board(nvml: Any, handle: Any) -> _Board:
    gpu = _gpu(nvml, handle)
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    cores = _ask(nvml, 0, nvml.nvmlDeviceGetNumGpuCores, handle)
    clock_mhz = _ask(nvml, 0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    is_cut, _pending = _ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
    return _Board(
        gpu=gpu,
        bus_id="" if pci is None else _text(pci.busId),
        speed=cores * clock_mhz,
        is_cut=bool(is_cut),
        slices=tuple(_mig_devices(nvml, handle, gpu)) if is_cut else (),
    )


def _mig_devices(nvml: Any, handle: Any, board: Gpu) -> Iterator[Gpu]:
    for number in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        part = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:  # numbers have gaps
            # A slice has the compute capability of its board; NVML reports it only for the board.
            yield replace(_gpu(nvml, part), is_mig=True, compute_capability=board.compute_capability)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    holders = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return Gpu(
        index=0,
        uuid=_text(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_ask(nvml, "unknown GPU", nvml.nvmlDeviceGetName, handle)),
        total_bytes=0 if memory is None else int(memory.total),
        used_bytes=0 if memory is None else int(memory.used),
        compute_capability=tuple(_ask(nvml, (0, 0), nvml.nvmlDeviceGetCudaComputeCapability, handle)),
        processes=tuple((holder.pid, holder.usedGpuMemory) for holder in holders),
        compute_mode=_MODES.get(_ask(nvml, 0, nvml.nvmlDeviceGetComputeMode, handle), ComputeMode.SHARED),
    )


_MODES = {1: ComputeMode.EXCLUSIVE, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE}
"""Compute modes of nvml.h: exclusive by thread, which is obsolete, prohibited, exclusive by process."""


def _ask(nvml: Any, default: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, or `default` if this driver or device has none (vGPUs and laptops often have none)."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    """Return text; older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _select(visible: str, boards: list[_Board]) -> tuple[list[Gpu], str]:
    """Return the devices of CUDA_VISIBLE_DEVICES as CUDA reads it: up to an invalid entry; none if one repeats.

    The second value says what ended the list, unless it is one of the words for "no more".
    """
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        gpu = _named(entry, boards)
        if gpu is None:
            return chosen, "" if entry in NO_MORE else f"{entry!r} names no GPU, and CUDA stops there"
        if gpu in chosen:
            return [], f"{entry!r} names one twice, and CUDA shows none then"
        chosen.append(gpu)
    return chosen, ""


def _named(entry: str, boards: list[_Board]) -> Gpu | None:
    """Return the device that an entry means: a number, `GPU-…` or `MIG-…`; an unambiguous prefix is enough."""
    if entry.isdecimal():
        return boards[int(entry)].shown if int(entry) < len(boards) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    everything = [(board.gpu.uuid, board.shown) for board in boards]
    everything += [(part.uuid, part) for board in boards for part in board.slices]
    fitting = [gpu for uuid, gpu in everything if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None
