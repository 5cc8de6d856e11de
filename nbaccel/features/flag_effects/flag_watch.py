"""FlagWatch: says which flags have no effect above the loop that trains, before its first step. Runs in ranks.

Which flags have one is decided by `effect_table`, by the kind of loop. What trains by nbaccel, and
trainers that report, say their kind by an event, see `TrainingMode`. For all others the first step of an optimizer
shows it: by the frames of that call, and by models that are wrapped for several ranks. A task without such flags is not
watched.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nbaccel.base.events import LoopKind, TrainingMode
from nbaccel.base.settings import FSDP
from nbaccel.errors import FlagWithoutEffect
from nbaccel.features.flag_effects.effect_table import ProgramKind, flags_found
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.spec import Results, Task
from nbaccel.options.given_flags import GivenFlag

__all__ = ["FlagWatch", "kind_of_call"]

_KINDS = (
    ("transformers.trainer", LoopKind.TRAINER),
    ("lightning.pytorch", LoopKind.LIGHTNING),
    ("pytorch_lightning", LoopKind.LIGHTNING),
    ("lightning.fabric", LoopKind.FABRIC),
    ("lightning_fabric", LoopKind.FABRIC),
    ("accelerate", LoopKind.ACCELERATE),
)
"""Beginnings of a module's name, and what it means that its functions are being called. The first one counts, since
others are below it."""

_AROUND_STEPS = ("torch.", "nbaccel.train.raw_loop.", "nbaccel.features.")
"""Modules whose functions stand around a step that the program itself takes; features prepare nothing."""

_LAUNCH = "nbaccel.launching."
_RUN_IT = tuple(_LAUNCH + module for module in ("tasks.", "ipc.", "rank.main", "inline"))
"""Modules that run the program; others of the package watch calls in the midst of it."""

_SHARD = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine"})
"""Classes of wrappers that shard, and step what looks like plain parameters."""


class FlagWatch(RankPart):
    """Watches the tasks of one rank that have such flags, one after the other.

    Args:
        rank: This rank.
        wrappers: Models that the program has wrapped for several ranks, as `note_wrappers` finds them.
        is_dry: Say and refuse nothing; the kind of loop is for the report of a check.

    Attributes:
        kind: That of the present task's loop; None before it is known.
        in_force: What a library has made of settings, see `TrainingMode`.
    """

    def __init__(self, rank: int = 0, wrappers: Collection[Any] = (), is_dry: bool = False) -> None:
        self._rank = rank
        self._wrappers = wrappers
        self._is_dry = is_dry
        self._flags: Sequence[GivenFlag] = ()
        self._speaks = False
        self._program = ProgramKind.CELL
        self._said: list[str] = []
        self._refused: FlagWithoutEffect | None = None
        self._handle: Any = None
        self.kind: LoopKind | None = None
        self.in_force: Mapping[str, str] = {}

    def begin(self, running: RankTask) -> None:
        task = running.task
        self.watch(task.flags, self._rank == task.result_rank, _program_of(task))

    def watch(self, flags: Sequence[GivenFlag], speaks: bool, program: ProgramKind) -> None:
        """Begin to watch.

        Args:
            flags: The task's; without any nothing is watched.
            speaks: This rank speaks for all.
            program: Where the loop is written.
        """
        self.leave()
        self._flags, self._speaks, self._program = flags, speaks, program
        self._refused = self.kind = None
        self._said = []
        self.in_force = {}
        if flags:
            when_loaded({"torch.optim.optimizer": self._hook})

    def end(self) -> None:
        """End a task that finished.

        Raises:
            FlagWithoutEffect: It was refused, and the program went on: ``except Exception`` around a batch does that.
        """
        flags, refused = self._flags, self._refused
        self.leave()
        if refused is not None:
            raise refused
        if flags and self.kind is None:
            self.kind = LoopKind.NOTHING
            if self._speaks and not self._is_dry:
                self._say(flags_found(flags, self.kind).lines)

    def leave(self) -> None:
        """Stop watching, if something is watched."""
        self._flags = ()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @contextmanager
    def watching(self, task: Task) -> Iterator[None]:
        """Watch the block as `task` in a single rank."""
        self.watch(task.flags, speaks=True, program=_program_of(task))
        try:
            yield
            self.end()
        finally:
            self.leave()

    def stop(self, error: BaseException) -> None:
        self.leave()

    def facts(self, status: str, results: Results) -> dict[str, Any]:
        """Return how the program trains, for the report of a check."""
        return {"loop_kind": self.kind, "in_force": dict(self.in_force)} if self._is_dry else {}

    def take(self, event: Any) -> None:
        """Take a `TrainingMode`.

        Raises:
            FlagWithoutEffect: Nothing has been trained yet, and must not be.
        """
        assert isinstance(event, TrainingMode)
        kind = LoopKind(event.kind)
        if self._flags and self.kind is kind:  # more is known of it
            self._know(kind, {**self.in_force, **event.in_force})
        if not self._flags or self.kind is not None:
            return
        if kind is LoopKind.UNMODIFIED:  # a library's loop looks like one to torch
            kind = _kind_of(_modules(sys._getframe(1), leaves_out=(_LAUNCH, "nbaccel.train.")), ()) or kind
        self._know(kind, event.in_force)

    def _hook(self, module: Any) -> None:
        if self._flags and self._handle is None:
            self._handle = module.register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._refused is not None:
            raise self._refused
        if self.kind is None:
            kinds = {kind.__name__ for wrapper in self._wrappers for kind in type(wrapper).__mro__}
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            is_sharded = bool(kinds & _SHARD) or any(hasattr(parameter, "full_tensor") for parameter in parameters)
            kind = _kind_of(_modules(sys._getframe(1)), kinds)
            self._know(kind or LoopKind.UNMODIFIED, {"strategy": FSDP} if is_sharded else {})

    def _know(self, kind: LoopKind, in_force: Mapping[str, str]) -> None:
        self.kind, self.in_force = kind, in_force
        if self._is_dry:
            return
        found = flags_found(self._flags, kind, in_force, self._program)
        if found.refusal:
            self._refused = FlagWithoutEffect(f"{found.refusal} Nothing was trained yet.")
            raise self._refused
        self._say(found.lines)

    def _say(self, lines: Sequence[str]) -> None:
        """Print lines; no warnings, which a program may filter, or turn into errors of this rank alone."""
        for line in [each for each in lines if each not in self._said] if self._speaks else ():
            self._said.append(line)
            sys.stderr.write(f"nbaccel: {line}\n")
            sys.stderr.flush()


def _program_of(task: Task) -> ProgramKind:
    return ProgramKind.CELL if task.saves_itself else ProgramKind.FUNCTION


def kind_of_call(frame: FrameType | None) -> LoopKind | None:
    """Return the kind of loop whose library, or whose prepared optimizer, has led to a call; None for any other."""
    return _kind_of(_modules(frame), ())


def _kind_of(modules: Iterator[str], wrappers: Collection[str]) -> LoopKind | None:
    """Return the kind of loop that a call shows.

    Args:
        modules: Those whose functions are being called.
        wrappers: Classes of models wrapped for several ranks.
    """
    called = list(modules)
    for beginning, kind in _KINDS:
        if any(module == beginning or module.startswith(f"{beginning}.") for module in called):
            return kind
    caller = next((module for module in called if not module.startswith(_AROUND_STEPS)), "")
    if caller.startswith("nbaccel."):  # a prepared optimizer steps the program's
        return LoopKind.PREPARED
    return LoopKind.DDP if wrappers else None


def _modules(frame: FrameType | None, leaves_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the modules whose functions are being called, innermost first, up to those that launch.

    Args:
        leaves_out: Beginnings of names that report the call.
    """
    has_begun = not leaves_out
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_RUN_IT) and has_begun:
            return
        if not name.startswith(_LAUNCH) and not (leaves_out and name.startswith((*leaves_out, "nbaccel.base."))):
            has_begun = True
            yield name
        frame = frame.f_back
