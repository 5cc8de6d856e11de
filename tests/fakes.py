"""Stand-ins for what this machine does not have, NVML and the file system of a container, and for a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.tasks.function_task import FunctionTask

Answer = TypeVar("Answer")
GB = 10**9


class NVMLError(Exception):
    """What `pynvml` raises, for a driver that is missing as for a question that a device does not answer."""


@dataclass
class FakeGpu:
    """One board as NVML describes it; `refuses` names questions that this one does not answer."""

    name: str = "Tesla T4"
    uuid: str = "GPU-00000000"
    bus_id: str = "00000000:00:04.0"
    total_bytes: int = 16 * GB
    used_bytes: int = 0
    compute_capability: tuple[int, int] = (7, 5)
    cores: int = 2560
    clock_mhz: int = 1590
    processes: Sequence[tuple[int, int | None]] = ()
    slices: Sequence[FakeGpu] = ()
    is_cut: bool = False
    compute_mode: int = 0
    refuses: Sequence[str] = ()


@dataclass
class FakeNvml:
    """The functions of `pynvml` that nbaccel uses, over made-up boards. It counts that every init is shut down."""

    boards: Sequence[FakeGpu] = ()
    has_driver: bool = True
    is_open: int = field(default=0, init=False)

    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")
        self.is_open += 1

    def nvmlShutdown(self) -> None:
        self.is_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.is_open
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> FakeGpu:
        return self._answer("HandleByIndex", self.boards[number], self.boards[number])

    def nvmlDeviceGetPciInfo(self, board: FakeGpu) -> SimpleNamespace:
        return self._answer("PciInfo", board, SimpleNamespace(busId=board.bus_id))

    def nvmlDeviceGetNumGpuCores(self, board: FakeGpu) -> int:
        return self._answer("NumGpuCores", board, board.cores)

    def nvmlDeviceGetMaxClockInfo(self, board: FakeGpu, clock: int) -> int:
        return self._answer("MaxClockInfo", board, board.clock_mhz)

    def nvmlDeviceGetMigMode(self, board: FakeGpu) -> tuple[int, int]:
        return self._answer("MigMode", board, (int(board.is_cut or bool(board.slices)),) * 2)

    def nvmlDeviceGetMaxMigDeviceCount(self, board: FakeGpu) -> int:
        return self._answer("MaxMigDeviceCount", board, 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: FakeGpu, number: int) -> FakeGpu:
        if number >= len(board.slices):
            raise NVMLError("Not Found")
        return board.slices[number]

    def nvmlDeviceGetMemoryInfo(self, board: FakeGpu) -> SimpleNamespace:
        return self._answer("MemoryInfo", board, SimpleNamespace(total=board.total_bytes, used=board.used_bytes))

    def nvmlDeviceGetComputeRunningProcesses(self, board: FakeGpu) -> list[SimpleNamespace]:
        holders = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in board.processes]
        return self._answer("ComputeRunningProcesses", board, holders)

    def nvmlDeviceGetComputeMode(self, board: FakeGpu) -> int:
        return self._answer("ComputeMode", board, board.compute_mode)

    def nvmlDeviceGetUUID(self, board: FakeGpu) -> str:
        return self._answer("UUID", board, board.uuid)

    def nvmlDeviceGetName(self, board: FakeGpu) -> bytes:
        return self._answer("Name", board, board.name.encode())  # old bindings answer in bytes

    def nvmlDeviceGetCudaComputeCapability(self, board: FakeGpu) -> tuple[int, int]:
        return self._answer("CudaComputeCapability", board, board.compute_capability)

    def _answer(self, question: str, board: FakeGpu, answer: Answer) -> Answer:
        assert self.is_open, f"{question} was asked of a closed NVML"
        if question in board.refuses:
            raise NVMLError("Not Supported")
        return answer


def two_t4s() -> FakeNvml:
    """Kaggle's "T4 x2"."""
    return FakeNvml(
        [
            FakeGpu(uuid="GPU-aaaa1111", bus_id="00000000:00:04.0", used_bytes=GB, processes=[(4321, GB)]),
            FakeGpu(uuid="GPU-aabb2222", bus_id="00000000:00:05.0"),
        ]
    )


def visible_gpus(nvml: FakeNvml, visible: str | None, order: str) -> tuple[Gpu, ...]:
    """Return the devices that a survey finds by `nvml`.

    visible: the value of CUDA_VISIBLE_DEVICES, None when unset.  order: that of CUDA_DEVICE_ORDER.
    """
    environ = {"CUDA_DEVICE_ORDER": order} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    return Survey.take(nvml, environ, Path("/nowhere")).gpus  # where no driver of this machine is found


def write_files(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files; returns its root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def first_task(home: SharedNamespace) -> FunctionTask:
    """A task of ranks that stay, which does nothing."""
    task = FunctionTask(str)
    task.home, task.namespace = home, home.namespace
    return task
