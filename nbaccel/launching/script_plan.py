"""ScriptPlan: which ranks, on which devices, a script of `nbaccel launch` gets. Runs in the terminal and the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbaccel.base.hardware import Survey
from nbaccel.base.settings import RunSettings
from nbaccel.launching.ipc.spec import Devices
from nbaccel.launching.plan import choose_precision, devices_of, settings_of
from nbaccel.launching.preflight import threads_per_rank
from nbaccel.options.run_options import RunOptions

__all__ = ["ScriptPlan"]


@dataclass(frozen=True, slots=True)
class ScriptPlan:
    """The plan of a script on one machine. A choice that is left open stays open: then the script makes it."""

    devices: Devices
    settings: RunSettings
    threads: int

    @classmethod
    def of(cls, options: RunOptions, survey: Survey, threads: int | None = None) -> ScriptPlan:
        """Decide the run of `options` on this machine.

        Args:
            threads: CPU threads of each rank, if they were chosen.

        Raises:
            LaunchRefused: The machine cannot do what was asked; the message says what is possible.

        Example:
            >>> str(ScriptPlan.of(RunOptions(num_processes=2, cpu=True), Survey(cpu_count=4)).devices)
            '2 ranks on the CPU'
        """
        devices = devices_of(options, survey)
        devices = replace(devices, gpus=devices.gpus[: devices.num_processes])  # all ranks see the same ones there
        precision = None if options.mixed_precision is None else choose_precision(options.mixed_precision, devices)[0]
        threads = threads or threads_per_rank(survey.cpu_count, devices.num_processes)
        return cls(devices, settings_of(options, precision), threads)
