"""Preparing: the user's methods that prepare models, optimizers, loaders and schedulers for a run. Run in ranks.

Another module prepares each kind; this one decides only the order, and calls them.

Loading: the user's calls about data on an `Accelerator`. Runs in ranks.

Each is a few lines over the package `data`, where batches are dealt. Nothing is decided here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbaccel.train.data import DataLoaderConfiguration, LoaderFacts, PreparedLoader, prepare_loader, skip_first_batches
from nbaccel.train.data.dispatch import SliceFunction
from nbaccel.train.data.unprepared import watch_loaders
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.prepare.equipment import Equipment
from nbaccel.train.prepare.models import admit, may_move
from nbaccel.train.prepare.optimizer import PreparedOptimizer, PreparedScheduler, follow_parameters
from nbaccel.train.prepare.prepared import remembered
from nbaccel.train.step.precision import restore_forward

__all__ = [
    "Loading",
    "Preparing",
]


class Loading(ProcessControl):
    """`prepare_data_loader`, `skip_first_batches` and related methods."""

    dataloader_config: DataLoaderConfiguration
    _equipment: Equipment

    @abstractmethod
    def _join_world(self) -> None:
        """Join the world as it is now. Collective where the process group is formed."""

    @abstractmethod
    def _agree_on_names(self) -> None:
        """Name this run's checkpoints equally on all ranks, once. Collective."""

    @abstractmethod
    def _resume_if_complete(self) -> None:
        """Continue from a checkpoint, once everything that it holds is prepared. Collective."""

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
        self._join_world()
        moves = self._equipment.moves if device_placement is None else device_placement
        prepared = self._prepare_loader(data_loader, moves, slice_fn_for_dispatch)
        self._resume_if_complete()
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
        self._join_world()
        batches = len(loader) if isinstance(loader, PreparedLoader) else self._batches_once_prepared(loader)
        return epochs * -(-batches // self._equipment.accumulation.steps)

    def total_scheduler_steps(self, loader: DataLoader[Any], epochs: int = 1) -> int:
        """Return how often a prepared scheduler moves in `epochs` passes over `loader`: the scheduler's total_steps.

        >>> from nbaccel import Accelerator
        >>> Accelerator().total_scheduler_steps(DataLoader(range(20), batch_size=2), epochs=3)
        30
        """
        return self.total_steps(loader, epochs) * (1 if self.split_batches else self.num_processes)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
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
        if self.num_processes == 1:
            yield
            return
        joined = [thing for thing in joinables if isinstance(thing, Joinable)]
        with ExitStack() as stack:
            for loader in self._equipment.prepared.loaders:
                stack.enter_context(loader.joined(even_batches))
            stack.enter_context(Join(joined, enable=bool(joined), throw_on_early_termination=False))
            yield

    def _prepare_loader(
        self, loader: DataLoader[Any], move: bool, slice_function: SliceFunction | None = None
    ) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            if loader.accumulation is self._equipment.accumulation:
                return remembered(loader, self._equipment.prepared.loaders)
            loader = loader.loader
        self._agree_on_names()
        prepared = prepare_loader(
            loader,
            self.world,
            self._equipment.accumulation,
            self.dataloader_config,
            self._facts(loader),
            self.device,
            moves=move,
            slice_function=slice_function,
        )
        return remembered(prepared, self._equipment.prepared.loaders)

    def _facts(self, loader: DataLoader[Any]) -> list[LoaderFacts]:
        mine = LoaderFacts.of(loader)
        if self.num_processes == 1:
            return [mine]
        return LoaderFacts.from_tensor(self.collectives.gather(mine.as_tensor().to(self.device)))

    def _batches_once_prepared(self, loader: DataLoader[Any]) -> int:
        """Return this rank's number of batches, without preparing `loader`."""
        batches, rank, ranks = len(loader), self.process_index, self.num_processes
        if self.split_batches:
            return batches
        rounds, extra = divmod(batches, ranks)
        if loader.drop_last:
            return rounds
        return rounds + (bool(extra) if self.even_batches else rank < extra)


class Preparing(Loading):
    """`prepare`, and its variants for one object of a known kind."""

    step_scheduler_with_optimizer: bool

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return models, optimizers, loaders and schedulers prepared for this run, in the order given; collective.

        Other objects are returned unchanged, and so is what is prepared already. One argument gives one object.
        device_placement: for each object, whether to move it to the device.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(objects)} objects")
        self._join_world()
        moves = device_placement or [self._equipment.moves] * len(objects)
        prepared = [self._prepare_one(thing, move) for thing, move in zip(objects, moves, strict=True)]
        # Schedulers come last: they follow prepared optimizers, which may come after them in the call.
        prepared = [self._prepare_scheduler(thing) for thing in prepared]
        self._bring_states()
        self._resume_if_complete()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_one(self, thing: Any, move: bool) -> Any:
        if isinstance(thing, Module):
            return self._prepare_model(thing, move)
        if isinstance(thing, Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            return self._prepare_loader(thing, move)
        return thing

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
        self._join_world()
        move = self._equipment.moves if device_placement is None else device_placement
        prepared = self._prepare_model(model, move, evaluation_mode)
        self._bring_states()
        self._resume_if_complete()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Return `optimizer` as one that steps when gradients are synchronised. Every rank calls it.

        device_placement: accepted as by Accelerate; an optimizer's state follows its parameters.
        """
        self._join_world()
        prepared = self._prepare_optimizer(optimizer)
        self._bring_states()
        self._resume_if_complete()
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> PreparedScheduler:
        """Return `scheduler` as one that moves when its optimizer steps; prepare the optimizer first. On every rank."""
        self._join_world()
        prepared: PreparedScheduler = self._prepare_scheduler(scheduler)
        self._resume_if_complete()
        return prepared

    def _prepare_model(self, model: Module, move: bool, evaluation_mode: bool = False) -> Module:
        if any(model is known for known in self._equipment.prepared.models):
            return model
        model = admit(model, self.world, self.device)
        if move and may_move(model):
            model.to(self.device)
        restore_forward(self._equipment.strategy.unwrap(model))  # of another precision, before
        self._equipment.precision.wrap_forward(self._equipment.strategy.unwrap(model))
        if not evaluation_mode:
            self._agree_on_names()
            self.collectives.agree(f"prepare {type(model).__name__} of {len(list(model.parameters()))} parameters")
            model = self._equipment.strategy.setup(model)
        model = self._equipment.compiling.compiled(model)
        self._equipment.prepared.models.append(model)
        if not evaluation_mode:
            watch_loaders(self.world, self._equipment.accumulation)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.accumulation is self._equipment.accumulation:
                return remembered(optimizer, self._equipment.prepared.optimizers)
            optimizer = optimizer.optimizer  # prepared by another Accelerator, or for another world
        return remembered(
            PreparedOptimizer(
                optimizer,
                self._equipment.accumulation,
                self._equipment.precision,
                self._equipment.strategy,
                self._equipment.watch,
                self._equipment.raw_steps,
            ),
            self._equipment.prepared.optimizers,
        )

    def _bring_states(self) -> None:
        """Move optimizer states to their parameters, since a model may be moved after its optimizer was prepared."""
        for optimizer in self._equipment.prepared.optimizers:
            follow_parameters(optimizer.optimizer)

    def _prepare_scheduler(self, thing: Any) -> Any:
        if isinstance(thing, PreparedScheduler):
            if thing.accumulation is self._equipment.accumulation:
                return remembered(thing, self._equipment.prepared.schedulers)
            thing = thing.scheduler
        if not isinstance(thing, LRScheduler):
            return thing
        moves = 1 if self.split_batches else self.num_processes
        if not self.step_scheduler_with_optimizer:
            moves = 0
        scheduler = PreparedScheduler(thing, self._equipment.prepared.optimizers, self._equipment.accumulation, moves)
        return remembered(scheduler, self._equipment.prepared.schedulers)
