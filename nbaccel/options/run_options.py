"""RunOptions: the choices of one cell, or of a notebook, and their precedence. Values of the kernel; they read no text.

A value is checked where it is read, in `values`; its meaning on this machine is decided later, in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from nbaccel.errors import LaunchRefused

__all__ = [
    "AUTO",
    "CELL",
    "FULL",
    "NAMED",
    "QUICK",
    "Limit",
    "RunOptions",
    "expanded",
]

AUTO = "auto"
CELL, NAMED = "cell", "named"
"""Names that a cell leaves in the notebook: all that it would leave without ranks, or those in `--out`."""

QUICK, FULL = "quick", "full"
"""Ways to check a cell: one dry run, or several that are compared."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limit of a run.

    Args:
        flag: The flag that set it.
        ends_well: The run was planned to end here, so the cell does not fail.
    """

    seconds: float
    flag: str
    ends_well: bool


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The choices of one cell, or of `%accelerate config`. None: not chosen.

    Args:
        num_processes: A number or "auto".
        mixed_precision, strategy: As in the flag, also "auto".
        out: Names of `--out`; `CELL`, which None means too; or `NAMED` for no names.
        inputs: Names of `--in`.
        ranks: Ranks whose output is shown, "all" or "0,2-3".
        free_kernel: The notebook's models leave the GPUs for the run.
        timeout, hang_timeout, time_limit: Seconds.
        keep_runs: The file that keeps the runs of the notebook.
        resume: "" for the newest checkpoint in `checkpoint_dir`, else a path.
        pdb: The rank to debug.
        keep, only: For one cell alone. Ranks stay after it; it runs on some of the persistent ranks, "0,2-3".
        bg: Return at once, the run goes on.
        sweep: Names with their values; one run for each combination.
        slots: How many of these go side by side.
        gpus_per_run: GPUs, and ranks, of each of them.
        check: `QUICK` or `FULL`: the cell is tried in a dry run, and nothing is changed.
        nodes: Where ranks on other machines go, see `--nodes`.
        node_timeout: Seconds after which a node that does not answer is given up.
        speed: Seconds in which changes that may make the cell faster are tried, and nothing is changed.
    """

    num_processes: int | str | None = None
    mixed_precision: str | None = None
    accumulate: int | None = None
    out: tuple[str, ...] | str | None = None
    inputs: tuple[str, ...] | None = None
    ranks: str | None = None
    devices: str | None = None
    cpu: bool | None = None
    free_kernel: bool | None = None
    timeout: float | None = None
    hang_timeout: float | None = None
    start: str | None = None
    plot: tuple[str, ...] | None = None
    plain: bool | None = None
    keep_runs: str | None = None
    seed: int | None = None
    debug: bool | None = None
    independent: bool | None = None
    strict: bool | None = None
    batches: str | None = None
    strategy: str | None = None
    oom: str | None = None
    checkpoint_every: str | None = None
    checkpoint_dir: str | None = None
    keep_checkpoints: int | None = None
    resume: str | None = None
    time_limit: float | None = None
    pdb: int | None = None
    keep: bool | None = None
    only: str | None = None
    bg: bool | None = None
    sweep: tuple[tuple[str, tuple[Any, ...]], ...] | None = None
    slots: int | None = None
    gpus_per_run: int | None = None
    check: str | None = None
    speed: float | None = None
    nodes: str | None = None
    node_timeout: float | None = None

    def over(self, weaker: RunOptions) -> RunOptions:
        """Return these choices, completed by those of `weaker`. "auto" is a choice."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(weaker, **{name: value for name, value in chosen.items() if value is not None})

    @property
    def names_back(self) -> tuple[str, ...] | None:
        """Return the names to bring back; None for everything that the cell leaves."""
        return self.out if isinstance(self.out, tuple) else () if self.out == NAMED else None

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks that was asked for; None for as many as there are devices."""
        return self.num_processes if isinstance(self.num_processes, int) else None

    @property
    def limit(self) -> Limit | None:
        """Return the earlier of the two limits, if there is one."""
        limits = [
            Limit(seconds, flag, ends_well)
            for seconds, flag, ends_well in (
                (self.timeout, "--timeout", False),
                (self.time_limit, "--time-limit", True),
            )
            if seconds is not None
        ]
        return min(limits, default=None, key=lambda limit: limit.seconds)

    def shown_ranks(self, world_size: int) -> frozenset[int] | None:
        """Return the ranks whose output is shown, the debugged one among them; None for all.

        Raises:
            LaunchRefused: A rank that the run does not have.
        """
        if self.pdb is not None and self.pdb >= world_size:
            raise LaunchRefused(f"--pdb {self.pdb}: {_number_of_ranks(world_size)}; name one of these.")
        if self.ranks in (None, "all"):
            return None
        shown = frozenset(expanded(self.ranks or ""))
        if max(shown) >= world_size:
            meant = f" For {self.ranks} ranks write -n {self.ranks}." if (self.ranks or "").isdecimal() else ""
            raise LaunchRefused(
                f"--ranks {self.ranks} chooses whose output is shown, and {_number_of_ranks(world_size)}: name some of "
                f"these, or all.{meant}"
            )
        return shown if self.pdb is None else shown | {self.pdb}


def _number_of_ranks(world_size: int) -> str:
    return f"this run has {'1 rank, 0 alone' if world_size == 1 else f'{world_size} ranks, 0-{world_size - 1}'}"


def expanded(ranks: str) -> Iterator[int]:
    """Yield each rank of a list in the form of `--ranks`.

    Example:
        >>> list(expanded("0,2-4"))
        [0, 2, 3, 4]
    """
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
