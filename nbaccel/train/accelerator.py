"""Accelerator: the user's object in a training loop. Runs in ranks, in scripts, and alone in a kernel.

A public method is its documentation and a few lines, most of which call a part: `Preparer`, `GradientControl`,
`StepRecovery`, `BatchSizePlanner`, `Checkpoints`, `ResumePolicy`, `Trackers`. They share one `TrainingContext`, which a
`Lifecycle` binds to the world of this process. No part holds the Accelerator. Nothing is global except torch's process
group, so several Accelerators do not disturb each other. One that is made in a notebook kernel touches no device until
it is used; in a forked or unpickled rank it finds that rank's world at its first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import profile
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from nbaccel.base.events import Phase, emit, reports
from nbaccel.base.quantities import seconds_of
from nbaccel.base.settings import RunSettings
from nbaccel.base.tracking import BlankTracker, GeneralTracker
from nbaccel.base.world import World
from nbaccel.features import feature
from nbaccel.train.checkpoint.autosave import chosen_saves
from nbaccel.train.checkpoint.directory import CheckpointDirectory, ProjectConfiguration
from nbaccel.train.checkpoint.manager import ON_SAVE_ERROR, Checkpoints, LoadHook, SaveHook
from nbaccel.train.checkpoint.model_weights import save_weights, write_object
from nbaccel.train.checkpoint.resume import ResumePolicy, Weakly
from nbaccel.train.checkpoint.shards import unsharded, whole_state
from nbaccel.train.checkpoint.training_state import Remembered
from nbaccel.train.data import DataLoaderConfiguration, PreparedLoader, skip_first_batches
from nbaccel.train.data.dispatch import SliceFunction
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.partial_state import AcceleratorState
from nbaccel.train.distributed.process_control import DistributedType, LastRound, ProcessControl
from nbaccel.train.distributed.rng import warn_of_rng_types
from nbaccel.train.lifecycle import Choices, Lifecycle
from nbaccel.train.oom.memory import Freed, free
from nbaccel.train.oom.microbatch.optimizer_guard import guarded_step
from nbaccel.train.oom.microbatch.slicing import SplitFunction
from nbaccel.train.prepare.contexts import GradientState, profiling
from nbaccel.train.prepare.gradient_control import GradientControl
from nbaccel.train.prepare.models import (
    TorchDynamoPlugin,
    extract_model_from_parallel,
    is_spread,
    keep_compiled,
)
from nbaccel.train.prepare.optimizer import PreparedOptimizer, PreparedScheduler
from nbaccel.train.prepare.preparer import Preparer
from nbaccel.train.prepare.training_context import TrainingContext
from nbaccel.train.step.accumulation import GradientAccumulationPlugin
from nbaccel.train.step.kwargs_handlers import (
    AutocastKwargs,
    KwargsHandler,
    PluginsNotHere,
    ProfileKwargs,
    refuse_plugins,
    refuse_plugins_of_the_environment,
)
from nbaccel.train.step.precision import restore_forward
from nbaccel.train.step.raw_loop_hooks import step_back, step_under_way
from nbaccel.train.step.recompute import recompute_activations
from nbaccel.train.strategies.fsdp_options import FullyShardedDataParallelPlugin
from nbaccel.train.strategies.single import plainly_named
from nbaccel.train.tracker_hub import LogWith, Trackers, TrackingPlan

if TYPE_CHECKING:
    from nbaccel.features.batch_size.estimate import MemoryEstimate
    from nbaccel.features.batch_size.planner import BatchSizePlanner
    from nbaccel.features.map import Answers
    from nbaccel.features.micro_batches.forward_backward import StepRecovery
    from nbaccel.train.oom.memory.meters import PeakGauge

__all__ = ["Accelerator"]


class Accelerator(ProcessControl):
    """Trains one model on every process of the run, with the loop written as for one.

    How it computes:

    mixed_precision: "no", "fp16" or "bf16"; by default the launch's choice, else "no".
    gradient_accumulation_steps: batches per optimizer step; by default the launch's choice, else 1.
    gradient_accumulation_plugin: that number and the other rules of accumulation, instead of the number.
    cpu: stay on the CPU although there are devices.
    device_placement: move prepared models and batches to the device.
    step_scheduler_with_optimizer: prepared schedulers move with the optimizer; otherwise when they are called.
    dynamo_backend: compile prepared models by this backend of ``torch.compile``, such as "inductor"; by default the
        launch's choice, else none.
    dynamo_plugin: the backend and its other options, as a `TorchDynamoPlugin`, instead of the name.
    kwargs_handlers: options for DDP, GradScaler, autocast, the process group and the profiler, one of each at most.
    on_nan: the reaction to a loss that is not finite. "warn" warns once, with step and rank; "skip" leaves out
        steps whose gradients are not finite, on all ranks alike; "stop" raises FloatingPointError before such a step.
        The latter two wait for the device in every step.

    How the model is distributed:

    strategy: "ddp", by which every rank holds the whole model; "fsdp", by which each holds a part of it; "single", the
        one process that a run may have; or another one that is installed. By default the launch's choice, else "auto":
        "ddp" or "single".
    fsdp_plugin: options of "fsdp", as a `FullyShardedDataParallelPlugin`; it chooses that strategy as well.

    How batches are distributed:

    split_batches: a loader's batch is that of all ranks together, instead of each rank's.
    even_batches: fill the last round up with the first samples, so that all ranks see equally many batches.
    dataloader_config: these two and other options, as a `DataLoaderConfiguration`, instead of them.
    rng_types: accepted with a warning: the order of samples is the same on all ranks in any case.

    What is kept:

    checkpoint_every: save in the background every so many steps (500, "500steps") or so much time ("10min").
    checkpoint_dir: folder for these checkpoints, ``checkpoint_<step>``; by default ``nbaccel_checkpoints`` where the
        program runs.
    keep: how many of them stay, the newest; by default 3.
    resume: continue from the newest checkpoint in `checkpoint_dir` (True), or from that of a path, which is only read.
    time_limit: end the run in order this long after now ("11h30m", or seconds): before the next step, on all ranks,
        with a last checkpoint where `checkpoint_every` saves. The run's `--time-limit` ends it too, if that is earlier.
    on_save_error: the reaction to a checkpoint that cannot be written: "raise" raises `CannotSave`, "warn" lets the
        training continue with a warning.
    log_with: trackers for what is logged: "jsonl", "csv", "tensorboard", "wandb", "mlflow", "all", objects of one's
        own, or several of those.
    project_dir: folder for the files of trackers, and for checkpoints that `save_state` names by itself.
    project_config: this folder and other options, as a `ProjectConfiguration`.

    >>> accelerator = Accelerator()
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with accelerator.accumulate(model):
    ...     accelerator.backward(model(torch.ones(4, 2)).mean())
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    # Programs ask how a model is distributed before they take another way, which is none of these here.
    deepspeed_plugin: None = None
    fp8_backend: None = None
    parallelism_config: None = None
    torch_device_mesh: None = None
    is_composable_parallelism_enabled = False
    tensor_parallel_rank = 0
    pipeline_parallel_rank = 0
    context_parallel_rank = 0
    data_parallel_shard_rank = 0

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        accelerator = super().__new__(cls)
        accelerator._made_with = args, kwargs
        return accelerator

    def __init__(
        self,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        split_batches: bool = False,
        step_scheduler_with_optimizer: bool = True,
        device_placement: bool = True,
        even_batches: bool = True,
        log_with: LogWith = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        on_nan: str = "warn",
        on_save_error: str = "raise",
        checkpoint_every: str | int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep: int | None = None,
        resume: bool | str | os.PathLike[str] | None = None,
        time_limit: str | float | timedelta | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        rng_types: Sequence[str] | None = None,
        strategy: str | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **not_here: Unpack[PluginsNotHere],
    ) -> None:
        if not_here:
            refuse_plugins(not_here, signature(Accelerator.__init__).parameters)
        refuse_plugins_of_the_environment()
        if on_save_error not in ON_SAVE_ERROR:
            raise ValueError(f"on_save_error must be 'raise' or 'warn', got {on_save_error!r}")
        if rng_types is not None:
            warn_of_rng_types(rng_types)
        limit_s = None if time_limit is None else seconds_of(time_limit)
        saves = chosen_saves(checkpoint_every, checkpoint_dir, keep, resume)
        asked = RunSettings(mixed_precision, gradient_accumulation_steps, cpu=cpu, strategy=strategy).over(saves)
        choices = Choices.of(
            asked, gradient_accumulation_plugin, kwargs_handlers, dynamo_backend, dynamo_plugin, on_nan, fsdp_plugin
        )
        self._handlers = choices.handlers
        self.dataloader_config = DataLoaderConfiguration.chosen(dataloader_config, split_batches, even_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        # A launcher that runs several configurations gives each a folder.
        directory = CheckpointDirectory.chosen(project_config, project_dir, RunSettings.from_env().project_dir)
        self._trackers = Trackers(log_with)
        self.last_free: Freed | None = None
        self.state = AcceleratorState(mixed_precision, cpu, **self._handlers.group.to_kwargs())
        context = self._context = TrainingContext(self.state, device_placement)
        say = Weakly(self._say)
        self._checkpoints = Checkpoints(context, directory, on_save_error, Weakly(self._unwrap), say)
        self._resuming = ResumePolicy(context, self._checkpoints, limit_s, say)
        self._preparer = Preparer(context, self._checkpoints.agree_on_names, guarded_step)
        self._gradients = GradientControl(context)
        self._lifecycle = Lifecycle(choices, context, self._checkpoints, self._resuming)
        self._lifecycle.bind()
        self._checkpoints.look_at_project_dir()

    # -- who and where

    @property
    def world(self) -> World:
        return self.state.world

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def collectives(self) -> Collectives:
        return self.state.collectives

    def _step_under_way(self) -> int:
        unprepared = step_under_way()
        return self._context.accumulation.clock.step if unprepared is None else unprepared

    @property
    def mixed_precision(self) -> str:
        self._lifecycle.bind()
        return self._context.settings.mixed_precision or "no"

    @property
    def device_placement(self) -> bool:
        """True if prepared models and batches move to the device; may be changed, for what is prepared afterwards."""
        return self._context.moves

    @device_placement.setter
    def device_placement(self, moves: bool) -> None:
        self._context.moves = moves

    # -- accumulation, as it was chosen

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step. Inside a block of `accumulate`: the number by which `backward` divides the loss.

        There it is the length of the window, so that of a short last one too: ``loss *
        accelerator.gradient_accumulation_steps`` takes the division back exactly, for sums that the program divides
        itself. Where the length is not known before the last batch has come (a stream), a window in which this was
        read is divided by the same number to its end.
        """
        accumulation = self._lifecycle.accumulation
        return accumulation.tell_divisor() if accumulation.depth else accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._lifecycle.choose_steps(steps)

    # -- values of all ranks

    @property
    def gradient_state(self) -> GradientState:
        """The state of the accumulation, for programs that read it."""
        return GradientState(self._lifecycle.accumulation)

    def _last_round(self) -> LastRound:
        loader: PreparedLoader | None = self._context.accumulation.window.source
        if loader is None:
            return LastRound()
        if loader.may_be_uneven:
            loader.refuse_to_gather()
        window, samples = self._context.accumulation.window, loader.remainder
        if not (window.is_last and samples > 0):
            return LastRound(loader.may_be_uneven)
        real, of_rank = window.real(samples, self.num_processes), window.held(loader.rank_samples)
        held = None if of_rank is None else of_rank * self.num_processes
        return LastRound(loader.may_be_uneven, held, real, self.num_processes)

    def _counts_nothing(self) -> bool:
        return self._context.accumulation.window.is_repeated

    def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        setup: Callable[[Accelerator], Any] | None = None,
        out: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        key: Any = None,
        overwrite: bool = False,
        tries: int = 3,
        retry_failed: bool = False,
    ) -> Answers:
        """Return the answers of `function` to all items, computed by all ranks. Every rank calls it, and gets all.

        It is `nbaccel.map` inside of a run: see there for the arguments, for items that fail, and for what belongs to
        `out`; where ranks read other values, those of rank 0 count. The ranks claim chunks from files beside `out`, the
        longest items first, and wait for each other only at the beginning and at the end. If a rank dies, the others
        take its items; whether the run goes on then is the launcher's matter.

        Each rank calls the function as often as it has items for it: prepared models that are replicated may be used in
        it, with the buffers that rank 0 has at the beginning; models in shards (FSDP) and other collectives may not.

        items: the same in all ranks, and no prepared loader, which has a part of the data in each. The first ones are
            compared; a stream is read by one rank afterwards.
        setup: called once in each rank, with this Accelerator.

        Raises:
            ValueError: the ranks have different items.  CollectiveMismatch: the function waits for other ranks.

        >>> from nbaccel import Accelerator
        >>> Accelerator().map(lambda texts: [text.upper() for text in texts], ["a", "b"])
        ['A', 'B']
        """
        if (swept := RunSettings.from_env().swept_values) is not None:  # answers of its model are not those of another
            key = {"key": key, "run": swept}
        answers: Answers = feature("Accelerator.map")(
            self, function, items, setup, out, self._apart, batch_size=batch_size, key=key,
            overwrite=overwrite, tries=tries, retry_failed=retry_failed,
        )  # fmt: skip
        return answers

    def _apart(self) -> AbstractContextManager[Any]:
        """Return a block in which prepared models that are replicated wait for no other rank."""
        models = self._context.prepared.models
        return self._context.strategy.apart(models, self.collectives) if models else nullcontext()

    # -- a step

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends a step: its backward synchronises, and optimizers step.

        Set it in programs that decide that for the current batch themselves.
        """
        return self._context.accumulation.window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self._context.accumulation.window.sync = sync

    @property
    def step(self) -> int:
        """Batches of the open window with the current one; 0 at the one that ends it, and where each batch is a step.

        Accelerate continues to count after the window: its ``accelerator.step %
        accelerator.gradient_accumulation_steps`` is this number.
        """
        return self._context.accumulation.window.position

    def accumulate(self, *models: Module) -> AbstractContextManager[None]:
        """Return a block for one batch of an accumulation window; gradients synchronise at the window's last batch.

        That batch is the current one at the block's first backward, whether it was taken before the block or inside it.
        The last batch of a prepared loader ends its window, unless the `GradientAccumulationPlugin` says otherwise.
        Batches of several loaders that the same models train on in turn share one window; the last batch of any of
        these loaders ends it. Models that have a block each on the same batch have windows of their own. Without
        `models` the block is for all prepared ones.
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("accumulate", models)
        block = self._context.accumulating  # without a part between: every call counts where a step is short
        block.models = models or self._context.prepared.models
        return block

    def no_sync(self, model: Module | None = None, *models: Module) -> AbstractContextManager[None]:
        """Let backward leave gradients unsynchronised while entered, for windows that the program counts itself.

        model, models: the models concerned; None for all prepared ones.
        """
        named = models if model is None else (model, *models)
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("no_sync", named)
        return self._gradients.no_sync(named)

    def hold_gradients(self, model: Module) -> AbstractContextManager[None]:
        """Return `no_sync` for trainings that exchange parameters instead: the steps inside count as steps."""
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("hold_gradients", [model])
        return self._gradients.hold(model)

    def trigger_sync_in_backward(self, model: Module) -> AbstractContextManager[None]:
        """Let backward synchronise all gradients of `model` while entered, also of forwards made under `no_sync`.

        For several forwards whose backwards come later: the last backward must synchronise. Collective.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> with accelerator.no_sync(model):
        ...     losses = [model(torch.ones(1, 1)).sum() for _ in range(2)]
        ...     accelerator.backward(losses[0])
        >>> with accelerator.trigger_sync_in_backward(model):
        ...     accelerator.backward(losses[1])
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("trigger_sync_in_backward", [model])
        return self._context.strategy.sync_in_backward(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward()``, scaled for fp16 and divided by the length of the accumulation window.

        A loop that calls ``loss.backward()`` itself trains too, without these two: its steps are counted where a
        prepared optimizer takes them, and a warning says what is missed. Under fp16, and while batches come in parts,
        it is refused.

        kwargs go to ``loss.backward``. A loss that is NaN or infinite is reported, see `Accelerator`'s `on_nan`.
        Collective at a window's end.
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("backward")
        # Not in a part, whose calls would cost in every step and would be lines of every traceback.
        context = self._context
        accumulation = context.accumulation
        window = accumulation.window
        divisor = accumulation.enter_backward()
        reports.record_loss(context.watch.see(loss), accumulation.clock.step)
        if divisor != 1:
            loss = loss / divisor
        if context.precision.scales:
            loss = context.precision.scale(loss)
        context.strategy.backward(loss, **kwargs)
        if window.sync and not accumulation.is_held:
            accumulation.clock.train()
        elif window.comes_in_parts:
            window.after_backward()

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Refuse LOMO, which steps inside of its backward, before ranks could exchange gradients.

        Raises:
            NotImplementedError: always; names an alternative.
        """
        raise NotImplementedError(
            "accelerator.lomo_backward: nbaccel does not train with LOMO, which steps inside of its backward. In one "
            "process call optimizer.fused_backward(loss, learning_rate) yourself; else use accelerator.backward(loss) "
            "with an optimizer of small state, such as torch.optim.Adafactor."
        )

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None, *, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Return the context of the run's precision, for code outside of a prepared model's forward; it nests.

        autocast_handler: options of this block; by default those of ``kwargs_handlers``.
        enabled: False is short for ``AutocastKwargs(enabled=False)``.

        >>> from nbaccel import Accelerator
        >>> with Accelerator(mixed_precision="bf16").autocast():
        ...     torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype
        torch.bfloat16
        """
        self._lifecycle.equip()
        if autocast_handler is None and not enabled:
            autocast_handler = AutocastKwargs(enabled=False)
        return self._context.precision.autocast(autocast_handler)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with ``mixed_precision="fp16"``; it is updated before the first loss after a step.

        A program may set its own scaler, between two steps.
        """
        self._lifecycle.equip()
        return getattr(self._context.precision, "scaler", None)

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._lifecycle.equip()
        self._context.precision.take_scaler(scaler)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale the gradients of `optimizer` (one, several, or None for all prepared ones).

        Only fp16 scales them. They are unscaled once per step, however often this is called; clipping does it too. Call
        it where `sync_gradients` is true.
        """
        self._lifecycle.equip()
        self._gradients.unscale(optimizer)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of the whole window to `max_norm`; return their norm before, a 0-d tensor.

        Inside a window, where gradients are not complete, nothing is clipped; the norm so far is returned.
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("clip_grad_norm_")
        return self._gradients.clip_norm(parameters, max_norm, norm_type, self.sync_gradients)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient of the whole window to +-`clip_value`; inside a window nothing happens."""
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("clip_grad_value_")
        self._gradients.clip_values(parameters, clip_value, self.sync_gradients)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any prepared optimizer was left out: infinite fp16 gradients, or `on_nan`."""
        return any(optimizer.step_was_skipped for optimizer in self._context.prepared.optimizers)

    def forward_backward(
        self,
        loss_fn: Callable[[Any], Tensor],
        batch: Any,
        weight: str | Callable[[Any], float] = "samples",
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        split_fn: SplitFunction | None = None,
        samples: int | None = None,
    ) -> Tensor:
        """Run forward and backward of `batch`, in micro-batches that fit into memory; the effective batch is the same.

        It replaces the forward and `backward`; clipping, accumulation, the optimizer and the scheduler
        do not change. A rank that runs out of memory continues in smaller micro-batches; its peers wait in the
        exchange of gradients, as they would in any case. Sizes grow back after 200 batches that fitted. Each rank
        has its own. Of a sharded model (FSDP) every forward waits for all ranks: there all ranks repeat the batch, in
        as many micro-batches as the one that needs most (on CPUs; on GPUs that is refused until it has been seen).

        loss_fn: ``loss_fn(micro_batch)`` runs the prepared model and returns the mean loss, one element. It is called
        once per micro-batch, again for those that did not fit; it changes nothing but random generators and buffers
        of the model, which are restored before a repetition. It may not wait for other ranks.
        weight: the units of that mean: "samples"; "tokens", the entries of ``batch["labels"]`` that are not -100
        (without the first of each sequence, where the model is a causal language model of transformers); or a function
        of a batch that counts its units. With it gradients are exact for any sizes: those of one step on all samples
        of all ranks at once, sum(w * grad) / sum(w).
        micro_batch_size: no micro-batch is larger. "auto": the first batch is used for a few trial steps, each rank
            for itself, which find the largest micro-batch that fits and are undone, as in `find_batch_size`.
        samples: how many `batch` has, where its lengths allow several numbers. Without it that is the common first
            dimension of its tensors, or the length of its lists; with it, what is of another length belongs to all.
        split_fn: ``split_fn(batch, start, stop)``, with `samples`, for batches other than tensors and arrays with the
            samples in the first dimension, and lists with an entry for each, in any nesting of tuples, lists, dicts,
            mappings and dataclasses. Numbers, strings and 0-d tensors are copied into every micro-batch.

        Returns the mean loss of this rank's batch, detached, as one forward of the whole batch would give it.
        Parameters that no rank used keep ``grad`` None. BatchNorm normalises each micro-batch by itself and counts each
        sample once; all ranks get rank 0's running statistics, as under DDP. The first call frees DDP's buckets and
        makes its own; a forward with gradients outside of `forward_backward` goes back to DDP. Collective where the
        batch ends a step.

        Raises:
            torch.OutOfMemoryError: the smallest micro-batch does not fit. On all ranks, if on one: where there are
                several, in the call that ends the accumulation window; until then that rank's calls return NaN.
            PeerFailed: `loss_fn` raised on another rank in this step. There: its own error, in that call.
            CannotSplit: the batch, or the model (SyncBatchNorm, FSDP on GPUs or of its own), cannot be split.

        In none of these cases has a weight changed, and the next step works, begun on all ranks with the same batch;
        only an error in the forward or the backward of a sharded model ends its process group.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> batch = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}
        >>> with accelerator.accumulate(model):
        ...     loss = accelerator.forward_backward(
        ...         lambda b: torch.nn.functional.mse_loss(model(b["x"]), b["y"]), batch
        ...     )
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        step_back()
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("forward_backward")
        engine, task = self._recovery.begin(loss_fn, batch, weight, micro_batch_size, split_fn, samples)
        loss = engine.run(task)
        clock = self._context.accumulation.clock
        if not engine.is_unfit:
            reports.record_loss(self._context.watch.see(loss), clock.step)
        if task.ends_step:
            clock.train()
        return loss

    @cached_property
    def _recovery(self) -> StepRecovery:
        recovery: StepRecovery = feature("Accelerator.forward_backward")(self._context)
        return self._lifecycle.attached(recovery)

    # -- what a program prepares

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool] | None = None,
        device_map: str | Mapping[str, Any] | None = None,
    ) -> Any:
        """Return models, optimizers, loaders and schedulers prepared for this run, in the order given; collective.

        Other objects are returned unchanged, and so is what is prepared already. One argument gives one object.
        device_placement: for each object, whether to move it to the device.
        device_map: places for the parts of the one model of this call, as `dispatch_model` takes them, or "auto". What
            waits on the host or on the disk cannot be trained; adapters beside it can. With several processes and no
            optimizer in the call the model is for inference, as by `prepare_model` with evaluation_mode: it keeps its
            methods (``model.generate``).
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(objects)} objects")
        self._lifecycle.join()
        if device_map is not None:
            self._place(objects, device_map)
        moves = device_placement or [self.device_placement] * len(objects)
        prepared = self._preparer.prepare(objects, moves, self.dataloader_config, self._scheduler_moves)
        self._refuse_waiting([thing for thing in objects if isinstance(thing, Optimizer)])
        self._resuming.resume_if_complete()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Module:
        """Return `model` on the device, in the run's precision and strategy. Collective where there are peers.

        device_placement: whether to move it; by default the Accelerator's choice. Quantised models and those
        on several devices are not moved.
        evaluation_mode: for inference only: gradients will not synchronise, and no rank waits for another.

        Raises:
            ValueError: the model is spread over several devices, and there are several processes.
        """
        self._lifecycle.join()
        move = self.device_placement if device_placement is None else device_placement
        prepared = self._preparer.prepare_model(model, move, evaluation_mode)
        self._resuming.resume_if_complete()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Return `optimizer` as one that steps when gradients are synchronised. Every rank calls it.

        device_placement: accepted as by Accelerate; an optimizer's state follows its parameters.
        """
        self._lifecycle.join()
        prepared = self._preparer.prepare_optimizer(optimizer)
        self._refuse_waiting([optimizer])
        self._resuming.resume_if_complete()
        return prepared

    def _place(self, objects: Sequence[Any], device_map: str | Mapping[str, Any]) -> None:
        """Put the model of `objects` where `device_map` says; with several ranks prepare it if it is for inference."""
        trainers = [thing.optimizer for thing in self._context.prepared.optimizers]
        shards = self._context.strategy.forwards_are_collective
        place_for_rank = feature("Accelerator.prepare(device_map=...)")
        model = place_for_rank([*objects, *trainers], device_map, self.world, self.device, shards)
        if model is not None:
            self._preparer.prepare_model(model, move=False, evaluation_mode=True)

    def _refuse_waiting(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers of parameters that would not be trained, or by each rank apart: see `map_of_rank`."""
        if self._context.strategy.forwards_are_collective:
            return  # a sharded model gets its numbers later, and exchanges gradients
        models = self._context.prepared.models
        if optimizers and self.world.is_distributed and any(hasattr(model, "hf_device_map") for model in models):
            feature("a model on several devices")(optimizers, models, self.world, self._context.strategy)
        parameters = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
        if any(parameter.is_meta for parameter in parameters):
            feature("a model with weights on the meta device")(optimizers, models)

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Return `scheduler` as one that moves when its optimizer steps; prepare the optimizer first. On every rank."""
        self._lifecycle.join()
        prepared: PreparedScheduler = self._preparer.prepare_scheduler(scheduler, self._scheduler_moves)
        self._resuming.resume_if_complete()
        return prepared

    @property
    def _scheduler_moves(self) -> int:
        """Return how often a prepared scheduler moves when its optimizer steps; 0 where it moves by its own calls."""
        if not self.step_scheduler_with_optimizer:
            return 0
        return 1 if self.split_batches else self.num_processes

    # -- data

    @property
    def split_batches(self) -> bool:
        """True if a loader's batch is that of all ranks together, instead of each rank's."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all ranks; None: for streams only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if the last round is filled up, for loaders that are prepared from now on; may be changed."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.dataloader_config = replace(self.dataloader_config, even_batches=even)

    @property
    def use_seedable_sampler(self) -> bool:
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self.dataloader_config.use_stateful_dataloader

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: SliceFunction | None = None,
    ) -> PreparedLoader:
        """Return `data_loader` as this rank sees it: its share of the batches, on its device. Collective.

        In rounds of one batch per rank, rank r gets batches r, r + n, r + 2n, ...; the last round is filled up with the
        first samples. See `DataLoaderConfiguration` for other ways.

        device_placement: whether batches are moved to the device; by default the Accelerator's choice.
        slice_fn_for_dispatch: where rank 0 reads for all, cuts a round's whole batch for one rank:
        ``slice_fn(batch, data_slice, process_index=r, num_processes=n)``; called on rank 0.

        Raises:
            ValueError: an empty dataset, ranks with different datasets, or a batch size that cannot be split.

        >>> from nbaccel import Accelerator
        >>> loader = Accelerator().prepare_data_loader(DataLoader(range(4), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
        """
        self._lifecycle.join()
        move = self.device_placement if device_placement is None else device_placement
        prepared = self._preparer.prepare_loader(data_loader, move, self.dataloader_config, slice_fn_for_dispatch)
        self._resuming.resume_if_complete()
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return `dataloader` without this rank's first `num_batches`; its length shrinks by as many. On every rank.

        The order is that of the same epoch without it, and epochs are counted in `dataloader` itself. It replaces a
        position that `load_state` has set.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare(DataLoader(range(6), batch_size=2))
        >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
        [[4, 5]]
        """
        rest: DataLoader[Any] = skip_first_batches(dataloader, num_batches)
        return rest

    def total_steps(self, loader: DataLoader[Any], epochs: int = 1) -> int:
        """Return the optimizer steps of `epochs` passes over `loader`, prepared or not: each pass ends with a step.

        A prepared scheduler moves `num_processes` times per optimizer step (once with `split_batches`), so that it
        is at its end when as many batches were seen as a single process would see. The number for such a scheduler
        is `total_scheduler_steps`.

        Raises:
            TypeError: `loader` has no length.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(gradient_accumulation_steps=4)
        >>> accelerator.total_steps(DataLoader(range(20), batch_size=2), epochs=3)  # 10 batches: 4 + 4 + 2
        9
        """
        self._lifecycle.join()
        return self._preparer.total_steps(loader, epochs, self.dataloader_config)

    def total_scheduler_steps(self, loader: DataLoader[Any], epochs: int = 1) -> int:
        """Return how often a prepared scheduler moves in `epochs` passes over `loader`: the scheduler's total_steps.

        >>> from nbaccel import Accelerator
        >>> Accelerator().total_scheduler_steps(DataLoader(range(20), batch_size=2), epochs=3)
        30
        """
        return self.total_steps(loader, epochs) * (1 if self.split_batches else self.num_processes)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks with fewer batches take part in the others' last steps, with zero gradients. Collective.

        joinables: the prepared models that are trained inside, and other `Joinable` objects.
        even_batches: replaces that choice for prepared loaders inside; loaders over streams keep theirs.

        Gradients are divided by the number of ranks also in the steps for which only some have data. Collectives other
        than those of the models (`gather`, `check_trigger`, ...) must not be called inside: a rank that has joined
        does not answer them. In one process nothing happens.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> with accelerator.join_uneven_inputs([model], even_batches=False):
        ...     pass
        """
        return self._preparer.joined(joinables, even_batches)

    # -- what a program writes, and continues from

    def get_state_dict(self, model: Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state dict, without prefixes of DDP and ``torch.compile``. Tensors are not copied.

        Its names are those of a model of which nothing is compiled, also where a part is.

        Of a sharded model, the tensors are gathered into the host memory of rank 0 (of each node, with
        `save_on_each_node`), one at a time, and other ranks get an empty dict. Collective then.
        unwrap: False returns that of the module as it is.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> list(accelerator.get_state_dict(model))
        ['weight', 'bias']
        """
        if not unwrap:
            return model.state_dict()
        strategy = self._lifecycle.training().strategy
        state = whole_state(strategy.unwrap(model), strategy.state_dict(model), keeps=self._checkpoints.writes)
        return plainly_named(state)

    def save_model(
        self,
        model: Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write `model` as Hugging Face libraries expect it: ``model.safetensors``, or shards and their index.

        Rank 0 writes; the others do nothing, but every rank calls it where the model is sharded: its tensors are
        gathered, one at a time, into rank 0's host memory. `nbaccel.utils.load_model` reads it, and so does
        ``from_pretrained`` where there is a config.json beside it.
        Of a quantised model with adapters, the trained tensors are written: its base stays in the files it came from.
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
        state = self._checkpoints.without_base(model, self.get_state_dict(model))
        if self._checkpoints.writes:
            save_weights(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False, *, save_on_each_node: bool = False) -> None:
        """Call ``torch.save(obj, f)`` on the main process only; a path is written under a temporary name and renamed.

        save_on_each_node: on the first rank of each node.
        safe_serialization: `obj` is a dict of tensors; write it as safetensors.

        Raises:
            CannotSave: no space, or no right to write there; or `obj` holds sharded tensors, as ``model.state_dict()``
                of a sharded model does, of which a rank has its own rows only.
        """
        obj = unsharded(obj, "accelerator.save")
        if self._checkpoints.writes or (save_on_each_node and self.is_local_main_process):
            write_object(obj, f, safe_serialization)

    # -- folders of the project

    @property
    def project_configuration(self) -> ProjectConfiguration:
        return self._checkpoints.directory.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._checkpoints.directory.project = project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        return self._checkpoints.directory.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the trackers' files; the project's folder unless another one was chosen."""
        return self._checkpoints.directory.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self._checkpoints.directory.project.iteration

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
        derived at load). All ranks call it where the model is sharded, since each writes its rows: rank 0 commits the
        checkpoint once all are on the disk, or all ranks raise the same error. Blocks these ranks until the disk has
        it; a checkpoint of that name is replaced, and the older one deleted only after that.

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
        self._lifecycle.equip()
        return self._checkpoints.save_state(output_dir, blocking, save_model_func_kwargs)

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
        self._lifecycle.join()
        self._checkpoints.load_state(input_dir, load_kwargs or {}, trust, load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add `objects` to what `save_state` and `load_state` handle, in this order. Every rank calls it.

        Raises:
            ValueError: one of them lacks `state_dict` or `load_state_dict`; nothing is registered then.

        >>> from nbaccel import Accelerator
        >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
        >>> Accelerator().register_for_checkpointing(average)
        """
        self._checkpoints.registered.add(objects)

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
        return self._checkpoints.registered.add_hook(self._checkpoints.registered.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, folder)`` in every `load_state`, on every rank, before anything is loaded.

        models: the program's own, as it passed them to `prepare`; those that the hook removes from the list are not
        loaded by nbaccel.
        Returns a handle whose `remove()` removes the hook.

        >>> from nbaccel import Accelerator
        >>> handle = Accelerator().register_load_state_pre_hook(lambda models, folder: models.clear())
        >>> handle.remove()
        """
        return self._checkpoints.registered.add_hook(self._checkpoints.registered.load_hooks, hook)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield ``range(count)`` for epochs; after a resume begin at the epoch that was in progress. On every rank.

        Its training loader continues where it was, so the loop is written as if nothing had happened. An epoch is done
        when its training loader is exhausted and no loader is being iterated: a checkpoint that is written then
        resumes at the next one. What follows the training in an epoch (an evaluation) is repeated if it was not over.

        >>> from nbaccel import Accelerator
        >>> list(Accelerator().epochs(3))
        [0, 1, 2]
        """
        return self._checkpoints.epochs.run(count, self._lifecycle.accumulation)

    def remember(self, **defaults: Any) -> Remembered:
        """Keep values of the program's own in checkpoints too; return them as attributes. Every rank calls it.

        A value that a loaded checkpoint has, or an earlier call gave, stays; the checkpoint is that of rank 0. Plain
        data and tensors: anything else becomes a pickle, as with `register_for_checkpointing`.

        >>> from nbaccel import Accelerator
        >>> memory = Accelerator().remember(best=0.0, history=[])
        >>> memory.best = max(memory.best, 0.9)
        >>> memory.history.append(0.9)
        """
        self._checkpoints.remembered.keep(**defaults)
        return self._checkpoints.remembered

    # -- what a program reports

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers that were chosen, as the program named them; set it before `init_trackers`."""
        return list(self._trackers.chosen)

    @log_with.setter
    def log_with(self, log_with: LogWith) -> None:
        self._trackers.choose(log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers of this process; empty before `init_trackers` and on ranks that do not track.

        A program may set trackers that it has opened itself.
        """
        return self._trackers.opened(self.is_main_process)

    @trackers.setter
    def trackers(self, trackers: Sequence[GeneralTracker]) -> None:
        self._trackers.adopt(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers of ``log_with``, on rank 0. Every rank may call it; no rank waits for another.

        config: hyperparameters to keep with the run.
        init_kwargs: options for each tracker's library, by the tracker's name: ``{"wandb": {"tags": ["first"]}}``.

        A process that was forked or unpickled from this one opens them again at its first `log`.

        Raises:
            ModuleNotFoundError: a tracker's package is not installed; the message is the command that installs it.
            ValueError: a tracker writes files, and there is no ``project_dir``.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(log_with="jsonl", project_dir="runs")
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        """
        plan = TrackingPlan(project_name, dict(config or {}), dict(init_kwargs or {}), self.logging_dir)
        self._trackers.open(plan, self.is_main_process)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        average: bool = False,
    ) -> None:
        """Report numbers: this rank's to the notebook, rank 0's to the trackers.

        values: numbers, strings or tensors by name. None is no value, and trackers do not get it. Tensors are detached
            and do not make the step wait: a tensor on a GPU is copied in its stream and read when the copy has
            arrived, once, at the latest at the end.
        step: the step of the row; by default the current optimizer step (wandb then counts by itself).
        log_kwargs: more arguments for a tracker by its name, ``{"wandb": {"commit": False}}``.
        average: report the mean of all ranks of every number and one-element tensor. Collective then: every rank
            logs the same names.

        Without `init_trackers` the values go to the notebook only. An object that is no mapping goes to the trackers
        unchanged; without trackers it is not logged, with a warning.

        >>> from nbaccel import Accelerator
        >>> Accelerator().log({"loss": torch.tensor(0.5)}, step=3)
        """
        if type(values) is not dict and not isinstance(values, Mapping):  # the abstract class's check costs a call
            self._trackers.log_as_it_is(values, step, log_kwargs or {}, self.trackers)
            return
        at = self._step_under_way() if step is None else step
        self._trackers.log(values, at, step, log_kwargs or {}, self.state, average)

    def phase(self, name: str) -> None:
        """Begin a phase, which is shown separately, with new curves and a new time estimate. On any rank.

        name: the name that is shown: a fold, a stage, a model of several.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> for fold in range(2):
        ...     accelerator.phase(f"fold {fold}")
        """
        emit(Phase(name))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called `name`, for its own methods; on other ranks a blank one, whose calls do nothing.

        unwrap: return the object of its library instead: the `wandb.Run`, the `SummaryWriter`.

        Raises:
            ValueError: no such tracker was opened.

        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(log_with="wandb")
        >>> accelerator.get_tracker("wandb").log_artifact("model.safetensors")  # doctest: +SKIP
        """
        return self._trackers.get(name, self.trackers, unwrap) if self.is_main_process else BlankTracker()

    # -- measuring, and searching for sizes

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Profile the block; yields ``torch.profiler.profile``, whose ``step()`` ends a step of a schedule.

        profile_handler: by default the `ProfileKwargs` of ``kwargs_handlers``. With its `output_trace_dir`, rank r
        writes ``profile_{r}.json`` there and all ranks wait for each other at the end: collective then.

        >>> from nbaccel import Accelerator
        >>> with Accelerator().profile() as profiler:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> any(row.key == "aten::mm" for row in profiler.key_averages())
        True
        """
        options = profile_handler or self._handlers.profile
        return profiling(options, self.process_index, self.wait_for_everyone)

    def find_batch_size(
        self,
        loss_fn: Callable[[Any], Tensor],
        example: Any,
        *,
        max_batch_size: int = 4096,
        cache: str | os.PathLike[str] | None = None,
        meter: PeakGauge | None = None,
    ) -> int:
        """Return the largest batch per rank whose training step fits in memory, on every rank. Collective.

        Runs some four to eight trials of two whole steps each, forward, backward and optimizer; most searches never
        run out of memory. Afterwards models, optimizers and random generators are bit by bit as before, and no loader
        has moved. The size returned was run on every rank, whatever the prediction said; it is within about 3 % of
        the largest possible one, and a multiple of eight where that costs nothing.

        Of a sharded model all ranks run each trial together, so running out of memory in one is an error. The sizes
        tried are those that the trial before shows to fit; there are more of them, and the last takes some 95 %.

        loss_fn: from a batch on this rank's device to its loss, ``lambda batch: F.cross_entropy(model(batch[0]),
            batch[1])``, with prepared models. State that it keeps itself is not restored.
        example: the loader that will train, of which some hundred samples are read to find the longest ones; or one
            batch. A sample longer than those can still be too large: see `forward_backward`, which survives it.
        max_batch_size: the largest useful size, such as a rank's share of a small dataset.
        cache: a folder where sizes are kept from run to run. Without it they are kept as long as this Accelerator.
            A size found before is tried once more instead of searched for.
        meter: measures memory, instead of the device's own measure: torch's allocator on CUDA; on the CPU the
            `nbaccel.testing.MemLimit` that is entered, else the bytes of tensors, against ``ulimit`` and 80 % of the
            free memory, which does not see everything: leave some memory free there. Where nothing can be measured
            (mps), sizes are tried until one does not fit, which takes more trials.

        Raises:
            torch.OutOfMemoryError: not even one sample fits; gives the memory one needs, and the limit. On every rank.
            NotPrepared: no model or no optimizer is prepared; both are part of what has to fit.
            PeerFailed: `loss_fn` failed on another rank.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> from nbaccel.testing import MemLimit
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 1))
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> with MemLimit(2_000_000) as memory:  # a small device
        ...     memory.count(model)
        ...     accelerator.find_batch_size(lambda x: model(x).mean(), torch.ones(8, 4))
        157
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("find_batch_size")
        return self._planner.find(loss_fn, example, max_batch_size, cache, meter)

    def estimate(
        self,
        model: Module,
        optimizer: Optimizer | type[Optimizer] | str = "AdamW",
        batch: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        ranks: Sequence[int] = (),
    ) -> MemoryEstimate:
        """Return the memory that training `model` takes on one rank, by strategy and number of ranks; prints a table.

        Nothing is computed, no device is used and no rank waits for another. Its last sentence names the strategy of
        the least communication that fits on the devices of this machine, or says what would.

        model: prepared or not, also on the meta device.
        optimizer: one of the model, prepared or not; or a class, or the name of one in ``torch.optim``.
        batch: an example, with as many samples as a rank will get; without it activations are not counted.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; it gets a copy of the model whose tensors have no memory.
            Without it the model is called as ``model(**batch)`` or ``model(inputs)``.
        ranks: the numbers of ranks; by default those of this run or its devices, and twice as many.

        Raises:
            ValueError: there is no optimizer of that name, or the model has parameters without a shape.

        >>> from nbaccel import Accelerator
        >>> model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10))
        >>> estimate = Accelerator().estimate(model, "AdamW", torch.ones(8, 1000), ranks=[2])
        >>> estimate.of("fsdp", 2).peak < estimate.of("ddp", 2).peak
        True
        """
        self._lifecycle.equip()
        setting = {
            "mixed_precision": self.mixed_precision,
            "views": self._handlers.ddp.gradient_as_bucket_view,
            "keeps": self.gradient_accumulation_steps > 1,
            "policy": getattr(self._context.strategy, "group_policy", None),
            "device_type": self.device.type,
        }
        inner = self.unwrap_model(model, keep_torch_compile=False) if isinstance(model, Module) else model
        own = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        counts = list(ranks) or ([self.num_processes, 2 * self.num_processes] if self.use_distributed else [])
        estimate: MemoryEstimate = feature("Accelerator.estimate")(inner, own, batch, loss_fn, counts, setting)
        return estimate

    @cached_property
    def _planner(self) -> BatchSizePlanner:
        planner: BatchSizePlanner = feature("Accelerator.find_batch_size")(self._context)
        return planner

    # -- models, memory, the end

    def gradient_checkpointing(self, model: Module, blocks: Iterable[Module] | None = None) -> Module:
        """Let `model` compute activations again in its backward instead of keeping them; return the same `model`.

        A model that can do so itself (transformers) is told to. In others each of `blocks` is recomputed as a
        whole: by default the members of their outermost ``ModuleList``s and
        ``Sequential``s. Before or after `prepare`; works with DDP and accumulation, since nothing is reentrant.

        Raises:
            ValueError: no blocks were given, and none were found.
        """
        self._lifecycle.equip()
        recompute_activations(self._context.strategy.unwrap(model), blocks)
        return model

    def verify_device_map(self, model: Module) -> bool:
        """Return whether `model`, or a module in it, is on several devices, as with ``device_map="auto"``."""
        return any(is_spread(module) for module in model.modules() if hasattr(module, "hf_device_map"))

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Module:
        """Return the user's own module, without DDP and ``nn.DataParallel``; `model` itself does not change.

        keep_fp32_wrapper: False also removes autocast from the module's forward, permanently.
        keep_torch_compile: return a compiled model compiled; False returns the bare module, whose state has no
        ``_orig_mod.`` in its names.
        """
        self._lifecycle.equip()
        inner = extract_model_from_parallel(self._context.strategy.unwrap(model), keep_torch_compile=False)
        if not keep_fp32_wrapper:
            restore_forward(inner)
        return keep_compiled(model, inner) if keep_torch_compile else inner

    def _unwrap(self, model: Module, keep_torch_compile: bool) -> Module:
        return self.unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def _say(self, line: str) -> None:
        self.print(line)

    def free_memory(self, *objects: Any, history: bool = False) -> list[None]:
        """Forget everything prepared and release what nothing needs any more; return one None per object.

        Only what the program registered (`register_for_checkpointing`, hooks) or asked to `remember` stays. Objects
        that a failed cell had made are released too. `last_free` lists what is still held, and by which names.
        history: also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.

        >>> model = optimizer = None
        >>> model, optimizer = Accelerator().free_memory(model, optimizer)
        """
        self._lifecycle.forget()
        self.last_free = free(objects, history)
        return [None] * len(objects)

    def clear(self, *objects: Any, history: bool = False) -> list[None]:
        """Call `free_memory`; a second name for it."""
        return self.free_memory(*objects, history=history)

    def end_training(self) -> None:
        """Finish the trackers, forget everything prepared and leave the process group. Every rank calls it.

        A later use forms a new group.
        """
        self._trackers.finish()
        self._lifecycle.forget()
        self.state.destroy_process_group()

    def destroy_process_group(self) -> None:
        """Leave the process group that we made; a later use forms a new one. Every rank calls it.

        Sharded models that are prepared become whole again first, on every rank, and can be prepared in another way.
        """
        self._lifecycle.release()
        self.state.destroy_process_group()

    # -- answers to programs that ask how a model is distributed; they read and change the private lists too

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of cooperation of the processes: ``DistributedType.FSDP``, or that of replicas on their devices."""
        self._lifecycle.bind()
        own = self._context.strategy_class.distributed_type
        return super().distributed_type if own is None else DistributedType(own)

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded by FSDP, of which there is the second version only."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def data_parallel_rank(self) -> int:
        return self.process_index

    @property
    def multi_device(self) -> bool:
        """True if there are several processes with a device each."""
        return self.use_distributed and self.distributed_type != DistributedType.MULTI_CPU

    @property
    def should_save_model(self) -> bool:
        """True if this process writes whole models: the first of each node."""
        return self.is_local_main_process

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Return a block in which nothing changes: sequences are not split over the ranks."""
        return nullcontext()

    @property
    def _models(self) -> list[Any]:
        return self._context.prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self._context.prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._context.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._context.prepared.loaders

    def __nbaccel_anew__(self) -> tuple[Any, ...]:
        """Return how the notebook makes an Accelerator like this, with nothing prepared; for pickled results."""
        args, kwargs = self._made_with
        return _made, (type(self), args, kwargs)


def _made(kind: type[Accelerator], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Accelerator:
    return kind(*args, **kwargs)
