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
from nbaccel.train.checkpoint.checkpoint_parts import ON_SAVE_ERROR, LoadHook, SaveHook
from nbaccel.train.checkpoint.directory import CheckpointDirectory, ProjectConfiguration
from nbaccel.train.checkpoint.manager import Checkpoints
from nbaccel.train.checkpoint.resume import ResumePolicy, Weakly
from nbaccel.train.checkpoint.training_state import Remembered
from nbaccel.train.data import DataLoaderConfiguration, PreparedLoader, skip_first_batches
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.partial_state import AcceleratorState
from nbaccel.train.distributed.process_control import DistributedType, LastRound, ProcessControl
from nbaccel.train.distributed.rng import warn_of_rng_types
from nbaccel.train.lifecycle import Choices, Lifecycle
from nbaccel.train.oom.microbatch.optimizer_guard import guarded_step
from nbaccel.train.prepare.contexts import GradientState
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
from nbaccel.train.step.readings import averaged, detached, is_plain
from nbaccel.train.strategies.single import plainly_named

if TYPE_CHECKING:
    from nbaccel.features.batch_size.estimate import MemoryEstimate
    from nbaccel.features.batch_size.planner import BatchSizePlanner
    from nbaccel.features.map import Answers
    from nbaccel.features.memory.meters import PeakGauge
    from nbaccel.features.micro_batches.forward_backward import StepRecovery
    from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin
    from nbaccel.features.trackers.tracker_hub import LogWith, Trackers
    from nbaccel.train.data.dispatch import SliceFunction
    from nbaccel.train.oom.memory.free_memory import Freed
    from nbaccel.train.oom.microbatch.slicing import SplitFunction

__all__ = ["Accelerator"]


