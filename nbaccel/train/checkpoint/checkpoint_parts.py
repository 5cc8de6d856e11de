"""Parts of checkpoints: the folders, the position and the objects that a save and a load need. Runs in ranks.

The Accelerator's `Checkpoints` are these parts; `saving` and `loading`, which a program loads when it first needs them,
work on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from nbaccel.errors import CannotSave
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.train.checkpoint.training_state import Epochs, Remembered, TrainingState
from nbaccel.train.checkpoint.writer import Writer
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.prepare.training_context import TrainingContext

if TYPE_CHECKING:
    from nbaccel.train.checkpoint.content import Staging

__all__ = [
    "ON_SAVE_ERROR",
    "CheckpointParts",
    "LoadHook",
    "Registered",
    "SaveHook",
]

ON_SAVE_ERROR = ("raise", "warn")

_T = TypeVar("_T")
_Hook = TypeVar("_Hook")

SaveHook = Callable[[list[Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[Module], str], None]


@dataclass(slots=True)
class Registered:
    """Additions of the program to its checkpoints: objects of its own, and hooks. `free_memory` does not clear them."""

    objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    def add(self, objects: Sequence[Any]) -> None:
        """Add `objects` in their order.

        Raises:
            ValueError: One of them has no state; none is added then.
        """
        unfit = [
            f"{type(thing).__name__} (argument {number})"
            for number, thing in enumerate(objects)
            if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)))
        ]
        if unfit:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict() and load_state_dict(); these lack one: "
                f"{', '.join(unfit)}"
            )
        self.objects += objects

    @staticmethod
    def add_hook(hooks: OrderedDict[int, _Hook], hook: _Hook) -> RemovableHandle:
        """Add `hook` to `hooks`; return the handle that removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


class CheckpointParts:
    """The parts of the checkpoints of one Accelerator.

    Args:
        directory: The folders of the project.
        unwrap: ``unwrap(model, keep_torch_compile)`` returns the program's own module in a prepared one.
        say: Prints on the main process of each node.

    Attributes:
        registered: What the program added.
        epochs, remembered: Its position and values.
        staging: Buffers of saves in the background; None before the first one.
    """

    def __init__(
        self,
        context: TrainingContext,
        directory: CheckpointDirectory,
        on_save_error: str,
        unwrap: Callable[[Module, bool], Module],
        say: Callable[[str], None],
    ) -> None:
        self.context = context
        self.directory = directory
        self.say = say
        self.registered = Registered()
        self.epochs = Epochs()
        self.remembered = Remembered()
        self.writer = Writer()
        self.staging: Staging | None = None
        self._on_save_error = on_save_error
        self._unwrap = unwrap

    def training(self) -> TrainingState:
        """Return what is saved and restored together, as it is in this process; the context must be complete."""
        context = self.context
        return TrainingState(
            context.prepared,
            context.accumulation,
            context.precision,
            context.strategy,
            context.world,
            context.device,
            self.epochs,
            self.remembered,
            self.directory.lineage,
        )

    @property
    def writes(self) -> bool:
        """True if this process writes files that are for all ranks."""
        state = self.context.state
        return state.is_main_process or (self.directory.project.save_on_each_node and state.is_local_main_process)

    def tell(self, directory: CheckpointDirectory, target: Path) -> None:
        """Print once what other runs have left where `target` is about to be made."""
        if self.context.state.is_main_process and (news := directory.news(target)):
            self.say(news)

    def handed_in(self, model: Module) -> Module:
        """Return the program's own module inside a prepared `model`: without DDP, and without our ``torch.compile``."""
        return self._unwrap(model, not self.context.compiling.is_on)

    def go_on_without(self, error: CannotSave) -> None:
        """Raise `error`, or with ``on_save_error="warn"`` warn instead."""
        if self._on_save_error == "raise":
            raise error
        warn_user(f"{error} The training goes on without this checkpoint.")

    def from_main(self, call: str, ask: Callable[[], _T]) -> _T:
        """Return the result of `ask` on rank 0, or raise its error; the same on every rank. Collective.

        Args:
            call: What it is for, in a message about ranks that wait here.
        """
        answer: _T | None = None
        error: Exception | None = None
        if self.context.state.is_main_process:
            try:
                answer = ask()
            except Exception as raised:
                error = raised
        if self.context.world.is_distributed:
            answer, error = self.context.collectives.gather_objects([(answer, error)], call)[0]
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # rank 0 has called it
