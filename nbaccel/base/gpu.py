"""Gpu: one device as CUDA will show it to a new process, and what the driver says besides. Values, in every process."""

from __future__ import annotations

from enum import StrEnum

from nbaccel.base.values import frozen

__all__ = ["NO_MORE", "ComputeMode", "Driver", "Gpu", "hides_all"]


class ComputeMode(StrEnum):
    """Processes that a GPU accepts; set by an administrator."""

    SHARED = "any number of processes"
    EXCLUSIVE = "one process at a time"
    PROHIBITED = "no process"


@frozen
class Gpu:
    """One device as CUDA will show it to a new process.

    Args:
        index: Its number there, `cuda:<index>`.
        uuid: Accepted by CUDA_VISIBLE_DEVICES at any place of the device.
        used_bytes: Taken by all processes together.
        compute_capability: (7, 5) is a T4.
        processes: Process id and bytes of each holder; bytes are None if the driver does not report them, and process
            ids are those of the host, so in a container they may name nothing.
        number: Its number in CUDA_VISIBLE_DEVICES, in an environment like this one; None if that is a guess.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    processes: tuple[tuple[int, int | None], ...] = ()
    is_mig: bool = False
    number: int | None = None
    compute_mode: ComputeMode = ComputeMode.SHARED

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


@frozen
class Driver:
    """Reports of NVIDIA's driver, besides the GPUs that CUDA shows.

    Args:
        silence: Why NVML gave no answer although there is a driver; empty if it did.
        refusal: Why CUDA, which was asked instead, gave none either.
        names: The names of all the GPUs of the driver.
        uncut: Names of those in MIG mode that have no instance, on which nothing can compute.
        misread: Where CUDA stops reading CUDA_VISIBLE_DEVICES, and why; empty if it reads all of it.
    """

    silence: str = ""
    refusal: str = ""
    names: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    misread: str = ""


NO_MORE = ("", "-1", "NoDevFiles")
"""Entries that are meant to hide the later ones; batch systems write the last one."""


def hides_all(visible: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows no device, and is meant to."""
    return visible is not None and visible.strip() in NO_MORE
