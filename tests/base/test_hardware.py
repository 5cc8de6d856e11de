"""What a survey says about a machine: real for this one, faked for those with GPUs and containers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import GB, FakeGpu, FakeNvml, two_t4s, visible_gpus, write_files
from nbaccel.base.asking_cuda import CudaAnswer, Device
from nbaccel.base.hardware import (
    ComputeMode,
    Gpu,
    MemoryInfo,
    Platform,
    Survey,
    best_precision,
    usable_cores,
    usable_memory,
)

A100 = FakeGpu("NVIDIA A100-SXM4-40GB", "GPU-cccc0000", "00000000:3B:00.0", 40 * GB, 0, (8, 0), 6912, 1410)
P100 = FakeGpu("Tesla P100-PCIE-16GB", "GPU-dddd0000", "00000000:01:00.0", 16 * GB, 0, (6, 0), 3584, 1328)
T4 = FakeGpu("Tesla T4", "GPU-eeee0000", "00000000:02:00.0", 16 * GB)


def uuids(nvml: FakeNvml, visible: str | None = None, order: str = "FASTEST_FIRST") -> list[str]:
    return [gpu.uuid for gpu in visible_gpus(nvml, visible, order)]


# --- this machine, for real


def test_a_survey_touches_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from nbaccel.base.hardware import Survey; s = Survey.take();"
        "print('torch' in sys.modules, s.cpu_count > 0, 0 < s.ram.available_bytes <= s.ram.total_bytes, s.platform)"
    )
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert result.stdout.split() == ["False", "True", "True", "script"]


def test_this_machine_has_the_cores_of_its_affinity_mask_at_most() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_shared_memory_is_measured() -> None:
    status = os.statvfs("/dev/shm")
    assert Survey.take(FakeNvml()).shm_bytes == status.f_blocks * status.f_frsize


# --- GPUs


def test_without_a_driver_there_are_no_gpus_and_no_error() -> None:
    assert visible_gpus(FakeNvml(has_driver=False), None, "FASTEST_FIRST") == ()


def test_two_t4s_are_described_in_full() -> None:
    nvml = two_t4s()
    first, second = visible_gpus(nvml, None, "FASTEST_FIRST")
    assert first == Gpu(0, "GPU-aaaa1111", "Tesla T4", 16 * GB, GB, (7, 5), ((4321, GB),), number=0)
    assert (second.index, second.uuid, second.used_bytes) == (1, "GPU-aabb2222", 0)
    assert nvml.is_open == 0  # NVML is closed again


def test_nvml_is_closed_also_after_an_error() -> None:
    nvml = FakeNvml([FakeGpu(name=None)])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        visible_gpus(nvml, None, "FASTEST_FIRST")
    assert nvml.is_open == 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(None, ["GPU-aaaa1111", "GPU-aabb2222"], id="unset"),
        pytest.param("", [], id="empty hides all"),
        pytest.param("1", ["GPU-aabb2222"], id="one"),
        pytest.param("1,0", ["GPU-aabb2222", "GPU-aaaa1111"], id="order is kept"),
        pytest.param(" 1 , 0 ", ["GPU-aabb2222", "GPU-aaaa1111"], id="spaces"),
        pytest.param("GPU-aabb2222,GPU-aaaa1111", ["GPU-aabb2222", "GPU-aaaa1111"], id="uuids"),
        pytest.param("GPU-aab", ["GPU-aabb2222"], id="beginning of a uuid"),
        pytest.param("GPU-aa", [], id="beginning that fits two"),
        pytest.param("0,7,1", ["GPU-aaaa1111"], id="no such number ends the list"),
        pytest.param("0,-1,1", ["GPU-aaaa1111"], id="-1 ends the list"),
        pytest.param("-1", [], id="-1 hides all"),
        pytest.param("0,GPU-ffff,1", ["GPU-aaaa1111"], id="no such uuid ends the list"),
        pytest.param("0,cuda:1", ["GPU-aaaa1111"], id="no number ends the list"),
        pytest.param("0,1,0", [], id="a repetition hides all"),
        pytest.param("NoDevFiles", [], id="what batch systems write for none"),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(visible: str | None, expected: list[str]) -> None:
    assert uuids(two_t4s(), visible) == expected


def test_visible_devices_are_numbered_anew() -> None:
    assert [gpu.index for gpu in visible_gpus(two_t4s(), "1,0", "PCI_BUS_ID")] == [0, 1]


def test_the_fastest_device_comes_first_unless_the_bus_decides() -> None:
    nvml = FakeNvml([P100, T4, A100])
    assert uuids(nvml) == [A100.uuid, P100.uuid, T4.uuid]
    assert uuids(nvml, order="PCI_BUS_ID") == [P100.uuid, T4.uuid, A100.uuid]
    assert uuids(nvml, "0", "PCI_BUS_ID") == [P100.uuid]
    assert uuids(nvml, "0") == [A100.uuid]


def test_alike_devices_are_ordered_by_bus_whatever_nvml_counts() -> None:
    assert uuids(FakeNvml(two_t4s().boards[::-1])) == ["GPU-aaaa1111", "GPU-aabb2222"]


def sliced_a100() -> FakeGpu:
    slices = [FakeGpu("A100 1g.5gb", f"MIG-{number}{number}", total_bytes=5 * GB) for number in (1, 2)]
    return FakeGpu("A100", "GPU-cccc0000", "00000000:3B:00.0", 40 * GB, 0, (8, 0), 6912, 1410, slices=slices)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["MIG-11"]), ("MIG-22", ["MIG-22"]), ("MIG-22,MIG-11", ["MIG-22"]), ("MIG-3", [])],
)
def test_a_process_sees_one_mig_device_at_most(visible: str | None, expected: list[str]) -> None:
    assert uuids(FakeNvml([sliced_a100()]), visible) == expected


def test_a_mig_device_computes_as_its_board_does() -> None:
    (gpu,) = visible_gpus(FakeNvml([sliced_a100()]), None, "FASTEST_FIRST")
    assert gpu.is_mig
    assert gpu.compute_capability == (8, 0)
    assert gpu.total_bytes == 5 * GB


def test_mig_devices_hide_whole_gpus_as_they_do_from_cuda() -> None:
    assert uuids(FakeNvml([T4, sliced_a100()]), None, "PCI_BUS_ID") == ["MIG-11"]
    assert uuids(FakeNvml([T4, sliced_a100()]), "0,1", "PCI_BUS_ID") == ["MIG-11"]
    assert uuids(FakeNvml([T4, sliced_a100()]), "0", "PCI_BUS_ID") == [T4.uuid]
    assert uuids(FakeNvml([T4, sliced_a100()]), "GPU-cccc", "PCI_BUS_ID") == ["MIG-11"]


def test_a_board_in_mig_mode_without_an_instance_is_no_gpu() -> None:
    uncut = replace(sliced_a100(), slices=(), is_cut=True)
    assert uuids(FakeNvml([uncut])) == uuids(FakeNvml([uncut]), "0") == []
    survey = Survey.take(FakeNvml([T4, uncut]), {}, Path("/nowhere"))
    assert [gpu.uuid for gpu in survey.gpus] == [T4.uuid]
    assert survey.driver.uncut == ("A100",)
    assert survey.why_no_gpu == ""
    alone = Survey.take(FakeNvml([uncut]), {}, Path("/nowhere"))
    assert alone.why_no_gpu == "A100 is in MIG mode and has no instance to compute on (nvidia-smi mig -cgi … -C)"


@pytest.mark.parametrize(
    ("boards", "visible", "order", "numbers"),
    [
        pytest.param(two_t4s().boards, None, "FASTEST_FIRST", [0, 1], id="alike"),
        pytest.param(two_t4s().boards, "1,0", "FASTEST_FIRST", [1, 0], id="a list of numbers"),
        pytest.param(two_t4s().boards, "1,0,-1", "FASTEST_FIRST", [1, 0], id="a list that ends"),
        pytest.param(two_t4s().boards, "GPU-aab", "FASTEST_FIRST", [None], id="a list of uuids"),
        pytest.param(two_t4s().boards, "1,GPU-aaa", "FASTEST_FIRST", [None, None], id="a mixed list"),
        pytest.param([T4, A100], None, "FASTEST_FIRST", [None, None], id="unlike, by speed"),
        pytest.param([T4, A100], None, "PCI_BUS_ID", [0, 1], id="unlike, by bus"),
        pytest.param([FakeGpu(refuses=["HandleByIndex"]), T4], None, "FASTEST_FIRST", [None], id="one is lost"),
        pytest.param([sliced_a100()], None, "PCI_BUS_ID", [None], id="mig"),
    ],
)
def test_a_number_is_known_where_cuda_is_certain_to_count_so(
    boards: list[FakeGpu], visible: str | None, order: str, numbers: list[int | None]
) -> None:
    assert [gpu.number for gpu in visible_gpus(FakeNvml(boards), visible, order)] == numbers


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(0, ComputeMode.SHARED), (2, ComputeMode.PROHIBITED), (3, ComputeMode.EXCLUSIVE), (9, ComputeMode.SHARED)],
)
def test_the_compute_mode_of_a_gpu_is_known(mode: int, expected: ComputeMode) -> None:
    (gpu,) = visible_gpus(FakeNvml([replace(T4, compute_mode=mode)]), None, "FASTEST_FIRST")
    assert gpu.compute_mode is expected


@pytest.mark.parametrize(
    ("visible", "why"),
    [
        (None, ""),
        ("0", ""),
        ("0,7,1", ""),
        ("", "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides all 2 GPUs"),
        ("7", "CUDA_VISIBLE_DEVICES='7' hides all 2 GPUs ('7' names no GPU, and CUDA stops there)"),
        ("0,0", "CUDA_VISIBLE_DEVICES='0,0' hides all 2 GPUs ('0' names one twice, and CUDA shows none then)"),
        (
            "GPU-ffff",
            "CUDA_VISIBLE_DEVICES='GPU-ffff' hides all 2 GPUs ('GPU-ffff' names no GPU, and CUDA stops there)",
        ),
    ],
)
def test_a_list_that_hides_every_gpu_is_the_reason_to_take_the_cpu(visible: str | None, why: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Survey.take(two_t4s(), environ, Path("/nowhere")).why_no_gpu == why


# --- a driver that does not answer


def with_a_driver(root: Path) -> Path:
    return write_files(root, {"dev/nvidiactl": ""})


def cuda_has(*devices: Device, error: str = "") -> Callable[[], CudaAnswer]:
    return lambda: CudaAnswer(devices, error, "2.10.0+cu128", ("sm_75",))


SILENT = FakeNvml(has_driver=False)
ONE_T4 = ("Tesla T4", "aaaa1111-0000", 16 * GB, (7, 5))
OTHER_T4 = ("Tesla T4", "aabb2222-0000", 16 * GB, (7, 5))


def test_where_nvml_gets_no_answer_cuda_is_asked(tmp_path: Path) -> None:
    survey = Survey.take(SILENT, {}, with_a_driver(tmp_path), ask=cuda_has(ONE_T4, OTHER_T4))
    assert survey.gpus == (
        Gpu(0, "GPU-aaaa1111-0000", "Tesla T4", 16 * GB, compute_capability=(7, 5), number=0),
        Gpu(1, "GPU-aabb2222-0000", "Tesla T4", 16 * GB, compute_capability=(7, 5), number=1),
    )
    assert survey.driver.silence == "Driver Not Loaded"
    assert survey.why_no_gpu == ""
    environ = {"CUDA_VISIBLE_DEVICES": "3,2"}
    moved = Survey.take(SILENT, environ, with_a_driver(tmp_path), ask=cuda_has(ONE_T4, OTHER_T4))
    assert [gpu.number for gpu in moved.gpus] == [3, 2]


def test_a_mig_device_that_cuda_shows_is_left_to_cuda_to_name(tmp_path: Path) -> None:
    part = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cccc", 5 * GB, (8, 0))
    (gpu,) = Survey.take(SILENT, {}, with_a_driver(tmp_path), ask=cuda_has(part)).gpus
    assert (gpu.uuid, gpu.number, gpu.is_mig) == ("", None, True)


def test_where_nobody_answers_that_is_the_reason_to_take_the_cpu(tmp_path: Path) -> None:
    ask = cuda_has(error="Unexpected error from cudaGetDeviceCount()")
    survey = Survey.take(SILENT, {}, with_a_driver(tmp_path), ask=ask)
    assert survey.gpus == ()
    assert survey.why_no_gpu == (
        "the driver does not answer (NVML: Driver Not Loaded; CUDA: Unexpected error from cudaGetDeviceCount())"
    )


def never_asked() -> CudaAnswer:
    raise AssertionError("CUDA was asked")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_cuda_is_not_asked_for_devices_that_are_hidden(tmp_path: Path, visible: str) -> None:
    survey = Survey.take(SILENT, {"CUDA_VISIBLE_DEVICES": visible}, with_a_driver(tmp_path), ask=never_asked)
    assert (survey.gpus, survey.why_no_gpu) == ((), "")


def test_cuda_is_not_asked_where_nvml_answers_or_there_is_no_driver(tmp_path: Path) -> None:
    without = Survey.take(SILENT, {}, tmp_path, ask=never_asked)
    assert (without.gpus, without.why_no_gpu) == ((), "")
    assert len(Survey.take(two_t4s(), {}, with_a_driver(tmp_path), ask=never_asked).gpus) == 2


def test_a_driver_that_hangs_takes_neither_the_survey_nor_the_next_one_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangingNvml(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802  # as NVML has it
            entered.append(None)
            goes_on.wait(30)
            super().nvmlInit()

    entered: list[None] = []
    goes_on = threading.Event()
    monkeypatch.setattr("nbaccel.base.nvml._SILENT_AFTER_S", 0.05)
    nvml, root = HangingNvml(), with_a_driver(tmp_path)
    for _ in range(2):
        survey = Survey.take(nvml, {}, root, ask=cuda_has(error="no answer within 60 s"))
        assert "NVML: no answer within 0.05 s; CUDA: no answer within 60 s" in survey.why_no_gpu
    assert len(entered) == 1
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "nbaccel-nvml":
            thread.join(5)


def test_an_error_of_a_survey_is_raised_where_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        Survey.take(FakeNvml([FakeGpu(name=None)]), {}, with_a_driver(tmp_path))  # type: ignore[arg-type]


def test_questions_that_a_device_does_not_answer_leave_gaps_not_errors() -> None:
    refuses = ("MemoryInfo", "ComputeRunningProcesses", "NumGpuCores", "MigMode", "PciInfo", "CudaComputeCapability")
    assert visible_gpus(FakeNvml([FakeGpu("vGPU", "GPU-1", refuses=refuses)]), None, "FASTEST_FIRST") == (
        Gpu(0, "GPU-1", "vGPU", total_bytes=0, number=0),
    )


def test_a_device_that_fell_off_the_bus_is_left_out() -> None:
    lost = FakeGpu(uuid="GPU-lost", refuses=["HandleByIndex"])
    assert uuids(FakeNvml([lost, T4])) == [T4.uuid]


# --- precision


@pytest.mark.parametrize(
    ("board", "precision", "reason"),
    [
        (T4, "fp16", "T4 has no bf16 units"),
        (A100, "bf16", "A100-SXM4-40GB has bf16 units"),
        (P100, "no", "P100-PCIE-16GB has no tensor cores"),
        (FakeGpu("vGPU", refuses=["CudaComputeCapability"]), "no", "the driver does not tell what vGPU can do"),
    ],
    ids=lambda value: value.name if isinstance(value, FakeGpu) else None,
)
def test_the_hardware_decides_the_precision_and_says_why(board: FakeGpu, precision: str, reason: str) -> None:
    (gpu,) = visible_gpus(FakeNvml([board]), None, "FASTEST_FIRST")
    chosen, why = best_precision(gpu)
    assert chosen == precision
    assert reason in why


def test_a_cpu_stays_in_full_precision() -> None:
    assert best_precision(None) == ("no", "a CPU gains nothing from half precision")


# --- platform


@pytest.mark.parametrize(
    ("environ", "modules", "is_kernel", "expected"),
    [
        ({}, [], False, Platform.SCRIPT),
        ({}, [], True, Platform.JUPYTER),
        ({"COLAB_RELEASE_TAG": "release-colab_20260819"}, [], True, Platform.COLAB),
        ({"COLAB_GPU": ""}, [], True, Platform.COLAB),
        ({}, ["google.colab"], True, Platform.COLAB),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_GPU": ""}, [], True, Platform.KAGGLE),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, [], True, Platform.KAGGLE_BATCH),
        (
            {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_IS_COMPETITION_RERUN": "1"},
            [],
            True,
            Platform.KAGGLE_BATCH,
        ),
        ({"KAGGLE_USERNAME": "ada", "KAGGLE_KEY": "secret"}, [], True, Platform.JUPYTER),
    ],
)
def test_platforms_are_told_by_their_documented_variables(
    environ: dict[str, str], modules: list[str], is_kernel: bool, expected: Platform
) -> None:
    assert Platform.detect(environ, modules, is_kernel) is expected


def test_a_survey_keeps_the_cuda_variables_and_no_other() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "WANDB_API_KEY": "secret"}
    survey = Survey.take(two_t4s(), environ)
    assert [gpu.uuid for gpu in survey.gpus] == ["GPU-aabb2222"]
    assert survey.cuda_environ == (("CUDA_VISIBLE_DEVICES", "1"),)
    assert "secret" not in repr(survey)


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.1.85-generic", (6, 1)), ("5.4.0", (5, 4)), ("4.19", (4, 19)), ("", ())],
)
def test_kernel_releases_compare_as_versions(release: str, version: tuple[int, ...]) -> None:
    assert Survey(kernel_release=release).kernel_version == version


# --- containers


def container(root: Path, **files: str) -> Path:
    """A cgroup version 2 file system whose group is the container's own."""
    return write_files(root, {"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}})


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("6400000 100000", None)],
)
def test_a_container_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    root = container(tmp_path, **{"cpu.max": quota})
    assert usable_cores(root) == (cores or len(os.sched_getaffinity(0)))


def test_the_first_cgroup_version_counts_too(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "12:cpu,cpuacct:/docker/1\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
        },
    )
    assert usable_cores(root) == 1


def test_a_limit_of_an_outer_group_holds_inside(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/cpu.max": "max 100000",
            "sys/fs/cgroup/user/cpu.max": "100000 100000",
        },
    )
    assert usable_cores(root) == 1


def test_a_container_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    root = container(
        tmp_path,
        **{"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 1\ninactive_file 100000\n"},
    )
    assert usable_memory(root) == MemoryInfo(total_bytes=1000000, available_bytes=400000)


def test_without_a_limit_the_host_memory_is_what_there_is(tmp_path: Path) -> None:
    import psutil

    root = container(tmp_path, **{"memory.max": "max", "memory.current": "700000"})
    assert usable_memory(root).total_bytes == psutil.virtual_memory().total
