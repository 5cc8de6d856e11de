"""Report in plain text what nbaccel finds on this machine and in this process. Runs in kernels and scripts.

It reads and changes nothing: it does not import torch, and it never touches CUDA. If there are GPUs and torch is not
loaded yet, one process is started to ask for which GPUs torch was built. The report holds no command lines and no
environment variables but CUDA's own, so it can be pasted anywhere.
"""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nbaccel.base.forkable import CUDA_IS_INITIALISED, why_forks_fail
from nbaccel.base.hardware import ComputeMode, Gpu, Platform, Survey, best_precision
from nbaccel.base.quantities import in_gb
from nbaccel.base.settings import CHECKPOINT_DIR
from nbaccel.base.storage import Storage
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature, named
from nbaccel.launching.gpu_trouble import TorchBuild, holder_name, troubles

__all__ = [
    "MachineFacts",
    "doctor_report",
    "report",
]

PACKAGES = ("IPython", "ipykernel", "ipywidgets", "jupyter_client", "matplotlib", "tqdm", "numpy", "accelerate")
"""Packages, besides torch, whose versions usually explain the behaviour of a notebook."""

_OF_DEVICES = ("deepspeed", "torch_xla", "torch_tpu")
"""Packages that few have, and that say what a machine is meant for."""

OLDEST_GOOD_KERNEL = (5, 5)
"""The oldest good version of Linux.

Training processes are known to hang on older ones (Accelerate warns as well); before 5.3 there is no pidfd.
"""

_FEATURE = "doctor: "
"""What names of rows begin with in the table of features."""

SMALL_SHM_BYTES = 10**9
FEW_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about this process, besides those about the machine.

    Args:
        versions: Those of the installed packages.
        torch_is_imported: Code in this process has imported torch.
        why_forks_fail: The reason why ranks forked from this process would fail; None if they would not.
        since: The origin of that reason, "cell [7]", if known.
        limits: Text of each limit by name.
        holders: Names of processes that hold GPU memory, by process id.
        saves_to: The place to which a training that saves itself would write its checkpoints.
        build: The GPUs for which torch was built; None if there are no GPUs, or if that is unknown.
        of_features: Rows that features add, text by name.
    """

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_is_imported: bool = False
    why_forks_fail: str | None = None
    since: str | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    open_files: int = sys.maxsize
    holders: Mapping[int, str] = field(default_factory=dict)
    saves_to: Storage = field(default_factory=lambda: Storage(Path(CHECKPOINT_DIR), ""))
    build: TorchBuild | None = None
    of_features: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_process(
        cls,
        survey: Survey,
        cell_of: Callable[[str | None], str | None] = lambda why: None,
        checkpoint_dir: str | None = None,
    ) -> MachineFacts:
        """Collect the facts of this process; it imports nothing that is not imported yet.

        Args:
            cell_of: Returns the cell that a reason why forks fail comes from.
            checkpoint_dir: The chosen folder; None for the default.
        """
        why = why_forks_fail()
        return cls(
            python=f"{platform.python_version()} ({sys.executable})",
            versions=_versions(("nbaccel", "torch", *PACKAGES, *_OF_DEVICES)),
            torch_is_imported="torch" in sys.modules,
            why_forks_fail=why,
            since=cell_of(why),
            limits={
                "open files": _limit(resource.RLIMIT_NOFILE),
                "locked memory": _limit(resource.RLIMIT_MEMLOCK, unit=1024, suffix=" kB"),
                "processes": _limit(resource.RLIMIT_NPROC),
            },
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            holders=_names({pid for gpu in survey.gpus for pid, _ in gpu.processes}),
            saves_to=Storage.of(Path(checkpoint_dir or CHECKPOINT_DIR)),
            build=_build() if survey.gpus else None,
            of_features=_rows_of_features(),
        )


_SESSIONS = {
    Platform.KAGGLE_BATCH: (
        "ends after about 12 h: --checkpoint-every 10min --time-limit 11h30m ends a run well before that, and --resume "
        "goes on in the next one"
    ),
    Platform.KAGGLE: (
        "ends after about 12 h, or when nobody is there: --checkpoint-every 10min, and --resume in the next one"
    ),
    Platform.COLAB: "may end at any time: --checkpoint-every 10min, and --resume in the next one",
}
"""The end of sessions on hosted platforms, as far as it is public, and the options that keep the work.

