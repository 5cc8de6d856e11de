"""WholeModels: says that every rank trains a whole model where the run's strategy is "fsdp". Runs in ranks.

The strategy of a run is the default of nbaccel's Accelerator, which shards what it prepares. Other libraries do not
read it: their model is whole in every rank, and the line of the run says "fsdp". The first step of an optimizer shows
which parameters it has; the frames of that call show who steps. Nothing is changed, and the program goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.rank.separate_trainings import library_that_trains, warn_at_users_line

__all__ = ["WholeModels"]

_ON_GPUS = "which needs GPUs"

_TRAINERS = (
    ("transformers.trainer", "transformers' Trainer", f"TrainingArguments(fsdp=True), {_ON_GPUS}"),
    ("lightning.pytorch", "Lightning's Trainer", f'Trainer(strategy="fsdp"), {_ON_GPUS}'),
    ("pytorch_lightning", "Lightning's Trainer", f'Trainer(strategy="fsdp"), {_ON_GPUS}'),
    ("lightning.fabric", "Lightning's Fabric", f'Fabric(strategy="fsdp"), {_ON_GPUS}'),
    ("lightning_fabric", "Lightning's Fabric", f'Fabric(strategy="fsdp"), {_ON_GPUS}'),
    ("accelerate", "Accelerate's own Accelerator", "`from nbaccel import Accelerator`, in place of accelerate's"),
)
"""Beginnings of a module's name, who that is, and how it shards. The first one that a frame belongs to counts: others
are below it."""

_PACKAGE, _LAUNCH = "nbaccel.", "nbaccel.launching."
_SHARD = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine"})
"""Classes of wrappers that shard, and step what looks like plain parameters."""

_PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


class WholeModels(RankPart):
    """Looks at the first optimizer that steps in each task of one rank, in a run whose strategy is "fsdp".

    wrappers: models that the program has wrapped for several ranks, as `note_wrappers` finds them.
    """

    def __init__(self, world: World, settings: RunSettings, wrappers: Collection[Any]) -> None:
        self._world = world
        self._wrappers = wrappers
        self._settings = settings
        self._is_open = world.is_main_process

    def install(self) -> None:
        """Look at steps from now on."""
        if self._world.is_distributed:
            when_loaded({"torch.optim.optimizer": self._hook})

    def begin(self, running: RankTask) -> None:
        self._is_open = self._world.is_main_process

    def _hook(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._is_open:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        models = [parameter for parameter in parameters if isinstance(parameter, sys.modules["torch"].nn.Parameter)]
        if not models:
            return  # tensors of a user's own
        self._is_open = False
        if any(hasattr(parameter, "full_tensor") for parameter in models):
            return  # a DTensor: in shards
        wrappers = {kind.__name__ for wrapper in self._wrappers for kind in type(wrapper).__mro__}
        modules = list(_modules(sys._getframe(1)))
        if wrappers & _SHARD or any(module.startswith(_PACKAGE) for module in modules):
            return  # the program has chosen by itself: the strategy that it gives nbaccel's Accelerator wins
        if sentence := _instead(modules, wrappers, has_been_said=bool(self._settings.seeds_alike)):
            warn_at_users_line(
                f"NOT sharded: {type(optimizer).__name__} steps a whole model in each of {self._world.world_size} "
                f"ranks ({sum(parameter.numel() for parameter in models):,} parameters). The strategy fsdp is that of "
                f"nbaccel's Accelerator, and {sentence}"
            )


def _instead(modules: Sequence[str], wrappers: Collection[str], has_been_said: bool) -> str:
    """Return the rest of a sentence: who trains, and how to shard it. Empty for a loop of which it has been said.

    modules: those whose functions are being called.  wrappers: classes of wrapped models.  has_been_said: the run's
    first lines say that a loop which prepares nothing is not sharded.
    """
    for beginning, who, how in _TRAINERS:
        if any(module == beginning or module.startswith(f"{beginning}.") for module in modules):
            return f"{who} does not read it: shard by {how}, or write the loop with nbaccel's accelerator.prepare."
    if library := library_that_trains():
        return f"{library} does not read it: write the loop with accelerator.prepare, or leave --strategy out."
    if "DistributedDataParallel" in wrappers:
        return (
            "the program wraps its model in DistributedDataParallel by itself: hand the bare model to prepare,\n"
            f"    {_PREPARE}"
        )
    return "" if has_been_said else f"the loop prepares nothing with it:\n    {_PREPARE}"


def _modules(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of the modules whose functions are being called, innermost first, up to those that launch."""
    while frame is not None and not (name := str(frame.f_globals.get("__name__", ""))).startswith(_LAUNCH):
        yield name
        frame = frame.f_back
