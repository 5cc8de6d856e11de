"""Loading: continue from a checkpoint that all ranks have chosen. Runs in ranks; collective."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from nbaccel.features import feature
from nbaccel.train.checkpoint import generators, rng_files
from nbaccel.train.checkpoint.checkpoint_parts import CheckpointParts
from nbaccel.train.checkpoint.content import Content
from nbaccel.train.checkpoint.directory import FoundCheckpoint
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.shards import loadable
from nbaccel.train.checkpoint.training_state import describe_position
from nbaccel.train.distributed.callers import warn_user

__all__ = ["RankLoad"]


class RankLoad:
    """This rank's part in loading a checkpoint.

    Args:
        choice: The checkpoint, the same on every rank.
    """

    def __init__(self, checkpoints: CheckpointParts, choice: FoundCheckpoint) -> None:
        self._checkpoints = checkpoints
        self._training = checkpoints.training()
        self._choice = choice

    def read(self, trust: bool, was_chosen: bool, options: Mapping[str, Any]) -> None:
        """Continue from the checkpoint. Collective.

        Args:
            trust: Unpickle what may run code.
            was_chosen: By us, among several.
            options: For the models' ``load_state_dict``.
        """
        choice, training, state = self._choice, self._training, self._checkpoints.context.state
        for reason in choice.passed_over if state.is_main_process else ():
            warn_user(f"{reason}. Loading {choice.folder} instead.")
        models = self._run_load_hooks()
        content = _read(choice, trust, training.is_sharded)
        self._refuse_other_objects(content)
        reorders = training.reorders(content)
        training.take(content, models, options)
        for thing, stored in zip(self._checkpoints.registered.objects, content.customs, strict=True):
            thing.load_state_dict(loadable(stored, thing.state_dict()) if training.is_sharded else stored)
        seed = content.progress.get("seed", torch.initial_seed())
        self._checkpoints.directory.latest = choice.folder
        self._checkpoints.directory.lineage.follow(choice.manifest)
        missing = self._restore_generators(seed, trust)  # last: nothing may draw after this
        self._say_who_draws_anew(missing)
        if state.is_main_process and choice.manifest is not None:
            place = describe_position(training.step, training.prepared.loaders) if was_chosen else ""
            for line in _news(choice.folder, choice.manifest, state.num_processes, place, reorders):
                self._checkpoints.say(line)
            for model, facts in zip(training.prepared.models, content.progress.get("bases", ()), strict=False):
                if facts is not None:
                    self._checkpoints.say(
                        f"the checkpoint has what was trained of {type(training.strategy.unwrap(model)).__name__}; its "
                        f"base, {facts['tensors']} tensors of {facts['nbytes']:,} bytes, is the one that is here"
                    )

    def _run_load_hooks(self) -> list[Module]:
        """Return the prepared models that no hook removed, which are loaded here."""
        prepared = self._training.prepared.models
        models = [self._checkpoints.handed_in(model) for model in prepared]
        known = dict(zip(map(id, models), prepared, strict=True))
        kept = list(models)
        for hook in self._checkpoints.registered.load_hooks.values():
            hook(kept, os.fspath(self._choice.folder))
        return [known.get(id(model), model) for model in kept]

    def _refuse_other_objects(self, content: Content) -> None:
        held, registered = len(content.customs), len(self._checkpoints.registered.objects)
        if held != registered:
            kinds = ", ".join(type(thing).__name__ for thing in self._checkpoints.registered.objects) or "none"
            raise RuntimeError(
                f"{self._choice.folder} holds the state of {held} registered object(s), and {registered} are "
                f"registered ({kinds}): call register_for_checkpointing with the same ones, in the same order"
            )

    def _restore_generators(self, seed: int, trust: bool) -> list[str]:
        """Restore this rank's random states; return for each rank why they had to be derived, or an empty text."""
        choice, training = self._choice, self._training
        rank, device = self._checkpoints.context.state.process_index, training.device
        if choice.manifest is None:
            reason = feature("random states of Accelerate")(choice.folder, rank, device, trust)
        else:
            state, reason = rng_files.find(choice.folder, rank, choice.manifest)
            if state is not None:
                generators.restore(state, device)
        if reason:
            generators.derive(seed, training.step, rank)
        reasons: list[str] = self._checkpoints.context.collectives.gather_objects([reason], "load_state, random states")
        return reasons

    def _say_who_draws_anew(self, missing: Sequence[str]) -> None:
        """Warn once, on rank 0.

        Args:
            missing: For each rank why it had no random states, or an empty text.
        """
        derived = [rank for rank, reason in enumerate(missing) if reason]
        if derived and self._checkpoints.context.state.is_main_process:
            ranks = f"{', '.join(map(str, derived))} of {self._checkpoints.context.state.num_processes}"
            warn_user(
                f"rank(s) {ranks} begin new random numbers, derived from the seed, the step "
                f"and rank: {missing[derived[0]]}. (A save on the main process only, or with fewer ranks, has none.)",
            )


def _read(choice: FoundCheckpoint, trust: bool, by_rows: bool) -> Content:
    if choice.manifest is None:
        content: Content = feature("a checkpoint of Accelerate")(choice.folder, trust)
        return content
    return Content.read(choice.folder, choice.manifest, trust, by_rows)


def _news(folder: Path, manifest: Manifest, world_size: int, place: str, reorders: bool) -> Iterator[str]:
    """Yield lines for a person about facts that the program itself did not choose.

    Args:
        place: Where the training continues; empty where the program chose the folder itself.
        reorders: The current epoch of a loader continues in another order.
    """
    if place:
        yield f"continuing from {folder}: {place}"
    if manifest.world_size != world_size:
        yield (
            f"the checkpoint was written by {manifest.world_size} process(es) and continues in {world_size}: with an "
            "unchanged batch_size per process the effective batch size changes"
        )
    if reorders:
        yield (
            f"one process has an order of its own (plain PyTorch's), so what is left of epoch {manifest.epoch + 1} may "
            "repeat samples and miss others; DataLoaderConfiguration(use_seedable_sampler=True) has one order for all"
        )
