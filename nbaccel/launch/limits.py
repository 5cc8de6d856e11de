"""TimeLimits: the time at which a run is to end, from the launch's limit and its program's own limits.

Runs in the kernel.

At that time the run ends as after the user's interrupt: all ranks leave before the same step, and those that save
themselves do.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.launch.wire.control import ControlPage

__all__ = ["ProgramLimit", "TimeLimits"]


@dataclass(frozen=True, slots=True)
class ProgramLimit:
    """A limit that a program has set itself, as by ``Accelerator(time_limit="11h30m")``.

    at: its end, in `time.monotonic()`.  seconds: its duration.
    """

    at: float
    seconds: float


class TimeLimits:
    """The limits of one run, the earliest of which ends it.

    launch_s: that of the launch, counted from `began`.  program: a limit that an earlier attempt of the run had set.
    """

    def __init__(
        self, page: ControlPage, began: float, launch_s: float | None = None, program: ProgramLimit | None = None
    ) -> None:
        self._page = page
        self._launch_at = None if launch_s is None else began + launch_s
        self._earlier = program
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """Exclude the seconds that a debugger prompt was open."""
        self._excused_s += seconds

    @property
    def program(self) -> ProgramLimit | None:
        """Return the earliest limit that the program has set, if any."""
        told = [ProgramLimit(*limit) for limit in self._page.time_limits()]
        return min([*told, *([] if self._earlier is None else [self._earlier])], default=None, key=lambda each: each.at)

    @property
    def ends_at(self) -> float | None:
        """Return the time at which the run is to end, by the present limits; None without a limit."""
        program = self.program
        ends = [at for at in (self._launch_at, None if program is None else program.at) if at is not None]
        return min(ends) + self._excused_s if ends else None

    @property
    def is_programs(self) -> bool:
        """Return whether the program's limit is the earliest."""
        program = self.program
        return program is not None and (self._launch_at is None or program.at < self._launch_at)
