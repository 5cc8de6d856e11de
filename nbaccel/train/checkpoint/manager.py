"""Checkpoints: the part of an Accelerator that saves and loads a training. Runs in ranks.

`save_state` contains no collective: rank 0 writes and commits the folder, every other rank that calls it adds its
random states, and no rank waits for another. So it may be called by all ranks or under `is_main_process`. Of a sharded
training every rank writes its rows, and all wait for rank 0, through files (`SaveAgreement`): all ranks call it then.
`load_state` is collective: rank 0 chooses and verifies, all read.

Not saved: gradients. In an open accumulation window its batches count as not yet seen.

Reasons: docs/design/checkpoints.md
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from nbaccel.base.aborting import refuse_if_aborted
from nbaccel.base.quantised import trained_state
from nbaccel.base.quantities import plural
from nbaccel.errors import CannotSave
from nbaccel.features import feature
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.atomic_folder import SUBFOLDER, as_cannot_save, may_write_below
from nbaccel.train.checkpoint.autosave import CheckpointPolicy
from nbaccel.train.checkpoint.content import Content, ObjectState, Staging
from nbaccel.train.checkpoint.directory import CheckpointDirectory, FoundCheckpoint, is_of
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.rng_files import Stamp
from nbaccel.train.checkpoint.save_agreement import Alone, SaveAgreement
from nbaccel.train.checkpoint.shards import loadable
from nbaccel.train.checkpoint.training_state import Epochs, Remembered, TrainingState, describe_position
from nbaccel.train.checkpoint.writer import Save, ShareSave, Writer
from nbaccel.train.distributed.callers import users_line, warn_user
from nbaccel.train.prepare.training_context import TrainingContext

__all__ = [
    "ON_SAVE_ERROR",
    "Checkpoints",
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


class Checkpoints:
    """Saves and loads a training, and keeps what takes part in that. A part of the Accelerator.

    Args:
        directory: The folders of the project.
        unwrap: ``unwrap(model, keep_torch_compile)`` returns the program's own module in a prepared one.
        say: Prints on the main process of each node.

    Attributes:
        registered: What the program added.
        epochs, remembered: Its position and values.
    """

    def __init__(
        self,
        context: TrainingContext,
        directory: CheckpointDirectory,
        on_save_error: str,
        unwrap: Callable[[Module, bool], Module],
        say: Callable[[str], None],
    ) -> None:
        self.directory = directory
        self.registered = Registered()
        self.epochs = Epochs()
        self.remembered = Remembered()
        self.writer = Writer()
        self.staging = Staging()
        self._context = context
        self._on_save_error = on_save_error
        self._unwrap = unwrap
        self._say = say

    def training(self) -> TrainingState:
        """Return what is saved and restored together, as it is in this process; the context must be complete."""
        context = self._context
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
        state = self._context.state
        return state.is_main_process or (self.directory.project.save_on_each_node and state.is_local_main_process)

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
        self._say(
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

    def tell(self, directory: CheckpointDirectory, target: Path) -> None:
        """Print once what other runs have left where `target` is about to be made."""
        if self._context.state.is_main_process and (news := directory.news(target)):
            self._say(news)

    def agree_on_names(self) -> None:
        """Name this run, and the first number of its checkpoints, equally on all ranks; once. Collective.

        Called where ranks communicate anyway. A save before that, or without it, has the names of rank 0.
        """
        lineage = self.directory.lineage
        saves_itself = CheckpointPolicy.of(self._context.settings).every is not None
        is_named = saves_itself or self.directory.project.automatic_checkpoint_naming
        if lineage.is_agreed or not (is_named or self._context.world.is_distributed):
            return
        run, free = self.from_main("name the checkpoints", lambda: (lineage.run, self.directory.free()))
        lineage.agree(run)
        self.directory.go_on_at(free)

    def save(self, target: Path, stamp: Stamp, blocking: bool, directory: CheckpointDirectory | None) -> Path:
        """Save this rank's share of a checkpoint; return the checkpoint, as far as its name is known.

        Args:
            directory: Cleans up, in rank 0, once the checkpoint is complete.
        """
        refuse_if_aborted(f"the checkpoint {target}")
        training = self.training()
        if training.is_sharded and self._context.world.is_distributed:
            return self._save_together(target, training, stamp, blocking, directory)
        if self.writes:
            self._write(target, training, stamp, blocking, directory, Alone())
            return target
        if self.registered.save_hooks:
            self._run_save_hooks(training, training.weights(), target)
        try:
            with as_cannot_save(target):
                committed = {} if directory is None else {"committed": directory.committed}
                rng_files.add(target, self._context.state.process_index, stamp, training.generators(), **committed)
        except CannotSave as error:
            self._go_on_without(error)
        return target

    def _save_together(
        self, target: Path, training: TrainingState, stamp: Stamp, blocking: bool, directory: CheckpointDirectory | None
    ) -> Path:
        """Save a sharded training, of which every rank writes its own rows. Runs in every rank; no collective."""
        self.writer.join()  # the save before, with its error: the same on all ranks, before any of them begins this one
        world = self._context.world
        if self.directory.project.save_on_each_node and world.local_world_size < world.world_size:
            raise CannotSave(
                f"cannot write the checkpoint {target}: save_on_each_node is for nodes without a common file system, "
                "and a sharded model has rows on every node, which belong into one folder. Leave save_on_each_node out "
                "and give a folder that all nodes see.",
                str(target),
            )

        def committed() -> Path | None:
            if is_of(target, str(stamp)):
                return target
            return None if directory is None else directory.committed(str(stamp))

        agreement = SaveAgreement(target, str(stamp), world.rank, world.world_size, committed, self._say)
        try:
            agreement.begin()
            if world.is_main_process:
                self._write(target, training, stamp, blocking, directory, agreement)
                return target
            return self._write_share(target, training, stamp, blocking, agreement)
        except CannotSave as error:  # before anything was written
            agreement.fail(error)
            self._go_on_without(error)
            return target
        except BaseException as error:
            agreement.fail(error)
            raise

    def _write_share(
        self, target: Path, training: TrainingState, stamp: Stamp, blocking: bool, agreement: SaveAgreement
    ) -> Path:
        """Write this rank's rows and random states, now or in the background. Runs in every rank but rank 0."""
        staging = None if blocking else self.staging
        state = training.generators()
        weights = training.weights()
        content = training.content(weights, self.registered.objects)
        if self.registered.save_hooks:
            self._run_save_hooks(training, weights, target)
        parts = _whole(content.ready(staging, rows_only=True), target)
        world = self._context.world
        save = ShareSave(
            target,
            parts if staging is None else list(parts),
            world.rank,
            world.world_size,
            stamp,
            state,
            agreement,
            self.directory.latest,
        )

        def write() -> Path:
            try:
                self.directory.latest = save.write()
            except CannotSave as error:
                self._go_on_without(error)
                return target
            except BaseException as error:
                agreement.fail(error)
                raise
            return self.directory.latest

        if blocking:
            return write()
        self.writer.start(write)
        return target

    def _write(
        self,
        target: Path,
        training: TrainingState,
        stamp: Stamp,
        blocking: bool,
        directory: CheckpointDirectory | None,
        agreement: Alone,
    ) -> None:
        """Write the whole folder, now or in the background; then `directory` cleans up. Runs in rank 0."""
        then = None if directory is None else directory.tidy
        if unseen := training.accumulation.window.unfinished:
            warn_user(
                f"save_state inside an accumulation window: the gradients of its {unseen} batch(es) are not saved, "
                "and load_state sees these batches again. Where accelerator.sync_gradients is true nothing is lost.",
            )
        self.writer.join()  # the save before, whose buffers are used again
        staging = None if blocking else self.staging
        state = training.generators()
        weights = training.weights()
        content = training.content(weights, self.registered.objects)
        if directory is not None and (news := directory.shortage(target, content.nbytes)):
            self._say(news)
        parts = _whole(content.ready(staging), target)
        save = Save(
            target,
            parts if staging is None else list(parts),
            content.nbytes,
            self._context.state.process_index,
            stamp,
            state,
            training.manifest(content, stamp),
            self.directory.latest,
            agreement,
        )
        if blocking:
            # Hooks may remove weights, before the parts are made of the others.
            self._complete(save, then, lambda folder: self._run_save_hooks(training, weights, folder))
        else:
            self.writer.start(lambda: self._complete(save, then))

    def _complete(
        self,
        save: Save,
        then: Callable[[], None] | None,
        into_folder: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        try:
            reasons = save.write(into_folder)
            self.directory.latest = save.target
            if then is not None:
                then()
        except CannotSave as error:
            self._go_on_without(error)
            return
        for reason in reasons:
            warn_user(
                f"{reason}. It is saved as a pickle, from which load_state takes tensors and plain data; anything "
                "else needs load_state(..., trust=True).",
            )

    def _go_on_without(self, error: CannotSave) -> None:
        """Raise `error`, or with ``on_save_error="warn"`` warn instead."""
        if self._on_save_error == "raise":
            raise error
        warn_user(f"{error} The training goes on without this checkpoint.")

    def _handed_in(self, model: Module) -> Module:
        """Return the program's own module inside a prepared `model`: without DDP, and without our ``torch.compile``."""
        return self._unwrap(model, not self._context.compiling.is_on)

    def _run_save_hooks(self, training: TrainingState, weights: list[dict[str, Any]], folder: Path) -> None:
        models = [self._handed_in(model) for model in training.prepared.models]
        for hook in self.registered.save_hooks.values():
            hook(models, weights, os.fspath(folder))

    def _run_load_hooks(self, training: TrainingState, folder: Path) -> list[Module]:
        """Return the prepared models that no hook removed, which are loaded here."""
        prepared = training.prepared.models
        models = [self._handed_in(model) for model in prepared]
        known = dict(zip(map(id, models), prepared, strict=True))
        kept = list(models)
        for hook in self.registered.load_hooks.values():
            hook(kept, os.fspath(folder))
        return [known.get(id(model), model) for model in kept]

    def load(
        self, choice: FoundCheckpoint, trust: bool, was_chosen: bool, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Continue from `choice`, which is the same on every rank. Collective.

        Args:
            was_chosen: By us, among several.
            options: For the models' ``load_state_dict``.
        """
        training = self.training()
        for reason in choice.passed_over if self._context.state.is_main_process else ():
            warn_user(f"{reason}. Loading {choice.folder} instead.")
        models = self._run_load_hooks(training, choice.folder)
        content = _read(choice, trust, training.is_sharded)
        self._refuse_other_objects(choice, content)
        reorders = training.reorders(content)
        training.take(content, models, options)
        for thing, state in zip(self.registered.objects, content.customs, strict=True):
            thing.load_state_dict(loadable(state, thing.state_dict()) if training.is_sharded else state)
        seed = content.progress.get("seed", torch.initial_seed())
        self.directory.latest = choice.folder
        self.directory.lineage.follow(choice.manifest)
        missing = self._restore_generators(choice, training, seed, trust)  # last: nothing may draw after this
        self._say_who_draws_anew(missing)
        if self._context.state.is_main_process and choice.manifest is not None:
            place = describe_position(training.step, training.prepared.loaders) if was_chosen else ""
            for line in _news(choice.folder, choice.manifest, self._context.state.num_processes, place, reorders):
                self._say(line)
            for model, facts in zip(training.prepared.models, content.progress.get("bases", ()), strict=False):
                if facts is not None:
                    self._say(
                        f"the checkpoint has what was trained of {type(training.strategy.unwrap(model)).__name__}; its "
                        f"base, {facts['tensors']} tensors of {facts['nbytes']:,} bytes, is the one that is here"
                    )

    def _refuse_other_objects(self, choice: FoundCheckpoint, content: Content) -> None:
        held, registered = len(content.customs), len(self.registered.objects)
        if held != registered:
            kinds = ", ".join(type(thing).__name__ for thing in self.registered.objects) or "none"
            raise RuntimeError(
                f"{choice.folder} holds the state of {held} registered object(s), and {registered} are registered "
                f"({kinds}): call register_for_checkpointing with the same ones, in the same order"
            )

    def _restore_generators(
        self, choice: FoundCheckpoint, training: TrainingState, seed: int, trust: bool
    ) -> list[str]:
        """Restore this rank's random states; return for each rank why they had to be derived, or an empty text."""
        rank, device = self._context.state.process_index, training.device
        if choice.manifest is None:
            reason = feature("random states of Accelerate")(choice.folder, rank, device, trust)
        else:
            state, reason = rng_files.find(choice.folder, rank, choice.manifest)
            if state is not None:
                rng_files.restore(state, device)
        if reason:
            rng_files.derive(seed, training.step, rank)
        reasons: list[str] = self._context.collectives.gather_objects([reason], "load_state, random states")
        return reasons

    def _say_who_draws_anew(self, missing: Sequence[str]) -> None:
        """Warn once, on rank 0.

        Args:
            missing: For each rank why it had no random states, or an empty text.
        """
        derived = [rank for rank, reason in enumerate(missing) if reason]
        if derived and self._context.state.is_main_process:
            ranks = f"{', '.join(map(str, derived))} of {self._context.state.num_processes}"
            warn_user(
                f"rank(s) {ranks} begin new random numbers, derived from the seed, the step "
                f"and rank: {missing[derived[0]]}. (A save on the main process only, or with fewer ranks, has none.)",
            )

    def from_main(self, call: str, ask: Callable[[], _T]) -> _T:
        """Return the result of `ask` on rank 0, or raise its error; the same on every rank. Collective.

        Args:
            call: What it is for, in a message about ranks that wait here.
        """
        answer: _T | None = None
        error: Exception | None = None
        if self._context.state.is_main_process:
            try:
                answer = ask()
            except Exception as raised:
                error = raised
        if self._context.world.is_distributed:
            answer, error = self._context.collectives.gather_objects([(answer, error)], call)[0]
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # rank 0 has called it


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


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


def _whole(parts: Iterable[ObjectState], target: Path) -> Iterator[ObjectState]:
    """Yield `parts`, which come from the device one by one; raise at the end if they waited there for an abort."""
    yield from parts
    refuse_if_aborted(f"the checkpoint {target}")
