"""Preparer: the part of an Accelerator that prepares models, optimizers, loaders and schedulers. Runs in ranks.

Another module prepares each kind; this one decides only the order, and calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbaccel.base.quantised import base_of, is_quantised
from nbaccel.base.settings import RunSettings
from nbaccel.train.data import DataLoaderConfiguration, LoaderFacts, PreparedLoader, prepare_loader
from nbaccel.train.prepare.models import admit, may_move
from nbaccel.train.prepare.optimizer import Guard, PreparedOptimizer, PreparedScheduler, follow_parameters
from nbaccel.train.prepare.prepared import remembered
from nbaccel.train.prepare.training_context import TrainingContext
from nbaccel.train.step.precision import restore_forward
from nbaccel.train.strategies.single import IGNORED, is_parallel, is_sharded, waiting_names

if TYPE_CHECKING:
    from nbaccel.train.data.dispatch import SliceFunction

__all__ = [
    "Preparer",
]


class Preparer:
    """Prepares objects of each kind, and remembers them. A part of the Accelerator.

    Args:
        agree_on_names: Names this run's checkpoints equally on all ranks; collective, and called where ranks meet
            anyway.
        guard: Takes the steps of prepared optimizers where a lack of memory is survived.
    """

    def __init__(self, context: TrainingContext, agree_on_names: Callable[[], None], guard: Guard) -> None:
        self._context = context
        self._agree_on_names = agree_on_names
        self._guard = guard

    def prepare(
        self, objects: Sequence[Any], moves: Sequence[bool], config: DataLoaderConfiguration, scheduler_moves: int
    ) -> list[Any]:
        """Return `objects` prepared, in their order; what is of no known kind is returned unchanged. Collective.

        Args:
            moves: For each object, whether it goes to the device.
            scheduler_moves: How often schedulers move when their optimizer steps; 0 where they move by their own calls.
        """
        models = [(thing, move) for thing, move in zip(objects, moves, strict=True) if isinstance(thing, Module)]
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        self._context.strategy.expect(objects, self._context.accumulation.steps, scheduler_moves)
        known = dict(zip((id(model) for model, _ in models), self._prepare_models(models, optimizers), strict=True))
        prepared = [
            known[id(thing)] if id(thing) in known else self._prepare_one(thing, move, config)
            for thing, move in zip(objects, moves, strict=True)
        ]
        # Schedulers come last: they follow prepared optimizers, which may come after them in the call.
        prepared = [self.prepare_scheduler(thing, scheduler_moves) for thing in prepared]
        self._bring_states()
        return prepared

    def prepare_model(self, model: Module, move: bool, evaluation_mode: bool) -> Module:
        """Return `model` prepared; see `Accelerator.prepare_model`. Collective where there are peers."""
        prepared = (
            self._prepare_for_evaluation(model, move) if evaluation_mode else self._prepare_models([(model, move)])[0]
        )
        self._bring_states()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return `optimizer` prepared; its state follows its parameters."""
        prepared = self._prepare_optimizer(optimizer)
        self._bring_states()
        return prepared

    def prepare_scheduler(self, thing: Any, moves: int) -> Any:
        """Return a scheduler prepared, and anything else unchanged.

        Args:
            moves: How often it moves when its optimizer steps; 0 where it moves by its own calls.
        """
        if isinstance(thing, PreparedScheduler):
            if thing.accumulation is self._context.accumulation:
                return remembered(thing, self._context.prepared.schedulers)
            thing = thing.scheduler
        if not isinstance(thing, LRScheduler):
            return thing
        scheduler = PreparedScheduler(thing, self._context.prepared.optimizers, self._context.accumulation, moves)
        return remembered(scheduler, self._context.prepared.schedulers)

    # -- each kind

    def _prepare_one(self, thing: Any, move: bool, config: DataLoaderConfiguration) -> Any:
        if isinstance(thing, Optimizer):
            return self._prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            return self.prepare_loader(thing, move, config)
        return thing

    def _prepare_models(
        self, models: Sequence[tuple[Module, bool]], optimizers: Sequence[Optimizer] = ()
    ) -> list[Module]:
        """Return `models`, each with whether it moves, prepared together, and let optimizers follow. Collective.

        Args:
            optimizers: Those of the same call, not prepared yet; earlier ones follow too.
        """
        context = self._context
        new = {id(model): (model, move) for model, move in models if not self._is_prepared(model)}
        admitted = {key: self._admit(model) for key, (model, _) in new.items()}
        moves = [new[key][1] and may_move(model) for key, model in admitted.items()]
        for model in admitted.values():
            base = base_of(model)
            bases = context.prepared.bases if base else None  # loaded here: a last save reads it where memory is short
            base = base if context.strategy.has_peers else frozenset()
            quantised = f", with a quantised base of {len(base)} tensors" if base else ""
            context.collectives.agree(
                f"prepare {type(model).__name__}",
                f"of {len(list(model.parameters()))} parameters{quantised}",
                self._exchanged(model, base),
            )
            self._agree_on_names()
            if base and bases is not None:  # on every rank then
                bases.refuse_others(model, base, context.collectives)
        inner = [
            optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer for optimizer in optimizers
        ]
        _refuse_untrained(list(admitted.values()), inner)
        known = [prepared.optimizer for prepared in context.prepared.optimizers]
        ready = context.strategy.setup(list(admitted.values()), [*known, *inner], moves)
        prepared = {key: self._compiled(model) for key, model in zip(admitted, ready, strict=True)}
        if prepared:
            self._look_at_what_is_unprepared()
        return [prepared.get(id(model), model) for model, _ in models]

    def _exchanged(self, model: Module, base: Collection[str]) -> dict[str, Tensor]:
        """Return what the strategy exchanges of `model` between ranks, by kind and name."""
        strategy = self._context.strategy
        if not strategy.has_peers or is_parallel(model):
            return {}
        left_out = {*base, *waiting_names(model), *getattr(model, IGNORED, ())}
        trained = {
            f"{'parameter' if parameter.requires_grad else 'frozen parameter'} {name}": parameter
            for name, parameter in model.named_parameters()
            if name not in left_out and not is_lazy(parameter)  # which torch refuses itself
        }
        if not strategy.forwards_are_collective and not any(each.requires_grad for each in trained.values()):
            return {}  # it stays as it is in each rank
        buffers = {
            f"buffer {name}": buffer
            for name, buffer in model.named_buffers()
            if name not in left_out and not is_lazy(buffer)
        }
        return trained | buffers

    def _look_at_what_is_unprepared(self) -> None:
        """Look from now on at loaders that are not prepared, and at such optimizers: they may step what is prepared."""
        if self._context.world.is_distributed:
            from nbaccel.train.data.unprepared import watch_loaders  # one process does not need it

            watch_loaders(self._context.world, self._context.accumulation)
        strategy = self._context.strategy
        if strategy.has_peers and strategy.others is None and not RunSettings.from_env().independent:
            from nbaccel.train.prepare.unaveraged import OtherOptimizers  # one process does not need it

            OtherOptimizers(strategy, self._context.accumulation, self._context.prepared.optimizers).begin()

    def _prepare_for_evaluation(self, model: Module, move: bool) -> Module:
        if self._is_prepared(model):
            return model
        model = self._admit(model, trains=False)
        if move and may_move(model):
            self._context.strategy.place(model)
        return self._compiled(model)

    def _is_prepared(self, model: Module) -> bool:
        return any(model is known for known in self._context.prepared.models)

    def _admit(self, model: Module, trains: bool = True) -> Module:
        """Return `model` as it can be prepared, with its forward in the run's precision."""
        context = self._context
        shards = context.strategy.forwards_are_collective
        model = admit(model, context.world, context.device, trains, shards)
        restore_forward(context.strategy.unwrap(model))  # of another precision, before
        context.precision.wrap_forward(context.strategy.unwrap(model))
        return model

    def _compiled(self, model: Module) -> Module:
        model = self._context.compiling.compiled(model)
        self._context.prepared.models.append(model)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        context = self._context
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.accumulation is context.accumulation:
                return remembered(optimizer, context.prepared.optimizers)
            optimizer = optimizer.optimizer  # prepared by another Accelerator, or for another world
        _refuse_untrained(context.prepared.models, [optimizer])
        context.strategy.setup([], [optimizer], [])  # whose model may have been prepared before
        return remembered(
            PreparedOptimizer(
                optimizer,
                context.accumulation,
                context.precision,
                context.strategy,
                context.watch,
                context.raw_steps,
                self._guard,
            ),
            context.prepared.optimizers,
        )

    def _bring_states(self) -> None:
        """Move optimizer states to their parameters, since a model may be moved after its optimizer was prepared."""
        for optimizer in self._context.prepared.optimizers:
            follow_parameters(optimizer.optimizer)

    # -- loaders

    def total_steps(self, loader: DataLoader[Any], epochs: int, config: DataLoaderConfiguration) -> int:
        """Return the optimizer steps of `epochs` passes over `loader`, prepared or not.

        Raises:
            TypeError: `loader` has no length.
        """
        batches = len(loader) if isinstance(loader, PreparedLoader) else self._batches_once_prepared(loader, config)
        return epochs * -(-batches // self._context.accumulation.steps)

    @contextmanager
    def joined(self, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
        """Let ranks with fewer batches take part in the others' last steps; see `Accelerator.join_uneven_inputs`."""
        if self._context.state.num_processes == 1:
            yield
            return
        joinables = list(joinables)
        if sharded := [type(thing).__name__ for thing in joinables if isinstance(thing, Module) and is_sharded(thing)]:
            raise ValueError(
                f"join_uneven_inputs: {sharded[0]} is sharded (FSDP), so each forward needs all ranks, and torch "
                "cannot let some of them be done earlier. Keep even_batches=True, which fills up the last round"
            )
        joined = [thing for thing in joinables if isinstance(thing, Joinable)]
        with ExitStack() as stack:
            for loader in self._context.prepared.loaders:
                stack.enter_context(loader.joined(even_batches))
            if joined:
                stack.callback(_leave, joined)
            stack.enter_context(Join(joined, enable=bool(joined), throw_on_early_termination=False))
            yield

    def prepare_loader(
        self,
        loader: DataLoader[Any],
        move: bool,
        config: DataLoaderConfiguration,
        slice_function: SliceFunction | None = None,
    ) -> PreparedLoader:
        """Return `loader` prepared; see `Accelerator.prepare_data_loader`. Collective."""
        if isinstance(loader, PreparedLoader):
            if loader.accumulation is self._context.accumulation:
                return remembered(loader, self._context.prepared.loaders)
            loader = loader.loader
        self._agree_on_names()
        prepared = prepare_loader(
            loader,
            self._context.world,
            self._context.accumulation,
            config,
            self._facts(loader),
            self._context.device,
            moves=move,
            slice_function=slice_function,
        )
        return remembered(prepared, self._context.prepared.loaders)

    def _facts(self, loader: DataLoader[Any]) -> list[LoaderFacts]:
        context = self._context
        if context.state.num_processes == 1:
            return [LoaderFacts.of(loader)]
        return LoaderFacts.of_all_ranks(loader, context.collectives, context.device)

    def _batches_once_prepared(self, loader: DataLoader[Any], config: DataLoaderConfiguration) -> int:
        """Return this rank's number of batches, without preparing `loader`."""
        batches, rank, ranks = len(loader), self._context.state.process_index, self._context.state.num_processes
        if config.split_batches:
            return batches
        rounds, extra = divmod(batches, ranks)
        if loader.drop_last:
            return rounds
        return rounds + (bool(extra) if config.even_batches else rank < extra)


def _leave(joined: Sequence[Joinable]) -> None:
    """End the agreement of torch's `Join`, which it leaves on: later forwards would wait for a forward of all ranks."""
    for joinable in joined:
        joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


def _refuse_untrained(models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse to train a quantised model of which nothing is trained.

    Raises:
        ValueError: An optimizer has parameters of one of `models`, and none of them needs a gradient.
    """
    for optimizer in optimizers:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(each.requires_grad for each in parameters):
            continue
        own = set(map(id, parameters))
        for model in models:
            if own.intersection(map(id, model.parameters())) and is_quantised(model):
                raise ValueError(
                    f"nothing of {type(model).__name__} is trained: its weights are quantised, which take no gradient, "
                    "and there are no adapters beside them. Before the optimizer is made: model = "
                    "get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))"
                )