class Accelerator(ProcessControl):
    """Train one model on every process of the run, with the loop written as for one process.

    Every rank makes it with the same arguments. A choice that is left out is the launch's, if the launch made one.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; "no" where neither the program nor the launch chooses.
        gradient_accumulation_steps: Batches per optimizer step; 1 where nobody chooses.
        cpu: Stay on the CPU although there are devices.
        split_batches: A batch of a loader is for all ranks together and is cut into parts. False: each rank gets whole
            batches.
        step_scheduler_with_optimizer: Prepared schedulers move with the optimizer. False: whenever they are called.
        device_placement: Move prepared models and batches to the device.
        even_batches: Fill the last round up with the first samples, so that all ranks get equally many batches.
        log_with: Trackers for the values given to `log`: "jsonl", "csv", "tensorboard", "wandb", "mlflow", "all",
            tracker objects, or a list of these.
        project_dir: The folder for the files of trackers, and for checkpoints that `save_state` names itself.
        project_config: `project_dir` and other options of folders and names, instead of it.
        gradient_accumulation_plugin: The number of batches and the other rules of accumulation, instead of the number.
        kwargs_handlers: Options for DDP, GradScaler, autocast, the process group and the profiler, one of each at most.
        dynamo_backend: The backend of ``torch.compile`` for prepared models, such as "inductor". None does not compile.
        dataloader_config: `split_batches`, `even_batches` and the other options of loaders, instead of these two.
        on_nan: What happens at a loss that is not finite. "warn" warns once, with step and rank. "skip" leaves out
            steps whose gradients are not finite, on all ranks alike. "stop" raises FloatingPointError before such a
            step. "skip" and "stop" wait for the device in every step.
        on_save_error: What happens when a checkpoint cannot be written. "raise" raises `CannotSave`; "warn" warns, and
            the training continues.
        checkpoint_every: Save in the background at this interval: steps (500, "500steps") or time ("10min").
        checkpoint_dir: The folder of these checkpoints, which are called ``checkpoint_<step>``; by default
            ``nbaccel_checkpoints`` in the working directory.
        keep: Number of these checkpoints that are kept, the newest; 3 by default.
        resume: True continues from the newest checkpoint in `checkpoint_dir`. A path continues from the checkpoint
            there, which is only read.
        time_limit: End the run this long after now ("11h30m", or seconds), before the next step on all ranks. With
            `checkpoint_every` a last checkpoint is saved. The ``--time-limit`` of the run ends it too, if it is
            earlier.
        dynamo_plugin: The backend and its other options, instead of its name.
        rng_types: Accepted with a warning. The order of samples is the same on all ranks in any case.
        strategy: "ddp": every rank holds the whole model. "fsdp": each rank holds a part of it. "single": the run has
            one process. Or the name of a strategy that another package installs. "auto" is "ddp" or "single".
        fsdp_plugin: Options of "fsdp". It chooses that strategy as well.
        deepspeed_plugin: Options of "deepspeed", a `DeepSpeedPlugin`. It chooses that strategy as well.
        **not_here: Options of Accelerate that nbaccel does not have. Each is refused by its name.

    Example:
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with accelerator.accumulate(model):
        ...     accelerator.backward(model(torch.ones(4, 2)).mean())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    # Programs written for Accelerate read these to find out how a model is distributed. nbaccel has none of these ways.
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
        deepspeed_plugin: Any = None,
        **not_here: Unpack[PluginsNotHere],
    ) -> None:
        plugins = {"fsdp_plugin": fsdp_plugin, "deepspeed_plugin": deepspeed_plugin}
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
            asked, gradient_accumulation_plugin, kwargs_handlers, dynamo_backend, dynamo_plugin, on_nan, plugins
        )
        self._handlers = choices.handlers
        self.dataloader_config = DataLoaderConfiguration.chosen(dataloader_config, split_batches, even_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        # A launcher that runs several configurations gives each a folder.
        directory = CheckpointDirectory.chosen(project_config, project_dir, RunSettings.from_env().project_dir)
        if log_with is not None:
            self._trackers.choose(log_with)
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

    __new__.__wrapped__ = __init__  # type: ignore[attr-defined]  # so that notebooks and editors show the arguments

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
    def deepspeed_plugin(self) -> Any:
        """The options of the strategy "deepspeed"; None with another one."""
        self._lifecycle.bind()
        return self.state.deepspeed_plugin

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
        """Return the answers of `function` to all items, computed by all ranks.

        It is `nbaccel.map` inside of a run. Every rank calls it and gets all answers. The ranks claim chunks of items
        from files beside `out`, those with long items first. They wait for each other only at the beginning and at the
        end. If a rank dies, the others take its items; whether the run then continues is up to the launcher.

        Where the ranks give different values for `batch_size`, `key`, `tries` and the like, those of rank 0 count. The
        number of calls of `function` differs between ranks. So `function` may use prepared models that are replicated,
        with the buffers that rank 0 has at the beginning; it may not use sharded models (FSDP) or other collectives.

        Args:
            function: ``function(items)``, or ``function(state, items)`` with `setup`; returns a list of as many
                answers.
            items: The same on all ranks; the first ones are compared. No prepared loader, which has a part of the data
                on each rank. A stream is read by one rank.
            setup: ``setup(accelerator)``, called once on each rank with this Accelerator; returns `state`.
            out: The file or folder of the answers, as for `nbaccel.map`. None keeps them in memory.
            batch_size: The largest number of items in one call. None chooses it by time and memory.
            key: What else the answers depend on, as for `nbaccel.map`.
            overwrite: Drop answers in `out` that belong to something else.
            tries: How often an item is tried alone before its answer is a `Failed`.
            retry_failed: Try items again that failed in an earlier run.

        Raises:
            ValueError: The ranks have different items.
            CollectiveMismatch: `function` waits for other ranks.

        Example:
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
        """Return a block for one batch of an accumulation window.

        Gradients are synchronised at the last batch of the window. The batch of the block is the current one at the
        first backward inside it, whether it was taken before the block or inside. The last batch of a prepared loader
        ends its window, unless the `GradientAccumulationPlugin` says otherwise. Loaders whose batches train the same
        models in turn share one window, which ends at the last batch of any of them. Models that each have their own
        block on the same batch have their own windows.

        Args:
            *models: The models that are trained in the block; all prepared ones if none is given.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for batch in torch.ones(4, 1, 1):  # four batches, two steps
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(batch).sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("accumulate", models)
        block = self._context.accumulating  # without a part between: every call counts where a step is short
        block.models = models or self._context.prepared.models
        return block

    def no_sync(self, model: Module | None = None, *models: Module) -> AbstractContextManager[None]:
        """Return a block in which backward leaves gradients unsynchronised, for windows that the program counts itself.

        Args:
            model: A model that is concerned; None is all prepared ones.
            *models: More of them.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(1, 1)).sum())
            >>> accelerator.backward(model(torch.ones(1, 1)).sum())  # averages the gradients of both
        """
        named = models if model is None else (model, *models)
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("no_sync", named)
        return self._gradients.no_sync(named)

    def hold_gradients(self, model: Module) -> AbstractContextManager[None]:
        """Return the block of `no_sync` for trainings that exchange parameters instead: the steps inside count as
        steps.

        Args:
            model: The prepared model.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with accelerator.hold_gradients(model):
            ...     accelerator.backward(model(torch.ones(1, 1)).sum())
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("hold_gradients", [model])
        return self._gradients.hold(model)

    def trigger_sync_in_backward(self, model: Module) -> AbstractContextManager[None]:
        """Return a block in which backward synchronises all gradients of `model`, also of forwards made under
        `no_sync`.

        It is for several forwards whose backwards come later; the last of these has to synchronise. Collective.

        Args:
            model: The prepared model.

        Example:
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
        """Call ``loss.backward()``, with the loss scaled for fp16 and divided by the length of the accumulation window.

        At the end of a window it is collective. A loss that is NaN or infinite is handled as `on_nan` says. A loop that
        calls ``loss.backward()`` itself trains without the scaling and the division: its steps are counted when a
        prepared optimizer takes them, and a warning says what is missed. Such a call is refused under fp16 and while
        batches come in parts.

        Args:
            loss: The loss of this rank's batch, a tensor of one element.
            **kwargs: Arguments of ``loss.backward``.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.backward(model(torch.ones(4, 1)).mean())
            >>> model.weight.grad
            tensor([[1.]])
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
        """Refuse LOMO, whose steps happen inside of its backward, before ranks can exchange gradients.

        Args:
            loss, learning_rate: As Accelerate takes them; not used.

        Raises:
            NotImplementedError: Always. The message names an alternative.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.lomo_backward(torch.ones(1), 0.1)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            NotImplementedError: accelerator.lomo_backward: ...
        """
        raise NotImplementedError(
            "accelerator.lomo_backward: nbaccel does not train with LOMO, which steps inside of its backward. In one "
            "process call optimizer.fused_backward(loss, learning_rate) yourself; else use accelerator.backward(loss) "
            "with an optimizer of small state, such as torch.optim.Adafactor."
        )

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None, *, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Return a block that computes in the run's precision, for code outside of a prepared model's forward.

        Blocks may be nested.

        Args:
            autocast_handler: Options of this block; by default those of `kwargs_handlers`.
            enabled: False is short for ``AutocastKwargs(enabled=False)``.

        Example:
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
        """Divide gradients by the loss scale of fp16; with other precisions nothing happens.

        Gradients are unscaled once per step, however often this is called. Clipping does it too. Call it where
        `sync_gradients` is true.

        Args:
            optimizer: One prepared optimizer, several, or None for all.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(mixed_precision="fp16")
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> accelerator.backward(model(torch.ones(1, 1)).sum())
            >>> accelerator.unscale_gradients()
            >>> largest = model.weight.grad.abs().max()
        """
        self._lifecycle.equip()
        self._gradients.unscale(optimizer)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of the whole accumulation window by their norm.

        Inside a window, where gradients are not complete, nothing is clipped. Every rank calls it.

        Args:
            parameters: The parameters whose gradients are clipped together.
            max_norm: The largest norm afterwards.
            norm_type: The order p of the norm; 2 is the Euclidean norm, ``inf`` the maximum.

        Returns:
            The norm before clipping, a 0-d tensor; inside a window the norm so far.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.backward(3 * model(torch.zeros(1, 1)).sum())
            >>> accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            tensor(3.)
        """
        if not self._lifecycle.is_ready:
            self._lifecycle.make_ready("clip_grad_norm_")
        return self._gradients.clip_norm(parameters, max_norm, norm_type, self.sync_gradients)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient value of the whole accumulation window; inside a window nothing happens.

        Args:
            parameters: The parameters whose gradients are clipped.
            clip_value: Values are clipped to the range from -`clip_value` to `clip_value`.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.backward(3 * model(torch.zeros(1, 1)).sum())
            >>> accelerator.clip_grad_value_(model.parameters(), 1.0)
            >>> model.bias.grad
            tensor([1.])
        """
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
        """Run forward and backward of a batch in micro-batches that fit into memory.

        The effective batch does not change. The call replaces the forward and `backward`; clipping, accumulation, the
        optimizer and the scheduler stay as they are. It is collective where the batch ends a step.

        A rank that runs out of memory continues in smaller micro-batches. Its peers wait for it in the exchange of
        gradients, as they would in any case. Each rank has its own size, which grows again after 200 batches that
        fitted. In a sharded model (FSDP) every forward waits for all ranks. There all ranks repeat the batch, in as
        many micro-batches as the rank that needs most; this works on CPUs and is refused on GPUs.

        Parameters that no rank used keep ``grad`` None. BatchNorm normalises each micro-batch by itself and counts each
        sample once; all ranks get the running statistics of rank 0, as under DDP. The first call frees DDP's buckets
        and makes its own. A forward with gradients outside of `forward_backward` returns to DDP.

        After an error no weight has changed. The next step works if all ranks begin it with the same batch. The one
        exception is an error in the forward or the backward of a sharded model, which ends its process group.

        Args:
            loss_fn: ``loss_fn(micro_batch)`` runs the prepared model and returns the mean loss, a tensor of one
                element. It is called once per micro-batch, and again for those that did not fit. It may change only
                random generators and buffers of the model, which are restored before a repetition. It may not wait for
                other ranks.
            batch: The batch of this rank, on its device.
            weight: What the mean of `loss_fn` is taken over. "samples"; "tokens": the entries of ``batch["labels"]``
                that are not -100, without the first of each sequence where the model is a causal language model of
                transformers; or a function that returns the number for a batch. With it gradients are exact for any
                sizes: those of one step on all samples of all ranks, sum(w * grad) / sum(w).
            micro_batch_size: The largest micro-batch. "auto" finds the largest one that fits by a few trial steps on
                the first batch, which are undone; each rank for itself, as in `find_batch_size`.
            split_fn: ``split_fn(batch, start, stop)`` returns the samples from `start` to `stop`; `samples` must be
                given too. Without it a batch is made of tensors and arrays with the samples in the first dimension and
                lists with an entry for each, in any nesting of tuples, lists, dicts, mappings and dataclasses. Numbers,
                strings and 0-d tensors are copied into every micro-batch.
            samples: The number of samples in `batch`. By default the common first dimension of its tensors, or the
                length of its lists. If it is given, tensors and lists of another length belong to every micro-batch.

        Returns:
            The mean loss of this rank's batch, detached, as one forward of the whole batch would give it.

        Raises:
            torch.OutOfMemoryError: The smallest micro-batch does not fit on some rank. All ranks raise it. With several
                ranks they do so in the call that ends the accumulation window; until then the calls of the rank
                concerned return NaN.
            PeerFailed: `loss_fn` raised on another rank in this step. That rank raises its own error, in that call.
            CannotSplit: The batch cannot be split, or the model cannot (SyncBatchNorm; FSDP on GPUs or of the program's
                own).

        Example:
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
        """Prepare models, optimizers, loaders and schedulers for this run; collective.

        Args:
            device_placement: For each object, whether it is moved to the device.
            device_map: Places for the parts of the one model of this call, as `dispatch_model` takes them, or "auto".
                Parts that wait on the host or on the disk cannot be trained; adapters beside them can. With several
                processes and no optimizer in the call the model is for inference, as by `prepare_model` with
                `evaluation_mode`, and keeps its methods (``model.generate``).
            *objects: What is to be prepared. Other objects, and those that are prepared already, are returned
                unchanged.

        Returns:
            The prepared objects in the order given; one object for one argument.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loader = DataLoader(torch.ones(8, 2), batch_size=4)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
        """Prepare a model: on the device, in the run's precision and strategy. Collective where there are several
        ranks.

        Args:
            model: The model, the same on every rank.
            device_placement: Whether it is moved; by default as the Accelerator was told. Quantised models and models
                on several devices are not moved.
            evaluation_mode: The model is for inference only: gradients are not synchronised, and no rank waits for
                another.

        Returns:
            The model to call in the training loop.

        Raises:
            ValueError: The model is spread over several devices, and there are several processes.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> teacher = accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True)
        """
        self._lifecycle.join()
        move = self.device_placement if device_placement is None else device_placement
        prepared = self._preparer.prepare_model(model, move, evaluation_mode)
        self._resuming.resume_if_complete()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Return an optimizer that steps when gradients are synchronised. Every rank calls it.

        Args:
            optimizer: The program's optimizer, of a model that is prepared, or is prepared in the same call.
            device_placement: Accepted as by Accelerate. The state of an optimizer follows its parameters.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
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
        """Return a scheduler that moves when its optimizer steps. Every rank calls it, after `prepare` of the
        optimizer.

        Args:
            scheduler: The program's scheduler.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
        """
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
        """Return a loader over this rank's share of the batches, on its device. Collective.

        In rounds of one batch per rank, rank r of n gets the batches r, r + n, r + 2n and so on. The last round is
        filled up with the first samples. See `DataLoaderConfiguration` for other ways.

        Args:
            data_loader: The program's loader, over the same dataset on every rank.
            device_placement: Whether batches are moved to the device; by default as the Accelerator was told.
            slice_fn_for_dispatch: ``slice_fn(batch, data_slice, process_index=r, num_processes=n)`` cuts one rank's
                part out of the batch of a whole round. It is called on rank 0, where rank 0 reads for all.

        Raises:
            ValueError: The dataset is empty, differs between ranks, or has a batch size that cannot be split.

        Example:
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
        """Return a loader without this rank's first batches; its length is shorter by as many. Every rank calls it.

        The order is that of the same epoch of `dataloader`, which also counts the epochs. A position that `load_state`
        has set is dropped.

        Args:
            dataloader: A prepared loader.
            num_batches: The number of batches to leave out, per rank.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> loader = accelerator.prepare(DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
            [[4, 5]]
        """
        rest: DataLoader[Any] = skip_first_batches(dataloader, num_batches)
        return rest

    def total_steps(self, loader: DataLoader[Any], epochs: int = 1) -> int:
        """Return the number of optimizer steps in `epochs` passes over `loader`; each pass ends with a step.

        A prepared scheduler moves more often: see `total_scheduler_steps`.

        Args:
            loader: The loader, prepared or not.
            epochs: The number of passes.

        Raises:
            TypeError: `loader` has no length.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(gradient_accumulation_steps=4)
            >>> accelerator.total_steps(DataLoader(range(20), batch_size=2), epochs=3)  # 10 batches: 4 + 4 + 2
            9
        """
        self._lifecycle.join()
        return self._preparer.total_steps(loader, epochs, self.dataloader_config)

    def total_scheduler_steps(self, loader: DataLoader[Any], epochs: int = 1) -> int:
        """Return how often a prepared scheduler moves in `epochs` passes over `loader`: its ``total_steps``.

        A prepared scheduler moves `num_processes` times per optimizer step (once with `split_batches`), so that it is
        at its end after as many batches as a single process would see.

        Args:
            loader: The loader, prepared or not.
            epochs: The number of passes.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().total_scheduler_steps(DataLoader(range(20), batch_size=2), epochs=3)
            30
        """
        return self.total_steps(loader, epochs) * (1 if self.split_batches else self.num_processes)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which ranks without data take part in the last steps of the others, with zero gradients.

        Collective; in one process nothing happens. Gradients are divided by the number of ranks also in the steps for
        which only some ranks have data. Other collectives than those of the models (`gather`, `check_trigger`) must not
        be called inside: a rank without data does not answer them.

        Args:
            joinables: The prepared models that are trained inside, and other `Joinable` objects.
            even_batches: Replaces this choice for prepared loaders inside. Loaders over streams keep theirs.

        Example:
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
        """Return the state dict of the whole model, without the prefixes of DDP and ``torch.compile``.

        Tensors are not copied. The names are those of a model of which nothing is compiled. The tensors of a sharded
        model are gathered one at a time into the host memory of rank 0 (of each node, with `save_on_each_node`); the
        other ranks get an empty dict, and the call is collective.

        Args:
            model: The model, prepared or not.
            unwrap: False returns the state dict of the module as it is.

        Example:
            >>> import torch
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> list(accelerator.get_state_dict(model))
            ['weight', 'bias']
        """
        from nbaccel.train.checkpoint.shards import whole_state

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
        """Write the weights of a model as Hugging Face libraries expect them: ``model.safetensors``, or shards and an
        index.

        Rank 0 writes. Every rank calls it where the model is sharded: its tensors are gathered, one at a time, into the
        host memory of rank 0. `nbaccel.utils.load_model` reads the result, and so does ``from_pretrained`` where a
        config.json lies beside it. Of a quantised model with adapters only the trained tensors are written.

        Args:
            model: The model, prepared or not.
            save_directory: The folder; it is made if it does not exist.
            max_shard_size: The largest size of a file, in bytes or as "10GB". A larger tensor has its own file.
            safe_serialization: False writes ``pytorch_model.bin``, a pickle.

        Raises:
            NotADirectoryError: `save_directory` is a file.
            CannotSave: There is no space, or no right to write there.

        Example:
            >>> import os, tempfile, torch
            >>> from nbaccel import Accelerator
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Accelerator().save_model(torch.nn.Linear(2, 1), folder)
            ...     os.listdir(folder)
            ['model.safetensors']
        """
        from nbaccel.train.checkpoint.model_weights import save_weights

        state = self._checkpoints.without_base(model, self.get_state_dict(model))
        if self._checkpoints.writes:
            save_weights(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False, *, save_on_each_node: bool = False) -> None:
        """Call ``torch.save(obj, f)`` on the main process only.

        A path is written under a temporary name and then renamed.

        Args:
            obj: Anything that ``torch.save`` takes.
            f: A path or an open file.
            safe_serialization: `obj` is a dict of tensors; write it as safetensors.
            save_on_each_node: Save on the first rank of each node.

        Raises:
            CannotSave: There is no space, or no right to write there; or `obj` holds sharded tensors, of which each
                rank has only its rows, as ``model.state_dict()`` of a sharded model does.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.save(model.state_dict(), "model.pt")  # doctest: +SKIP
        """
        from nbaccel.train.checkpoint.model_weights import write_object
        from nbaccel.train.checkpoint.shards import unsharded

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
        """Write everything that is prepared and registered, and the states of random generators, into a checkpoint.

        Call it on all ranks, or on the main process only; it is no collective. In the second case the random numbers of
        the other ranks are derived from those of rank 0 at load. A sharded model needs all ranks, since each writes its
        rows: rank 0 completes the checkpoint once all rows are on the disk, or all ranks raise the same error. The call
        returns when the disk has the checkpoint. An older checkpoint of that name is deleted only after that.

        Args:
            output_dir: The folder. If it holds other files, these stay, and the checkpoint becomes its subfolder
                ``nbaccel_checkpoint``, which `load_state` finds. None is for ``automatic_checkpoint_naming=True`` in
                the project's configuration: the folder is then ``<project_dir>/checkpoints/checkpoint_<n>``, and
                `total_limit` of them are kept. Numbers continue after the newest existing one; a printed line says so
                if another run has left it.
            safe_serialization: Accepted as by Accelerate. A checkpoint is always safetensors and JSON. Only a state
                that is more than data, for example of a registered object, becomes a pickle, with a warning.
            blocking: False copies the state into host memory, which is kept for the next save, and writes it in the
                background. The next save, `load_state`, `end_training` and the end of the process wait for it. It
                cannot be combined with hooks of the program, which may read the models.
            **save_model_func_kwargs: Accepted with a warning; in Accelerate they are for DeepSpeed.

        Returns:
            The name of the folder.

        Raises:
            ValueError: There is no folder; or the number that was set by hand exists; or there are hooks and `blocking`
                is False.
            CannotSave: There is no space, or no right to write there. The older checkpoint is unchanged. With
                ``on_save_error="warn"`` it is a warning instead. The error of a save in the background is raised by the
                call that waits for it.

        Example:
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
        """Continue from a checkpoint, with this or another number of ranks. Collective.

        Everything that was prepared and registered when it was written must be so now, in the same order. Prepared
        loaders continue after the last batch that was trained on, so the program need not skip any
        (`skip_first_batches` replaces that position). A loader that has trained since it was prepared does not: its
        next loop is a whole epoch. Folders that Accelerate wrote can be loaded too; they have no position.

        Args:
            input_dir: The folder. None is the newest complete checkpoint of those that are named automatically; damaged
                ones are skipped with a warning, and `save_state` numbers on after the newest.
            load_kwargs: ``{"weights_only": False}`` is the same as `trust`. Other entries have no effect.
            trust: Load pickles too, which can run any code.
            **load_model_func_kwargs: For each model's ``load_state_dict``, such as ``strict=False`` for a checkpoint
                with more or fewer weights. A `map_location` is accepted; tensors are loaded to the devices of their
                objects.

        Raises:
            FileNotFoundError: There is no checkpoint.
            CheckpointCorrupt: It is damaged. The error names the file, and what was expected and found.
            UntrustedPickle: One of its files is a pickle that could run code, and `trust` is not given.
            ValueError: Other models, optimizers or schedulers are prepared.
            RuntimeError: Other objects are registered.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
            >>> accelerator.load_state()  # the newest complete checkpoint  # doctest: +SKIP
        """
        self._lifecycle.join()
        self._checkpoints.load_state(input_dir, load_kwargs or {}, trust, load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` and `load_state` handle, in this order. Every rank calls it.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: One of them lacks `state_dict` or `load_state_dict`. Nothing is registered then.

        Example:
            >>> from nbaccel import Accelerator
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
            >>> Accelerator().register_for_checkpointing(average)
        """
        self._checkpoints.registered.add(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a function that every `save_state` calls before anything is written.

        Args:
            hook: ``hook(models, weights, folder)``. `models` are the program's own, as it passed them to `prepare`,
                without DDP: ``isinstance`` and ``save_pretrained`` work on them as in one process. `weights` are their
                state dicts; those that the hook removes are not saved. `folder` is an empty folder for files of the
                hook's own: on rank 0 the unfinished one that becomes the checkpoint, on other ranks one whose files
                are moved into it. Of a file that several ranks write, rank 0's is kept.

        Returns:
            A handle whose `remove()` removes the hook.

        Example:
            >>> from nbaccel import Accelerator
            >>> handle = Accelerator().register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
            >>> handle.remove()
        """
        return self._checkpoints.registered.add_hook(self._checkpoints.registered.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a function that every `load_state` calls, on every rank, before anything is loaded.

        Args:
            hook: ``hook(models, folder)``. `models` are the program's own, as it passed them to `prepare`; those that
                the hook removes from the list are not loaded.

        Returns:
            A handle whose `remove()` removes the hook.

        Example:
            >>> from nbaccel import Accelerator
            >>> handle = Accelerator().register_load_state_pre_hook(lambda models, folder: models.clear())
            >>> handle.remove()
        """
        return self._checkpoints.registered.add_hook(self._checkpoints.registered.load_hooks, hook)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs, after a resume from the epoch that was in progress. Every rank calls it.

        The training loader of that epoch continues where it was, so the loop is written as if nothing had happened. An
        epoch is over when its training loader is exhausted and no loader is being iterated; a checkpoint written after
        that resumes at the next epoch. What follows the training in an epoch, such as an evaluation, is repeated if it
        was not over.

        Args:
            count: The number of epochs of the whole training.

        Example:
            >>> from nbaccel import Accelerator
            >>> list(Accelerator().epochs(3))
            [0, 1, 2]
        """
        return self._checkpoints.epochs.run(count, self._lifecycle.accumulation)

    def remember(self, **defaults: Any) -> Remembered:
        """Keep values of the program in checkpoints. Every rank calls it.

        A value from a loaded checkpoint or from an earlier call replaces the default. The checkpoint holds the values
        of rank 0.

        Args:
            **defaults: The first value for each name: plain data or tensors. Anything else becomes a pickle, as with
                `register_for_checkpointing`.

        Returns:
            An object with the values as attributes, which the program reads and sets.

        Example:
            >>> from nbaccel import Accelerator
            >>> memory = Accelerator().remember(best=0.0, history=[])
            >>> memory.best = max(memory.best, 0.9)
            >>> memory.history.append(0.9)
        """
        self._checkpoints.remembered.keep(**defaults)
        return self._checkpoints.remembered

    # -- what a program reports

    @cached_property
    def _trackers(self) -> Trackers:
        trackers: Trackers = feature("log_with")()
        return trackers

    @property
    def _has_trackers(self) -> bool:
        """True if the program has said anything about trackers."""
        return "_trackers" in vars(self)

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers that were chosen, as the program named them; set it before `init_trackers`."""
        return list(self._trackers.chosen) if self._has_trackers else []

    @log_with.setter
    def log_with(self, log_with: LogWith) -> None:
        self._trackers.choose(log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers of this process; empty before `init_trackers` and on ranks that do not track.

        A program may set trackers that it has opened itself.
        """
        return self._trackers.opened(self.is_main_process) if self._has_trackers else []

    @trackers.setter
    def trackers(self, trackers: Sequence[GeneralTracker]) -> None:
        self._trackers.adopt(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers of `log_with`, on rank 0. Every rank may call it; no rank waits for another.

        A process that is forked or unpickled from this one opens them again at its first `log`.

        Args:
            project_name: The name under which the trackers keep the run.
            config: Hyperparameters to keep with the run.
            init_kwargs: Options for each tracker's library, by the tracker's name: ``{"wandb": {"tags": ["first"]}}``.

        Raises:
            ModuleNotFoundError: A tracker's package is not installed; the message is the command that installs it.
            ValueError: A tracker writes files, and there is no ``project_dir``.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(log_with="jsonl", project_dir="runs")
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        """
        self._trackers.begin(
            project_name, dict(config or {}), dict(init_kwargs or {}), self.logging_dir, self.is_main_process
        )

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        average: bool = False,
    ) -> None:
        """Report numbers: those of this rank to the notebook, those of rank 0 to the trackers.

        Without `init_trackers` the values go to the notebook only. An object that is no mapping goes to the trackers
        unchanged; without trackers it is not logged, and a warning says so.

        Args:
            values: Numbers, strings or tensors by name. A value of None is not passed to trackers. Tensors are
                detached. A tensor on a GPU is copied in its stream and read once the copy has arrived, so the step does
                not wait for it.
            step: The step of the row; by default the current optimizer step (wandb then counts by itself).
            log_kwargs: More arguments for a tracker by its name, ``{"wandb": {"commit": False}}``.
            average: Report the mean over all ranks of each number and each tensor of one element. It makes the call
                collective: every rank logs the same names.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().log({"loss": torch.tensor(0.5)}, step=3)
        """
        if type(values) is not dict and not isinstance(values, Mapping):  # the abstract class's check costs a call
            self._trackers.log_as_it_is(values, step, log_kwargs or {}, self.trackers)
            return
        at = self._step_under_way() if step is None else step
        row = dict(values) if is_plain(values) else detached(values)
        if average and self.num_processes > 1:
            row = averaged(row, self.state)
        reports.record_metric(row, at)
        if "_trackers" in self.__dict__:  # without a call: some programs log in each step
            self._trackers.log(row, at, step, log_kwargs or {}, self.state)

    def phase(self, name: str) -> None:
        """Begin a phase of the run, which is shown separately, with new curves and a new time estimate. Any rank may
        call it.

        Args:
            name: The name that is shown, such as a fold, a stage, or one of several models.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> for fold in range(2):
            ...     accelerator.phase(f"fold {fold}")
        """
        emit(Phase(name))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called `name`, for its own methods.

        On ranks that do not track it is a blank one, whose calls do nothing.

        Args:
            name: The tracker's name, such as "wandb".
            unwrap: Return the object of its library instead: the `wandb.Run`, the `SummaryWriter`.

        Raises:
            ValueError: No such tracker was opened.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(log_with="wandb")
            >>> accelerator.get_tracker("wandb").log_artifact("model.safetensors")  # doctest: +SKIP
        """
        return self._trackers.get(name, self.trackers, unwrap) if self.is_main_process else BlankTracker()

    # -- measuring, and searching for sizes

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Return a block that is profiled; it gives the ``torch.profiler.profile``, whose ``step()`` ends a step of a
        schedule.

        Args:
            profile_handler: Options; by default the `ProfileKwargs` of `kwargs_handlers`. With an `output_trace_dir`
                rank r writes ``profile_{r}.json`` there, and the end of the block is collective.

        Example:
            >>> from nbaccel import Accelerator
            >>> with Accelerator().profile() as profiler:
            ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
            >>> any(row.key == "aten::mm" for row in profiler.key_averages())
            True
        """
        options = profile_handler or self._handlers.profile
        block: AbstractContextManager[profile]
        block = feature("Accelerator.profile")(options, self.process_index, self.wait_for_everyone)
        return block

    def find_batch_size(
        self,
        loss_fn: Callable[[Any], Tensor],
        example: Any,
        *,
        max_batch_size: int = 4096,
        cache: str | os.PathLike[str] | None = None,
        meter: PeakGauge | None = None,
    ) -> int:
        """Return the largest batch size per rank whose training step fits in memory, the same on every rank.
        Collective.

        It runs four to eight trials of two whole steps each: forward, backward and optimizer. Most searches never run
        out of memory. Afterwards models, optimizers and random generators are bit by bit as before, and no loader has
        moved. The size returned was run on every rank. It is within about 3 % of the largest possible one, and a
        multiple of eight where that costs nothing.

        All ranks run each trial of a sharded model together, so running out of memory in one would be an error. The
        sizes tried are therefore those that the trial before shows to fit; there are more of them, and the last takes
        some 95 % of the memory.

        Args:
            loss_fn: Returns the loss for a batch on this rank's device, with prepared models: ``lambda batch:
                F.cross_entropy(model(batch[0]), batch[1])``. State that it keeps itself is not restored.
            example: The loader that will train, of which some hundred samples are read to find the longest ones; or one
                batch. A sample longer than those may still be too large: see `forward_backward`, which survives it.
            max_batch_size: The largest useful size, such as a rank's share of a small dataset.
            cache: A folder in which sizes are kept from run to run; by default they are kept as long as this
                Accelerator. A size found before is tried once instead of searched for.
            meter: Measures memory, instead of the device's own measure. That is torch's allocator on CUDA. On the CPU
                it is the `nbaccel.testing.MemLimit` that is entered, else the bytes of tensors against ``ulimit`` and
                80 % of the free memory; it does not see everything, so leave some memory free. Where nothing can be
                measured (mps), sizes are tried until one does not fit, which takes more trials.

        Raises:
            torch.OutOfMemoryError: Not even one sample fits. The error gives the memory that one sample needs, and the
                limit. On every rank.
            NotPrepared: No model or no optimizer is prepared. Both are part of what has to fit.
            PeerFailed: `loss_fn` failed on another rank.

        Example:
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

        Nothing is computed, no device is used and no rank waits for another. The last sentence of the table names the
        strategy with the least communication that fits on the devices of this machine, or says what would fit.

        Args:
            model: Prepared or not, also on the meta device.
            optimizer: The model's optimizer, prepared or not; or a class, or the name of one in ``torch.optim``.
            batch: An example with as many samples as a rank will get. Without it activations are not counted.
            loss_fn: ``loss_fn(model, batch)`` returns the loss. It gets a copy of the model whose tensors have no
                memory. Without it the model is called as ``model(**batch)`` or ``model(inputs)``.
            ranks: The numbers of ranks to show; by default those of this run or its devices, and twice as many.

        Raises:
            ValueError: There is no optimizer of that name, or the model has parameters without a shape.

        Example:
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
        """Let a model compute activations again in its backward instead of keeping them.

        A model that can do so itself (transformers) is told to. Call it before or after `prepare`. It works with DDP
        and accumulation, since the recomputation is not reentrant.

        Args:
            model: The model, prepared or not.
            blocks: The modules that are recomputed, each as a whole; by default the members of the outermost
                ``ModuleList`` and ``Sequential`` objects.

        Returns:
            The same `model`.

        Raises:
            ValueError: No blocks were given, and none were found.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> blocks = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            >>> model = accelerator.gradient_checkpointing(blocks)
        """
        from nbaccel.train.step.recompute import recompute_activations

        self._lifecycle.equip()
        recompute_activations(self._context.strategy.unwrap(model), blocks)
        return model

    def verify_device_map(self, model: Module) -> bool:
        """Return whether a model, or a module in it, is on several devices, as with ``device_map="auto"``.

        Args:
            model: The model, prepared or not.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> accelerator.verify_device_map(model)
            False
        """
        return any(is_spread(module) for module in model.modules() if hasattr(module, "hf_device_map"))

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Module:
        """Return the program's own module, without DDP and ``nn.DataParallel``; `model` itself does not change.

        Args:
            model: The model, prepared or not.
            keep_fp32_wrapper: False also removes autocast from the module's forward, permanently.
            keep_torch_compile: A compiled model is returned compiled. False returns the module that was compiled, whose
                state has no ``_orig_mod.`` in its names.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> type(accelerator.unwrap_model(model)).__name__
            'Linear'
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
        """Forget everything prepared and release memory that nothing needs any more.

        What the program registered (`register_for_checkpointing`, hooks) or asked to `remember` stays. Objects that a
        failed cell had made are released too. `last_free` lists what is still held, and by which names.

        Args:
            history: Also drop the notebook's outputs (`Out[7]`, `_7`, `_`) that hold tensors.
            *objects: The program's own references, to be replaced by the result: ``model, optimizer =
                accelerator.free_memory(model, optimizer)``.

        Returns:
            One None per object.

        Example:
            >>> model = optimizer = None
            >>> model, optimizer = Accelerator().free_memory(model, optimizer)
        """
        from nbaccel.train.oom.memory.free_memory import free

        self._lifecycle.forget()
        self.last_free = free(objects, history)
        return [None] * len(objects)

    def clear(self, *objects: Any, history: bool = False) -> list[None]:
        """Return the result of `free_memory`; a second name for it.

        Args:
            *objects, history: As for `free_memory`.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> model, = accelerator.clear(model)
            >>> model is None
            True
        """
        return self.free_memory(*objects, history=history)

    def end_training(self) -> None:
        """Finish the trackers, forget everything prepared and leave the process group. Every rank calls it.

        A later use forms a new group.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator(log_with="csv", project_dir="runs")  # doctest: +SKIP
            >>> accelerator.init_trackers("digits")  # doctest: +SKIP
            >>> accelerator.log({"loss": 0.5})  # doctest: +SKIP
            >>> accelerator.end_training()  # doctest: +SKIP
        """
        if self._has_trackers:
            self._trackers.finish()
        self._lifecycle.end()
        self.state.destroy_process_group()

    def destroy_process_group(self) -> None:
        """Leave the process group that we made; a later use forms a new one. Every rank calls it.

        Sharded models that are prepared become whole again first, on every rank, and can be prepared in another way.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.destroy_process_group()
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
        """Return a block in which nothing changes: nbaccel does not split sequences over the ranks.

        Args:
            buffers, buffer_seq_dims, no_restore_buffers: As Accelerate takes them; not used.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> with accelerator.maybe_context_parallel():
            ...     pass
        """
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
