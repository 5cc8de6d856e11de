"""Checkpointing: the user's methods that save and load a training. Runs in ranks; a base class of the Accelerator.

`save_state` contains no collective: rank 0 writes and commits the folder, every other rank that calls it adds its
random states, and no rank waits for another. So it may be called by all ranks or under `is_main_process`.
`load_state` is collective: rank 0 chooses and verifies, all read.

Not saved: gradients. In an open accumulation window its batches count as not yet seen.

Exporting: the user's methods that write a model for other programs. Runs in ranks.

The main process writes; no rank waits. `checkpoint.weights` and `saving` define the files.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from nbaccel.aborting import refuse_if_aborted
from nbaccel.errors import CannotSave
from nbaccel.train.callers import users_line, warn_user
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.accelerate_format import read_foreign, restore_foreign_generators
from nbaccel.train.checkpoint.atomic_folder import SUBFOLDER, may_write_below, sayable
from nbaccel.train.checkpoint.content import Content, ObjectState, Staging
from nbaccel.train.checkpoint.directory import CheckpointDirectory, FoundCheckpoint, ProjectConfiguration
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.model_weights import save_weights
from nbaccel.train.checkpoint.rng_files import Stamp
from nbaccel.train.checkpoint.training_state import TrainingState, in_words
from nbaccel.train.checkpoint.writer import Save, Writer
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.saving import write_object

__all__ = [
    "ON_SAVE_ERROR",
    "Checkpointing",
    "Exporting",
    "Registered",
]


class Exporting(ProcessControl):
    """`get_state_dict`, `save_model`, `save`."""

    @abstractmethod
    def _training(self) -> TrainingState:
        """Return the parts of this Accelerator, as they are in this process."""

    @property
    @abstractmethod
    def _writes(self) -> bool:
        """True if this process writes files that are for all ranks."""

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state dict, without prefixes of DDP and ``torch.compile``. Tensors are not copied.

        unwrap: False returns that of the module as it is. Collective with sharded strategies.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> list(accelerator.get_state_dict(model))
        ['weight', 'bias']
        """
        return self._training().strategy.state_dict(model) if unwrap else model.state_dict()

    def save_model(
        self,
        model: Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write `model` as Hugging Face libraries expect it: ``model.safetensors``, or shards and their index.

        Rank 0 writes; the others do nothing. `nbaccel.utils.load_model` reads it, and so does
        ``from_pretrained`` where there is a config.json beside it.
        max_shard_size: of one file, in bytes or as "10GB"; a larger tensor has a file of its own.
        safe_serialization: False writes ``pytorch_model.bin``, a pickle.

        Raises:
            NotADirectoryError: `save_directory` is a file.
            CannotSave: no space, or no right to write there.

        >>> import os, tempfile, torch
        >>> from nbaccel import Accelerator
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Accelerator().save_model(torch.nn.Linear(2, 1), folder)
        ...     os.listdir(folder)
        ['model.safetensors']
        """
        state = self.get_state_dict(model)
        if self._writes:
            save_weights(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False, *, save_on_each_node: bool = False) -> None:
        """Call ``torch.save(obj, f)`` on the main process only; a path is written under a temporary name and renamed.

        save_on_each_node: on the first rank of each node.
        safe_serialization: `obj` is a dict of tensors; write it as safetensors.
        """
        if self._writes or (save_on_each_node and self.is_local_main_process):
            write_object(obj, f, safe_serialization)


ON_SAVE_ERROR = ("raise", "warn")

_T = TypeVar("_T")

SaveHook = Callable[[list[Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[Module], str], None]


@dataclass(slots=True)
class Registered:
    """Additions of the program to its checkpoints: objects of its own, and hooks. `free_memory` does not clear them."""

    objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)


class Checkpointing(Exporting):
    """`save_state`, `load_state`, the hooks and objects that take part in them, and the folders that they write."""

    _shelf: CheckpointDirectory
    _registered: Registered
    _staging: Staging
    _writer: Writer
    _on_save_error: str

    @abstractmethod
    def _join_world(self) -> None:
        """Join the world as it is now, process group included. Collective where the group is formed."""

    @abstractmethod
    def _handed_in(self, model: Module) -> Module:
        """Return the program's own module inside a prepared `model`: without DDP, and without our ``torch.compile``."""

    # -- where

    @property
    def project_configuration(self) -> ProjectConfiguration:
        return self._shelf.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._shelf.project = project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        return self._shelf.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the trackers' files; the project's folder unless another one was chosen."""
        return self._shelf.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self._shelf.project.iteration

    # -- the whole training

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write everything prepared and registered, and the random states, into a folder; return its name.

        No collective: call it on all ranks, or on the main process only (the other ranks' random numbers are then
        derived at load). Blocks rank 0 until the disk has it; a checkpoint of that name is replaced, and the older
        one deleted only after that.

        output_dir: the folder. Where it holds other things too, these stay, and the checkpoint is a subfolder
        ``nbaccel_checkpoint``, which `load_state` finds. None, with ``automatic_checkpoint_naming=True`` in the
        project's configuration, for ``<project_dir>/checkpoints/checkpoint_<n>``, of which `total_limit` are kept.
        Numbers continue after the newest existing one; a printed line says so where another run has left it.
        safe_serialization: for Accelerate's programs; a checkpoint is always safetensors and JSON. Only a state
        that is more than data (of a registered object, for example) becomes a pickle, with a warning.
        blocking: False copies the state, into memory of the host that is kept for the next time, and writes it in
        the background; the next save, `load_state`, `end_training` and the end of the process wait for it. Not with
        hooks of the program, which may look at the models.
        save_model_func_kwargs: accepted with a warning; in Accelerate they are for DeepSpeed.

        Raises:
            ValueError: no folder, or the number that was set by hand exists; or hooks, and not `blocking`.
            CannotSave: no space, or no right to write there. The older checkpoint does not change. With
                ``on_save_error="warn"`` it is a warning, and the training continues. The error of a save in the
                background is raised by the call that waits for it.

        >>> import tempfile
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = accelerator.save_state(f"{folder}/last")
        ...     accelerator.load_state(f"{folder}/last")
        """
        if save_model_func_kwargs:
            warn_user(f"save_state(…, {_named(save_model_func_kwargs)}) has no effect: that is for DeepSpeed's engine.")
        if not blocking and self._registered.save_hooks:
            raise ValueError(
                "save_state(blocking=False) writes while the training goes on, when a hook of "
                "register_save_state_pre_hook could see other weights than those that are saved: leave blocking=True"
            )
        training, shelf = self._training(), self._shelf
        moment = training.stamp()
        is_numbered = output_dir is None
        if is_numbered:
            moment = replace(moment, save=shelf.label((moment.step, moment.position), users_line()))
        target = shelf.next_folder(output_dir, str(moment), self._writes)
        if target.name == SUBFOLDER and self._writes:
            warn_user(
                f"{target.parent} holds other things too, so the checkpoint is {target}; load_state finds it there",
            )
        if is_numbered:
            shelf.count_on(target)  # also where the save fails: no other save takes that number
            self._tell(shelf, target)
        self._save(target, moment, blocking, shelf if is_numbered else None)
        return os.fspath(target)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Continue from a checkpoint, in this or another number of ranks. Collective.

        Everything that was prepared and registered when it was written must be so now, in the same order. Prepared
        loaders continue at the batch after the last one that was trained on, so a program need not skip any itself
        (`skip_first_batches` replaces that position). Folders that Accelerate wrote load too; they have no position.

        input_dir: the folder; None for the newest complete one of those that are named automatically. Damaged ones
        are skipped with a warning, and the numbering of `save_state` continues after the newest.
        trust: load pickles too, which can run any code; ``load_kwargs={"weights_only": False}`` does the same, and the
        other `load_kwargs` of Accelerate have no effect here.
        load_model_func_kwargs: for each model's ``load_state_dict``, such as ``strict=False`` for a checkpoint with
        more or fewer weights. A `map_location` is accepted: tensors are loaded to the devices of their objects.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: it is damaged; the error names the file, and what was expected and found.
            UntrustedPickle: one of its files is a pickle that could run code, and `trust` is not given.
            ValueError: other models, optimizers or schedulers are prepared. RuntimeError: other objects registered.
        """
        self._join_world()
        self._writer.join()
        choice, free = self._from_main(lambda: (self._shelf.choose(input_dir), self._shelf.free()))
        trust = trust or dict(load_kwargs or {}).get("weights_only") is False
        load_model_func_kwargs.pop("map_location", None)
        self._load(choice, trust, was_chosen=input_dir is None, options=load_model_func_kwargs)
        self._shelf.go_on_at(free)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add `objects` to what `save_state` and `load_state` handle, in this order. Every rank calls it.

        Raises:
            ValueError: one of them lacks `state_dict` or `load_state_dict`; nothing is registered then.

        >>> from nbaccel import Accelerator
        >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
        >>> Accelerator().register_for_checkpointing(average)
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
        self._registered.objects += objects

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, folder)`` in every `save_state`, before anything is written.

        models: the program's own, as it passed them to `prepare`: without DDP, so ``isinstance`` and
        ``save_pretrained`` work on them as in one process. weights: their state dicts; those that the hook removes
        are not saved by nbaccel.
        folder: on rank 0 the unfinished folder that becomes the checkpoint, for files of the hook's own; on other
        ranks the checkpoint's final name, which may not exist yet.
        Returns a handle whose `remove()` removes the hook.

        >>> from nbaccel import Accelerator
        >>> handle = Accelerator().register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        >>> handle.remove()
        """
        handle = RemovableHandle(self._registered.save_hooks)
        self._registered.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, folder)`` in every `load_state`, on every rank, before anything is loaded.

        models: the program's own, as it passed them to `prepare`; those that the hook removes from the list are not
        loaded by nbaccel.
        Returns a handle whose `remove()` removes the hook.

        >>> from nbaccel import Accelerator
        >>> handle = Accelerator().register_load_state_pre_hook(lambda models, folder: models.clear())
        >>> handle.remove()
        """
        handle = RemovableHandle(self._registered.load_hooks)
        self._registered.load_hooks[handle.id] = hook
        return handle

    # -- how

    def _look_at_project_dir(self) -> None:
        """Warn now, and not hours later at the first save, if nothing can be saved in `project_dir`."""
        place = self.project_dir
        if place is not None and self._writes and not may_write_below(Path(place)):
            warn_user(
                f"project_dir {os.fspath(place)} cannot be written to: checkpoints and logs will fail there. Choose "
                "another folder before the training.",
            )

    @property
    @abstractmethod
    def _saves_itself(self) -> bool:
        """True if `checkpoint_every` was chosen."""

    @property
    def _writes(self) -> bool:
        return self.is_main_process or (self.project_configuration.save_on_each_node and self.is_local_main_process)

    def _tell(self, shelf: CheckpointDirectory, target: Path) -> None:
        """Print once what other runs have left where `target` is about to be made."""
        if self.is_main_process and (news := shelf.news(target)):
            self.print(news)

    def _agree_on_names(self) -> None:
        """Name this run, and the first number of its checkpoints, equally on all ranks; once. Collective.

        Called where ranks communicate anyway. A save before that, or without it, has the names of rank 0.
        """
        lineage = self._shelf.lineage
        if lineage.is_agreed or not (self._saves_itself or self.project_configuration.automatic_checkpoint_naming):
            return
        run, free = self._from_main(lambda: (lineage.run, self._shelf.free()))
        lineage.agree(run)
        self._shelf.go_on_at(free)

    def _save(self, target: Path, stamp: Stamp, blocking: bool, shelf: CheckpointDirectory | None) -> None:
        """Save this rank's share of a checkpoint.  shelf: cleans up, in rank 0, once the checkpoint is complete."""
        refuse_if_aborted(f"the checkpoint {target}")
        training = self._training()
        if self._writes:
            self._write(target, training, stamp, blocking, shelf)
            return
        if self._registered.save_hooks:
            self._run_save_hooks(training, training.weights(), target)
        try:
            with sayable(target):
                committed = {} if shelf is None else {"committed": shelf.committed}
                rng_files.add(target, self.process_index, stamp, training.generators(), **committed)
        except CannotSave as error:
            self._go_on_without(error)

    def _write(
        self, target: Path, training: TrainingState, stamp: Stamp, blocking: bool, shelf: CheckpointDirectory | None
    ) -> None:
        """Write the whole folder, now or in the background; then `shelf` cleans up. Runs in rank 0."""
        then = None if shelf is None else shelf.tidy
        if unseen := training.accumulation.window.unfinished:
            warn_user(
                f"save_state inside an accumulation window: the gradients of its {unseen} batch(es) are not saved, "
                "and load_state sees these batches again. Where accelerator.sync_gradients is true nothing is lost.",
            )
        self._writer.join()  # the save before, whose buffers are used again
        staging = None if blocking else self._staging
        state = training.generators()
        weights = training.weights()
        content = training.content(weights, self._registered.objects)
        if shelf is not None and (news := shelf.shortage(target, content.nbytes)):
            self.print(news)
        parts = _whole(content.ready(staging), target)
        save = Save(
            target,
            parts if staging is None else list(parts),
            content.nbytes,
            self.process_index,
            stamp,
            state,
            training.manifest(content, stamp),
            self._shelf.latest,
        )
        if blocking:
            # Hooks may remove weights, before the parts are made of the others.
            self._complete(save, then, lambda folder: self._run_save_hooks(training, weights, folder))
        else:
            self._writer.start(lambda: self._complete(save, then))

    def _complete(
        self,
        save: Save,
        then: Callable[[], None] | None,
        into_folder: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        try:
            reasons = save.write(into_folder)
            self._shelf.latest = save.target
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

    def _run_save_hooks(self, training: TrainingState, weights: list[dict[str, Any]], folder: Path) -> None:
        models = [self._handed_in(model) for model in training.prepared.models]
        for hook in self._registered.save_hooks.values():
            hook(models, weights, os.fspath(folder))

    def _run_load_hooks(self, training: TrainingState, folder: Path) -> list[Module]:
        """Return the prepared models that no hook removed, which are loaded here."""
        prepared = training.prepared.models
        models = [self._handed_in(model) for model in prepared]
        known = dict(zip(map(id, models), prepared, strict=True))
        kept = list(models)
        for hook in self._registered.load_hooks.values():
            hook(kept, os.fspath(folder))
        return [known.get(id(model), model) for model in kept]

    def _load(
        self, choice: FoundCheckpoint, trust: bool, was_chosen: bool, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Continue from `choice`, which is the same on every rank. Collective.

        was_chosen: by us, among several.  options: for the models' ``load_state_dict``.
        """
        training = self._training()
        for reason in choice.passed_over if self.is_main_process else ():
            warn_user(f"{reason}. Loading {choice.folder} instead.")
        models = self._run_load_hooks(training, choice.folder)
        content = _read(choice, trust)
        self._refuse_other_objects(choice, content)
        reorders = training.prepared.reorders(content)
        training.take(content, models, options)
        for thing, state in zip(self._registered.objects, content.customs, strict=True):
            thing.load_state_dict(state)
        seed = content.progress.get("seed", torch.initial_seed())
        self._shelf.latest = choice.folder
        self._shelf.lineage.follow(choice.manifest)
        missing = self._restore_generators(choice, training, seed, trust)  # last: nothing may draw after this
        self._say_who_draws_anew(missing)
        if self.is_main_process and choice.manifest is not None:
            place = in_words(training.step, training.prepared.loaders) if was_chosen else ""
            for line in _news(choice.folder, choice.manifest, self.num_processes, place, reorders):
                self.print(line)

    def _refuse_other_objects(self, choice: FoundCheckpoint, content: Content) -> None:
        held, registered = len(content.customs), len(self._registered.objects)
        if held != registered:
            kinds = ", ".join(type(thing).__name__ for thing in self._registered.objects) or "none"
            raise RuntimeError(
                f"{choice.folder} holds the state of {held} registered object(s), and {registered} are registered "
                f"({kinds}): call register_for_checkpointing with the same ones, in the same order"
            )

    def _restore_generators(
        self, choice: FoundCheckpoint, training: TrainingState, seed: int, trust: bool
    ) -> list[str]:
        """Restore this rank's random states; return for each rank why they had to be derived, or an empty text."""
        rank, device = self.process_index, training.device
        if choice.manifest is None:
            reason = restore_foreign_generators(choice.folder, rank, device, trust)
        else:
            state, reason = rng_files.find(choice.folder, rank, choice.manifest)
            if state is not None:
                rng_files.restore(state, device)
        if reason:
            rng_files.derive(seed, training.step, rank)
        reasons: list[str] = self.collectives.gather_objects([reason])
        return reasons

    def _say_who_draws_anew(self, missing: Sequence[str]) -> None:
        """Warn once, on rank 0.  missing: for each rank why it had no random states, or an empty text."""
        derived = [rank for rank, reason in enumerate(missing) if reason]
        if derived and self.is_main_process:
            ranks = ", ".join(map(str, derived))
            warn_user(
                f"rank(s) {ranks} of {self.num_processes} begin new random numbers, derived from the seed, the step "
                f"and rank: {missing[derived[0]]}. (A save on the main process only, or with fewer ranks, has none.)",
            )

    def _from_main(self, ask: Callable[[], _T]) -> _T:
        """Return the result of `ask` on rank 0, or raise its error; the same on every rank. Collective."""
        answer: _T | None = None
        error: Exception | None = None
        if self.is_main_process:
            try:
                answer = ask()
            except Exception as raised:
                error = raised
        if self.world.is_distributed:
            answer, error = self.collectives.gather_objects([(answer, error)])[0]
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # rank 0 has called it


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _read(choice: FoundCheckpoint, trust: bool) -> Content:
    if choice.manifest is None:
        return read_foreign(choice.folder, trust)
    return Content.read(choice.folder, choice.manifest, trust)


def _news(folder: Path, manifest: Manifest, world_size: int, place: str, reorders: bool) -> Iterator[str]:
    """Yield lines for a person about facts that the program itself did not choose.

    place: where the training continues; empty where the program chose the folder itself.  reorders: the current
    epoch of a loader continues in another order.
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
