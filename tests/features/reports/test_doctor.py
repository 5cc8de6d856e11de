"""The doctor's report: what it says, that it touches nothing, and what it must never say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import GB, FakeGpu, FakeNvml, two_t4s, visible_gpus, write_files
from nbaccel.base.asking_cuda import CudaAnswer
from nbaccel.base.forkable import AUTOGRAD_HAS_THREADS, CUDA_IS_INITIALISED
from nbaccel.base.hardware import MemoryInfo, Platform, Survey
from nbaccel.base.storage import Storage
from nbaccel.features.reports.doctor import MachineFacts, report
from nbaccel.launching.gpu_trouble import TorchBuild

SURVEY = Survey(
    gpus=visible_gpus(two_t4s(), None, "FASTEST_FIRST"),
    cpu_count=4,
    ram=MemoryInfo(31 * GB, 28 * GB),
    shm_bytes=16 * GB,
    platform=Platform.KAGGLE,
    kernel_release="6.6.113+",
    cuda_environ=(("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),),
)
FACTS = MachineFacts(
    python="3.12.13 (/usr/bin/python3)",
    versions={"nbaccel": "0.1.0", "torch": "2.10.0+cu128", "IPython": "7.34.0", "ipywidgets": "8.1.5"},
    limits={"open files": "1048576", "locked memory": "64 kB"},
    holders={4321: "python3"},
    saves_to=Storage(Path("/kaggle/working/nbaccel_checkpoints"), "ext4"),
)

REPORT = """\
nbaccel   0.1.0
Python    3.12.13 (/usr/bin/python3)
torch     2.10.0+cu128, not imported yet
packages  IPython 7.34.0, ipywidgets 8.1.5
platform  Kaggle, interactive; Linux 6.6.113+
CUDA      not initialised in this process
          CUDA_DEVICE_ORDER='PCI_BUS_ID'
GPUs      2, in CUDA's order
  cuda:0  Tesla T4  GPU-aaaa1111
          1.0 GB of 16.0 GB used; precision fp16: Tesla T4 has no bf16 units
          1.0 GB held by process 4321 (python3)
  cuda:1  Tesla T4  GPU-aabb2222
          0.0 GB of 16.0 GB used; precision fp16: Tesla T4 has no bf16 units
