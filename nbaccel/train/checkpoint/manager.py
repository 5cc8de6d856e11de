"""Checkpoints: the part of an Accelerator that saves and loads a training. Runs in ranks.

`save_state` contains no collective: rank 0 writes and commits the folder, every other rank that calls it adds its
random states, and no rank waits for another. So it may be called by all ranks or under `is_main_process`. Of a sharded
training every rank writes its rows, and all wait for rank 0, through files (`SaveAgreement`): all ranks call it then.
`load_state` is collective: rank 0 chooses and verifies, all read.

What works on files, `saving` and `loading`, is imported by the first save or load: a script may do neither.

Not saved: gradients. In an open accumulation window its batches count as not yet seen.

Reasons: docs/design/checkpoints.md
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Module

from nbaccel.base.aborting import refuse_if_aborted
from nbaccel.base.quantised import trained_state
from nbaccel.base.quantities import plural
from nbaccel.train.checkpoint.atomic_folder import SUBFOLDER, may_write_below
from nbaccel.train.checkpoint.autosave import CheckpointPolicy
from nbaccel.train.checkpoint.checkpoint_parts import CheckpointParts
from nbaccel.train.checkpoint.directory import CheckpointDirectory, FoundCheckpoint
from nbaccel.train.checkpoint.manifest import Stamp
from nbaccel.train.distributed.callers import users_line, warn_user

__all__ = ["Checkpoints"]


class Checkpoints(CheckpointParts):
    """Saves and loads a training. A part of the Accelerator."""

    # -- the whole training

    def save_state(
        self, output_dir: str | os.PathLike[str] | None, blocking: bool, save_model_func_kwargs: Mapping[str, Any]
    ) -> str:
        """Write a checkpoint and return its folder; see `Accelerator.save_state`. No collective."""
        if save_model_func_kwargs:
            warn_user(f"save_state(…, {_named(save_model_func_kwargs)}) has no effect: that is for DeepSpeed's engine.")
        if not blocking and self.registered.save_hooks:
            raise ValueError(
                "save_state(blocking=False) writes while the training goes on, when a hook of "
                "register_save_state_pre_hook could see other weights than those that are saved: leave blocking=True"
            )
        training, directory = self.training(), self.directory
        moment = training.stamp()
        is_numbered = output_dir is None
        if training.is_sharded:  # every rank calls it, from whatever line
            moment = replace(moment, save=directory.label((moment.step, moment.position), "any line"))
        elif is_numbered:
            moment = replace(moment, save=directory.label((moment.step, moment.position), users_line()))
        target = directory.next_folder(output_dir, str(moment), self.writes)
        if target.name == SUBFOLDER and self.writes:
            warn_user(
                f"{target.parent} holds other things too, so the checkpoint is {target}; load_state finds it there",
            )
        if is_numbered:
            directory.count_on(target)  # also where the save fails: no other save takes that number
            self.tell(directory, target)
        return os.fspath(self.save(target, moment, blocking, directory if is_numbered else None))

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None,
        load_kwargs: Mapping[str, Any],
        trust: bool,
        load_model_func_kwargs: Mapping[str, Any],
    ) -> None:
        """Continue from a checkpoint; see `Accelerator.load_state`. Collective."""
        self.writer.join()
        choice, free = self.from_main("load_state", lambda: (self.directory.choose(input_dir), self.directory.free()))
        trust = trust or load_kwargs.get("weights_only") is False
        options = {name: value for name, value in load_model_func_kwargs.items() if name != "map_location"}
        self.load(choice, trust, was_chosen=input_dir is None, options=options)
        self.directory.go_on_at(free)

    def without_base(self, model: Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return the trained part of the state dict of a quantised model, and say so; of any other model the whole."""
        training = self.training()
        module = training.strategy.unwrap(model)
        base = training.prepared.base_of(model, training.strategy)
        if not base or not any(parameter.requires_grad for parameter in module.parameters()):
            return state
        trained = trained_state(module, state, base)
        nbytes = sum(tensor.nbytes for tensor in trained.values() if isinstance(tensor, torch.Tensor))
        self.say(
            f"of {type(module).__name__} only what was trained is written: {plural(len(trained), 'tensor')}, "
            f"{nbytes:,} bytes. Its base is quantised; load that from where it came, and then load_model puts these in"
        )
        return trained

    # -- how

    def look_at_project_dir(self) -> None:
        """Warn now, and not hours later at the first save, if nothing can be saved in `project_dir`."""
        place = self.directory.project.project_dir
        if place is not None and self.writes and not may_write_below(Path(place)):
            warn_user(
                f"project_dir {os.fspath(place)} cannot be written to: checkpoints and logs will fail there. Choose "
                "another folder before the training.",
            )

    def agree_on_names(self) -> None:
        """Name this run, and the first number of its checkpoints, equally on all ranks; once. Collective.

        Called where ranks communicate anyway. A save before that, or without it, has the names of rank 0.
        """
        lineage = self.directory.lineage
        saves_itself = CheckpointPolicy.of(self.context.settings).every is not None
        is_named = saves_itself or self.directory.project.automatic_checkpoint_naming
        if lineage.is_agreed or not (is_named or self.context.world.is_distributed):
            return
        run, free = self.from_main("name the checkpoints", lambda: (lineage.run, self.directory.free()))
        lineage.agree(run)
        self.directory.go_on_at(free)

    def save(self, target: Path, stamp: Stamp, blocking: bool, directory: CheckpointDirectory | None) -> Path:
        """Save this rank's share of a checkpoint; return the checkpoint, as far as its name is known.

        Args:
            directory: Cleans up, in rank 0, once the checkpoint is complete.
        """
        from nbaccel.train.checkpoint.saving import RankSave

        refuse_if_aborted(f"the checkpoint {target}")
        return RankSave(self, target, stamp, blocking, directory).write()

    def load(
        self, choice: FoundCheckpoint, trust: bool, was_chosen: bool, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Continue from `choice`, which is the same on every rank. Collective.

        Args:
            was_chosen: By us, among several.
            options: For the models' ``load_state_dict``.
        """
        from nbaccel.train.checkpoint.loading import RankLoad

        RankLoad(self, choice).read(trust, was_chosen, options)

    def forget(self) -> None:
        """Wait for the save that is being written, and free its buffers."""
        self.writer.join()
        self.staging = None


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
