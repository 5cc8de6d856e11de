"""TimeLimits: when a run is to end, by its launch's limit and by those that its own program sets. Runs in the kernel.

They are met where the user's interrupt is: all ranks leave before the same step, and those that save themselves do.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.launch.wire.control import ControlPage

__all__ = ["ProgramLimit", "TimeLimits"]


@dataclass(frozen=True, slots=True)
class ProgramLimit:
    """What a program has set itself, as by ``Accelerator(time_limit="11h30m")``.

    at: when it is over, in `time.monotonic()`.  seconds: how long it was.
    """

    at: float
    seconds: float


class TimeLimits:
    """The limits of one run, the earliest of which ends it.

    launch_s: that of the launch, counted from `began`.  program: what an earlier attempt of the run had set.
    """

    def __init__(
        self, page: ControlPage, began: float, launch_s: float | None = None, program: ProgramLimit | None = None
    ) -> None:
        self._page = page
        self._launch_at = None if launch_s is None else began + launch_s
        self._earlier = program
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """Do not count these, in which somebody typed."""
        self._excused_s += seconds

    @property
    def program(self) -> ProgramLimit | None:
        """The earliest that the program has set, if it has."""
        told = [ProgramLimit(*limit) for limit in self._page.time_limits()]
        return min([*told, *([] if self._earlier is None else [self._earlier])], default=None, key=lambda each: each.at)

    @property
    def ends_at(self) -> float | None:
        """When the run is to end, as things stand."""
        program = self.program
        ends = [at for at in (self._launch_at, None if program is None else program.at) if at is not None]
        return min(ends) + self._excused_s if ends else None

    @property
    def is_programs(self) -> bool:
        """Whether the program's limit is the earliest."""
        program = self.program
        return program is not None and (self._launch_at is None or program.at < self._launch_at)