Kaggle: 12 hours, its policy of 2025.
"""


def doctor_report(
    survey: Survey,
    checkpoint_dir: str | None,
    cell_of: Callable[[str | None], str | None] = lambda why: None,
) -> str:
    """Collect the facts of this process, and return the report.

    Args:
        checkpoint_dir, cell_of: As for `MachineFacts.of_this_process`.
    """
    return report(survey, MachineFacts.of_this_process(survey, cell_of, checkpoint_dir))


def report(survey: Survey, facts: MachineFacts) -> str:
    """Return the whole report; lines that begin with "!" are those to read first."""
    lines = [*_software(survey, facts), *_devices(survey, facts), *_machine(survey, facts)]
    return "\n".join([*lines, *(f"! {warning}" for warning in _warnings(survey, facts))])


def _row(name: str, text: str) -> str:
    return f"{name:<10}{text}"


def _software(survey: Survey, facts: MachineFacts) -> Iterator[str]:
    versions = dict(facts.versions)
    yield _row("nbaccel", versions.pop("nbaccel", "not installed (imported from a folder)"))
    yield _row("Python", facts.python)
    torch = versions.pop("torch", "not installed")
    yield _row("torch", torch if facts.torch_is_imported else f"{torch}, not imported yet")
    yield _row("packages", ", ".join(f"{name} {number}" for name, number in versions.items()))
    yield _row("platform", f"{survey.platform}; {survey.system} {survey.kernel_release}")


def _devices(survey: Survey, facts: MachineFacts) -> Iterator[str]:
    since = f" since {facts.since}" if facts.since else ""
    match facts.why_forks_fail:
        case None:
            yield _row("CUDA", "not initialised in this process")
        case why if why == CUDA_IS_INITIALISED:
            yield _row("CUDA", f"initialised in this process{since}")
        case why:
            yield _row("CUDA", f"not initialised by torch, but {why}{since}")
    for name, value in survey.cuda_environ:
        yield _row("", f"{name}={value!r}")
    if survey.tpu:
        yield _row(
            "TPU", f"{survey.tpu}: NOT used, nbaccel drives none; Accelerate does, with the torch_xla of its torch"
        )
    if survey.apple_gpu:
        yield _row("GPUs", "Apple's (MPS): one process trains on it, -n 1")
        return
    if not survey.gpus:
        why = survey.why_no_gpu
        yield _row("GPUs", f"NOT used: {why}" if why else "none (NVML sees no NVIDIA driver, or there are none for it)")
        return
    yield _row("GPUs", f"{len(survey.gpus)}, in CUDA's order")
    for gpu in survey.gpus:
        yield from _gpu(gpu, facts.holders)


def _gpu(gpu: Gpu, holders: Mapping[int, str]) -> Iterator[str]:
    precision, reason = best_precision(gpu)
    yield f"  cuda:{gpu.index}  {gpu.name}  {gpu.uuid}{'  (MIG)' if gpu.is_mig else ''}"
    yield f"          {in_gb(gpu.used_bytes)} of {in_gb(gpu.total_bytes)} used; precision {precision}: {reason}"
    if gpu.compute_mode is not ComputeMode.SHARED:
        yield f"          compute mode {gpu.compute_mode.name.lower()}: {gpu.compute_mode}"
    for pid, used_bytes in gpu.processes:
        amount = "an unknown amount" if used_bytes is None else in_gb(used_bytes)
        yield f"          {amount} held by process {pid} ({holders.get(pid, 'not visible from here')})"


def _machine(survey: Survey, facts: MachineFacts) -> Iterator[str]:
    yield _row("CPU", f"{survey.cpu_count} usable {'core' if survey.cpu_count == 1 else 'cores'}")
    yield _row("RAM", f"{in_gb(survey.ram.available_bytes)} of {in_gb(survey.ram.total_bytes)} available")
    yield _row("/dev/shm", "none" if survey.shm_bytes is None else in_gb(survey.shm_bytes))
    yield _row("saves to", f"{facts.saves_to.folder}, which {facts.saves_to.fate(survey.platform)}")
    if survey.platform in _SESSIONS:
        yield _row("session", _SESSIONS[survey.platform])
    yield _row("limits", ", ".join(f"{name} {value}" for name, value in facts.limits.items()))
    for name, text in facts.of_features.items():
        yield _row(name, text)


def _warnings(survey: Survey, facts: MachineFacts) -> Iterator[str]:
    if facts.why_forks_fail is not None:
        yield (
            f"{facts.why_forks_fail}, so ranks cannot be forked: they start from a clean process and get copies "
            "of the names the cell reads. Restart the kernel to fork again."
        )
        if facts.why_forks_fail != CUDA_IS_INITIALISED:
            yield (
                "CUDA can be in use without a tensor on a GPU: for pinned memory, by cupy, numba or triton, and by "
                "any backward on a machine with a GPU, also on the CPU."
            )
    if survey.system == "Linux" and survey.kernel_version and survey.kernel_version < OLDEST_GOOD_KERNEL:
        yield f"Linux {survey.kernel_release} is older than 5.5: training processes are known to hang on it."
    if survey.shm_bytes is not None and survey.shm_bytes < SMALL_SHM_BYTES:
        has_several = len(survey.gpus) > 1
        exchanged = ", and NCCL what GPUs exchange that have no direct way" if has_several else ""
        cure = " For NCCL alone NCCL_SHM_DISABLE=1 does, which is slower." if has_several else ""
        yield (
            f"/dev/shm holds only {in_gb(survey.shm_bytes)}: DataLoader workers pass batches through it{exchanged}. "
            f"Use num_workers=0, or start the container with --shm-size=1g.{cure}"
        )
    if facts.open_files < FEW_OPEN_FILES:
        yield f"only {facts.open_files} files may be open at once: raise it (ulimit -n 4096) if workers fail to start."
    if _is_unlike(survey.gpus) and dict(survey.cuda_environ).get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield "the GPUs differ, and CUDA's order of them is a guess: set CUDA_DEVICE_ORDER=PCI_BUS_ID to be certain."
    yield from _about_the_driver(survey)
    yield from troubles(survey.gpus, lambda pid: facts.holders.get(pid, ""), facts.build)


def _about_the_driver(survey: Survey) -> Iterator[str]:
    driver = survey.driver
    if driver.silence:
        what = (
            "what CUDA says of the GPUs is used, without who holds their memory" if survey.gpus else "runs take the CPU"
        )
        yield (
            f"the NVIDIA driver is here, and NVML gets no answer ({driver.silence}): {what}. `nvidia-smi` in a "
            "terminal says more; after an update of the driver the machine has to be restarted."
        )
    for name in driver.uncut:
        yield (
            f"{name} is in MIG mode and has no instance, so nothing can compute on it: an administrator makes one by "
            "nvidia-smi mig -cgi PROFILE -C, or ends the mode by nvidia-smi -mig 0."
        )
    if driver.misread:
        visible = dict(survey.cuda_environ).get("CUDA_VISIBLE_DEVICES")
        shown = f"{len(survey.gpus)} of {len(driver.names)} GPUs"
        yield f"CUDA_VISIBLE_DEVICES={visible!r}: {driver.misread}. It shows {shown}."


def _build() -> TorchBuild | None:
    return TorchBuild.loaded() or TorchBuild.installed()


def _rows_of_features() -> dict[str, str]:
    rows = {}
    for name in named(_FEATURE):
        with suppress(FeatureMissing):
            rows[name] = feature(f"{_FEATURE}{name}")()
    return rows


def _is_unlike(gpus: tuple[Gpu, ...]) -> bool:
    return len({gpu.name for gpu in gpus}) > 1


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return installed versions, read from their metadata: nothing is imported."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _limit(which: int, unit: int = 1, suffix: str = "") -> str:
    soft, _hard = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit}{suffix}"


def _names(pids: set[int]) -> dict[int, str]:
    return {pid: name for pid in pids if (name := holder_name(pid))}