CPU       4 usable cores
RAM       28.0 GB of 31.0 GB available
/dev/shm  16.0 GB
saves to  /kaggle/working/nbaccel_checkpoints, which outlives the session: Kaggle keeps /kaggle/working with \
"Save Version", as the output of that version
session   ends after about 12 h, or when nobody is there: --checkpoint-every 10min, and --resume in the next one
limits    open files 1048576, locked memory 64 kB"""


def warnings(survey: Survey = SURVEY, facts: MachineFacts = FACTS) -> list[str]:
    return [line for line in report(survey, facts).splitlines() if line.startswith("! ")]


def test_a_healthy_machine_reads_like_this() -> None:
    assert report(SURVEY, FACTS) == REPORT


def test_cuda_in_the_kernel_is_named_with_its_cell_and_what_follows() -> None:
    facts = replace(FACTS, torch_is_imported=True, why_forks_fail=CUDA_IS_INITIALISED, since="cell [7]")
    text = report(SURVEY, facts)
    assert "torch     2.10.0+cu128\n" in text
    assert "CUDA      initialised in this process since cell [7]\n" in text
    assert "! CUDA is initialised in the notebook, so ranks cannot be forked: they start from a clean process" in text
    assert "Restart the kernel to fork again." in text


def test_a_use_of_cuda_that_torch_does_not_know_is_named_too() -> None:
    facts = replace(FACTS, why_forks_fail=AUTOGRAD_HAS_THREADS, since="cell [3]")
    text = report(SURVEY, facts)
    row = "CUDA      not initialised by torch, but autograd has device threads in the notebook since cell [3]\n"
    assert row in text
    assert "! autograd has device threads in the notebook, so ranks cannot be forked" in text
    assert "! CUDA can be in use without a tensor on a GPU: for pinned memory, by cupy, numba or triton, and by" in text


@pytest.mark.parametrize(("release", "warned"), [("5.4.0-150", True), ("4.19", True), ("5.5.0", False), ("", False)])
def test_kernels_below_5_5_are_warned_of(release: str, warned: bool) -> None:
    lines = warnings(replace(SURVEY, kernel_release=release))
    assert lines == ([f"! Linux {release} is older than 5.5: training processes are known to hang on it."] * warned)


def test_other_systems_have_other_version_numbers() -> None:
    assert warnings(replace(SURVEY, system="Darwin", kernel_release="4.0")) == []


def test_little_shared_memory_is_warned_of() -> None:
    (line,) = warnings(replace(SURVEY, shm_bytes=64 * 10**6))
    assert "/dev/shm holds only 0.1 GB" in line
    assert "num_workers=0" in line


def test_with_several_gpus_nccl_needs_shared_memory_too() -> None:
    (line,) = warnings(replace(SURVEY, shm_bytes=64 * 10**6))
    assert line == (
        "! /dev/shm holds only 0.1 GB: DataLoader workers pass batches through it, and NCCL what GPUs exchange that "
        "have no direct way. Use num_workers=0, or start the container with --shm-size=1g. For NCCL alone "
        "NCCL_SHM_DISABLE=1 does, which is slower."
    )
    (line,) = warnings(replace(SURVEY, shm_bytes=64 * 10**6, gpus=SURVEY.gpus[:1]))
    assert "NCCL" not in line


def take(nvml: FakeNvml, root: Path, environ: dict[str, str] | None = None, *, has_driver: bool = False) -> Survey:
    """A healthy machine otherwise."""
    survey = Survey.take(
        nvml,
        environ or {},
        write_files(root, {"dev/nvidiactl": ""}) if has_driver else root,
        ask=lambda: CudaAnswer(error="unknown error"),
    )
    return replace(SURVEY, gpus=survey.gpus, driver=survey.driver, cuda_environ=survey.cuda_environ)


def test_a_driver_that_does_not_answer_is_said_in_the_row_and_with_what_to_do(tmp_path: Path) -> None:
    survey = take(FakeNvml(has_driver=False), tmp_path, has_driver=True)
    row = "GPUs      NOT used: the driver does not answer (NVML: Driver Not Loaded; CUDA: unknown error)\n"
    assert row in report(survey, FACTS)
    (line,) = warnings(survey)
    assert line == (
        "! the NVIDIA driver is here, and NVML gets no answer (Driver Not Loaded): runs take the CPU. `nvidia-smi` in "
        "a terminal says more; after an update of the driver the machine has to be restarted."
    )
    (line,) = warnings(replace(survey, gpus=SURVEY.gpus))
    assert "what CUDA says of the GPUs is used, without who holds their memory" in line


def test_gpus_that_a_list_hides_are_said(tmp_path: Path) -> None:
    survey = take(two_t4s(), tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})
    assert "GPUs      NOT used: CUDA_VISIBLE_DEVICES='-1' hides all 2 GPUs\n" in report(survey, FACTS)
    (line,) = warnings(take(two_t4s(), tmp_path, {"CUDA_VISIBLE_DEVICES": "0,7,1"}))
    assert line == ("! CUDA_VISIBLE_DEVICES='0,7,1': '7' names no GPU, and CUDA stops there. It shows 1 of 2 GPUs.")


def test_a_board_in_mig_mode_without_an_instance_is_said(tmp_path: Path) -> None:
    (line,) = warnings(take(FakeNvml([FakeGpu("NVIDIA A100", is_cut=True), FakeGpu()]), tmp_path))
    assert line.startswith("! NVIDIA A100 is in MIG mode and has no instance, so nothing can compute on it")


def test_what_keeps_a_gpu_from_computing_is_warned_of(tmp_path: Path) -> None:
    boards = [
        FakeGpu("Tesla P100", "GPU-1", compute_capability=(6, 0)),
        FakeGpu(uuid="GPU-2", compute_mode=3, used_bytes=GB, processes=[(4321, GB)]),
        FakeGpu(uuid="GPU-3", used_bytes=16 * GB, processes=[(4321, 15 * GB)]),
    ]
    survey = replace(take(FakeNvml(boards), tmp_path), cuda_environ=SURVEY.cuda_environ)
    facts = replace(FACTS, build=TorchBuild("2.10.0+cu128", ("sm_75", "sm_80")))
    text = report(survey, facts)
    assert "          compute mode exclusive: one process at a time\n" in text
    code, exclusive, full = warnings(survey, facts)
    assert "Tesla P100 has compute capability 6.0, and torch 2.10.0+cu128 has code for sm_75, sm_80 only" in code
    assert (
        "takes one process at a time (compute mode exclusive), and has one: 1.0 GB held by process 4321 (py"
        in exclusive
    )
    assert "Tesla T4 is full: 0.0 GB of 16.0 GB are free" in full
    assert "15.0 GB held by process 4321 (python3)" in full


def test_torch_is_asked_elsewhere_only_where_there_are_gpus_and_it_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(TorchBuild, "installed", classmethod(lambda cls: asked.append(None)))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    MachineFacts.of_this_process(Survey())
    assert asked == []
    MachineFacts.of_this_process(SURVEY)
    assert asked == [None]


def test_few_open_files_are_warned_of() -> None:
    (line,) = warnings(facts=replace(FACTS, open_files=256))
    assert "only 256 files may be open at once: raise it (ulimit -n 4096)" in line


def test_an_order_that_is_a_guess_is_called_one() -> None:
    unlike = FakeNvml([FakeGpu(), FakeGpu("NVIDIA A100", "GPU-1", "00000000:3B:00.0", compute_capability=(8, 0))])
    survey = replace(SURVEY, gpus=visible_gpus(unlike, None, "FASTEST_FIRST"), cuda_environ=())
    (line,) = warnings(survey)
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID to be certain" in line


def test_a_machine_without_gpus_gets_a_report_too() -> None:
    assert "GPUs      none (NVML sees no NVIDIA driver" in report(replace(SURVEY, gpus=()), FACTS)


def test_memory_held_by_a_process_of_the_host_is_not_given_a_name() -> None:
    nvml = FakeNvml([FakeGpu(processes=[(99, None)])])
    survey = replace(SURVEY, gpus=visible_gpus(nvml, None, "FASTEST_FIRST"))
    assert "an unknown amount held by process 99 (not visible from here)" in report(survey, FACTS)


def test_holders_are_named_by_program_if_the_number_is_theirs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeGpu(processes=[(os.getpid(), GB), (os.getppid(), GB), (2**22 + 1, GB)])])
    survey = Survey(gpus=visible_gpus(nvml, None, "FASTEST_FIRST"))
    monkeypatch.setattr("nbaccel.launching.gpu_trouble.is_holder", lambda pid: True)
    named = {os.getpid(): "this one", os.getppid(): psutil.Process(os.getppid()).name()}
    assert MachineFacts.of_this_process(survey).holders == named
    monkeypatch.setattr("nbaccel.launching.gpu_trouble.is_holder", lambda pid: False)
    assert MachineFacts.of_this_process(survey).holders == {}


def test_where_checkpoints_would_go_and_what_becomes_of_them_is_said() -> None:
    facts = MachineFacts.of_this_process(SURVEY, checkpoint_dir="/dev/shm/runs")
    assert "saves to  /dev/shm/runs, which does NOT outlive the session: it is in memory (tmpfs)" in report(
        SURVEY, facts
    )
    by_default = MachineFacts.of_this_process(SURVEY).saves_to.folder
    assert by_default == Path.cwd() / "nbaccel_checkpoints"
    assert not by_default.exists(), "asking makes nothing"


def test_asking_is_quick_imports_no_torch_and_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    code = (
        "import sys; from nbaccel.cli import main; main(['doctor', *sys.argv[2:]]); assert 'torch' not in sys.modules"
    )
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code, "argument-secret"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert time.perf_counter() - start < 8
    assert "torch     " in result.stdout
    assert "secret" not in result.stdout


@pytest.mark.slow
def test_a_process_that_imported_torch_without_using_cuda_has_not_initialised_it() -> None:
    code = (
        "import torch; from nbaccel.base.hardware import Survey;"
        "from nbaccel.features.reports.doctor import MachineFacts;"
        "facts = MachineFacts.of_this_process(Survey()); print(facts.torch_is_imported, facts.why_forks_fail)"
    )
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert result.stdout.split() == ["True", "None"]


def test_a_batch_run_is_told_the_time_limit_that_saves_it() -> None:
    batch = report(replace(SURVEY, platform=Platform.KAGGLE_BATCH), FACTS)
    assert (
        "session   ends after about 12 h: --checkpoint-every 10min --time-limit 11h30m ends a run well before" in batch
    )
    assert "session " not in report(replace(SURVEY, platform=Platform.JUPYTER), FACTS)


def test_the_doctor_reports(planned: Any) -> None:
    report = planned.run("%accelerate doctor").stdout
    assert "CUDA      not initialised in this process" in report
    assert "CPU       4 usable cores" in report


@pytest.mark.parametrize(
    ("device", "variable", "known_by"), [("accel0", "", "/dev/accel0"), ("", "TPU_NAME", "TPU_NAME")]
)
def test_a_tpu_is_named_with_what_drives_it(device: str, variable: str, known_by: str, tmp_path: Path) -> None:
    if device:
        write_files(tmp_path, {f"dev/{device}": ""})
    survey = Survey.take(FakeNvml([]), {variable: "v3-8"} if variable else {}, tmp_path)
    assert survey.tpu == known_by
    assert f"\nTPU       {known_by}: NOT used, nbaccel drives none; Accelerate does" in report(survey, MachineFacts())
    assert "TPU" not in report(replace(survey, tpu=""), MachineFacts())


def test_apples_gpu_is_named_with_how_many_processes_train_on_it() -> None:
    assert "GPUs      Apple's (MPS): one process trains on it, -n 1" in report(Survey(apple_gpu=True), MachineFacts())
