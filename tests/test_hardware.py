"""What a survey says about a machine: real for this one, faked for those with GPUs and containers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import GB, FakeGpu, FakeNvml, two_t4s, write_files
from nbaccel.hardware import Gpu, Memory, Platform, Survey, best_precision, usable_cores, usable_memory, visible_gpus

A100 = FakeGpu("NVIDIA A100-SXM4-40GB", "GPU-cccc0000", "00000000:3B:00.0", 40 * GB, 0, (8, 0), 6912, 1410)
P100 = FakeGpu("Tesla P100-PCIE-16GB", "GPU-dddd0000", "00000000:01:00.0", 16 * GB, 0, (6, 0), 3584, 1328)
T4 = FakeGpu("Tesla T4", "GPU-eeee0000", "00000000:02:00.0", 16 * GB)


def uuids(nvml: FakeNvml, visible: str | None = None, order: str = "FASTEST_FIRST") -> list[str]:
    return [gpu.uuid for gpu in visible_gpus(nvml, visible, order)]


# --- this machine, for real


def test_a_survey_touches_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from nbaccel.hardware import Survey; s = Survey.take();"
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
    assert first == Gpu(0, "GPU-aaaa1111", "Tesla T4", 16 * GB, GB, (7, 5), ((4321, GB),))
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


def test_questions_that_a_device_does_not_answer_leave_gaps_not_errors() -> None:
    refuses = ("MemoryInfo", "ComputeRunningProcesses", "NumGpuCores", "MigMode", "PciInfo", "CudaComputeCapability")
    assert visible_gpus(FakeNvml([FakeGpu("vGPU", "GPU-1", refuses=refuses)]), None, "FASTEST_FIRST") == (
        Gpu(0, "GPU-1", "vGPU", total_bytes=0),
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
    assert usable_memory(root) == Memory(total_bytes=1000000, available_bytes=400000)


def test_without_a_limit_the_host_memory_is_what_there_is(tmp_path: Path) -> None:
    import psutil

    root = container(tmp_path, **{"memory.max": "max", "memory.current": "700000"})
    assert usable_memory(root).total_bytes == psutil.virtual_memory().total
