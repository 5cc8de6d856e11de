"""Status: the answers of `%accelerate` and `%accelerate doctor`. Runs in the kernel; reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from nbaccel.errors import LaunchRefused
from nbaccel.hardware import Survey
from nbaccel.launch.doctor import Facts, report
from nbaccel.launch.preflight import choose_devices
from nbaccel.notebook.options import Options
from nbaccel.notebook.plan import choose_precision, refuse_a_crowd
from nbaccel.notebook.session import LastRun

__all__ = ["doctor_report", "next_cell", "status_line"]


def status_line(survey: Survey, config: Options, last_run: LastRun | None, stay: str = "") -> str:
    """Return the devices and settings of a cell without flags, and how the last run went.

    stay: the persistent ranks in words; empty without any.

    >>> status_line(Survey(), Options(mixed_precision="bf16", accumulate=4), None)
    'next cell: 1 rank on the CPU, default precision bf16, accumulate 4; no run yet'
    """
    return f"next cell: {stay or next_cell(survey, config)}; {f'last run: {last_run}' if last_run else 'no run yet'}"


def next_cell(survey: Survey, config: Options) -> str:
    """Return the devices and settings of a cell without flags, or why it would be refused."""
    try:
        devices = choose_devices(config.world_size, config.devices, bool(config.cpu), survey)
        refuse_a_crowd(devices.num_processes, survey)
        precision, reason = choose_precision(config, devices)
    except LaunchRefused as error:
        return f"refused as configured ({error})"
    why = f" ({reason})" if reason else ""
    return f"{devices}, default precision {precision}{why}, accumulate {config.accumulate or 1}"


def doctor_report(survey: Survey, config: Options, cell_of: Callable[[str | None], str | None]) -> str:
    return report(survey, Facts.of_this_process(survey, cell_of, config.checkpoint_dir))
