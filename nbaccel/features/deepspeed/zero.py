"""ZeroPartitioned: a model, its gradients and its optimizer's states in DeepSpeed's partitions (ZeRO). Runs in ranks.

DeepSpeed's engine reduces gradients, steps and casts. What it would count by itself is decided here as with every other
strategy: the accumulation window is ours, the loss is divided by us, and the engine is told which backward ends a step.
The engine joins the process group that exists. The program's optimizer stays its own object, so schedulers follow it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import barrier, broadcast
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.events import CollectiveEntered, emit
from nbaccel.base.task_end import before_results_leave
from nbaccel.base.world import World
from nbaccel.errors import CannotSplit, CollectiveMismatch, NotPrepared
from nbaccel.features.deepspeed import partitions
from nbaccel.features.deepspeed.ds_config import filled
from nbaccel.features.deepspeed.facts import Facts
from nbaccel.features.deepspeed.half_engine import HALVES, EnginePrecision, compute_in_half, refuse_precision
from nbaccel.features.deepspeed.native_build import before_builds, import_deepspeed, named_locks
from nbaccel.features.deepspeed.optimizer_probe import refuse_optimizer, refuse_types
from nbaccel.features.deepspeed.plugin import AUTO, DeepSpeedPlugin, DummyOptim, DummyScheduler
from nbaccel.features.deepspeed.program_changes import NotAtTheEnd, ProgramChanges, guarded_engine
from nbaccel.features.deepspeed.reduced_parts import ReducedParts
from nbaccel.train.checkpoint.model_weights import with_tied
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.step.precision import Precision, Taken
from nbaccel.train.strategies.norm_statistics import running_statistics
from nbaccel.train.strategies.single import INSTEAD, Strategy, without_compile

if TYPE_CHECKING:
    from nbaccel.features.micro_batches.lent_gradients import Gradients

__all__ = ["ZeroPartitioned"]

_ONE_MODEL = (
    "DeepSpeed trains one model with one optimizer in a run, and this would be the second: train both with "
    "strategy='fsdp' or 'ddp'. A model that is only evaluated needs no optimizer, and may be prepared beside it"
)
_ENDED = (
    "DeepSpeed's part in this training is over: at the end of a cell or function, and in end_training, the model "
    "becomes a whole and plain one, which each rank would train by itself; free_memory gives the model up. Prepare "
    "one, before the loop:\n"
    "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
)
_ONE_BACKWARD = (
    "accelerator.backward: the second one for one step, and DeepSpeed with an optimizer on the host would forget the "
    "first. Add the losses and call it once, use accelerator.accumulate, or leave offload_optimizer_device out"
)
_AFTER_A_WINDOW = (
    "accelerator.backward under no_sync, after one that ended its window and before the step: DeepSpeed would lose one "
    "of them. Step first, or put no_sync around all backwards but the last"
)
_NVME = (
    "offload_optimizer_device or offload_param_device 'nvme': no step of it has been proven right here, and clipping "
    "would do nothing. Use 'cpu'"
)
_TOGETHER = "model, optimizer = accelerator.prepare(model, optimizer)"


class ZeroPartitioned(Strategy):
    """DeepSpeed's ZeRO 1, 2 or 3 over all ranks, also over a single one, whose states may be on the host.

    With stage 3 every forward, evaluation included, gathers parameters from all ranks: all ranks have to call it.
    """

    has_peers = True
    saves_together = True
    serves_one_process = True
    holds_gradients = False
    leaves_only_parts = True
    distributed_type = "DEEPSPEED"
    plugin_class = DeepSpeedPlugin

    def __init__(
        self, world: World, device: torch.device, handlers: Handlers | None = None, plugin: Any = None
    ) -> None:
        super().__init__(world, device, handlers, plugin or DeepSpeedPlugin())
        self._precision: Precision = Precision(device, self.handlers)
        self._engine: Any = None
        self._optimizer: Optimizer | None = None
        self._groups: list[list[Tensor]] = []
        self._placed: set[int] = set()  # ids of parameters of models that no engine trains
        self._batch_size: int | None = None
        self._window, self._moves = 1, 1
        self._schedules: list[DummyScheduler] = []
        self._hooks: list[Any] = []
        self._own_group: Any = None
        self._changes: Any = None
        self._reduced: Any = None
        self._set_aside: list[Tensor] = []  # parameters that no optimizer has, which are not trained meanwhile
        self._in_full: dict[str, Tensor] = {}  # what no optimizer trains, as it was before it was cast
        self._has_ended = False
        self._former: WeakSet[Optimizer] = WeakSet()  # optimizers of engines that have ended
        self._last_norm = torch.zeros((), device=device)
        self._is_due = False  # a whole window of gradients waits for its step
        self._has_gradients = False  # there was a backward since gradients were zeros
        self._statistics: list[Tensor] = []

    @property
    def forwards_are_collective(self) -> bool:  # type: ignore[override]
        """True with stage 3, in which a forward gathers parameters."""
        return bool(self.plugin.zero_stage == 3)

    def precision(self, name: str) -> Precision:
        self._precision = EnginePrecision(self.plugin.precision_of(name), self.device, self.handlers, self)
        return self._precision

    # -- prepare

    def expect(self, objects: Sequence[Any], window: int = 1, moves: int = 1) -> None:
        self._window, self._moves = window, moves
        for thing in objects:
            size = getattr(thing, "batch_size", None) or getattr(
                getattr(thing, "batch_sampler", None), "batch_size", None
            )
            if self._batch_size is None and isinstance(size, int) and not isinstance(thing, Module):
                self._batch_size = size
        schedules = [thing for thing in objects if isinstance(thing, DummyScheduler)]
        if (schedules and self._engine is not None) or len(schedules) > 1:
            raise NotImplementedError(
                "DeepSpeed moves one DummyScheduler, which it has to know when it cuts the model: "
                "model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)"
            )
        self._schedules = schedules or self._schedules

    def setup(self, models: Sequence[Module], optimizers: Sequence[Optimizer], moves: Sequence[bool]) -> list[Module]:
        ready: list[Module] = []
        for model, move in zip(map(self.unwrap, models), moves, strict=True):
            owner = self._optimizer_of(model, optimizers)
            if owner is None:
                if move:
                    self.place(model)
                self._placed |= set(map(id, model.parameters()))
                ready.append(model)
            elif self._engine is not None:
                raise NotImplementedError(f"prepare {type(model).__name__}: {_ONE_MODEL}.")
            elif others := _parameters_of_others(model, owner):
                raise NotImplementedError(
                    f"prepare {type(model).__name__}: {type(owner).__name__} has {others} parameters that are not this "
                    "model's, and DeepSpeed trains those of one model: put the modules of both into one, whose forward "
                    "calls them, or use strategy='fsdp' or 'ddp'"
                )
            else:
                try:
                    ready.append(self._start_engine(without_compile(model), owner))
                except BaseException:
                    if self._engine is None:
                        self._train_again()
                        self._leave_own_group()
                    raise
        for optimizer in optimizers:
            if optimizer is not self._optimizer:
                self._refuse_late(optimizer)
        return ready

    def _optimizer_of(self, model: Module, optimizers: Sequence[Optimizer]) -> Optimizer | None:
        own = set(map(id, model.parameters()))
        found = [
            optimizer
            for optimizer in optimizers
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        ]
        if len(found) > 1:  # optimizers of a former stage of the training are known as well
            found = [optimizer for optimizer in found if optimizer not in self._former] or found
        if len(found) > 1:
            raise NotImplementedError(
                f"prepare {type(model).__name__} with {len(found)} optimizers: {_ONE_MODEL}. One optimizer may have "
                "several groups of parameters, each with its learning rate."
            )
        return found[0] if found else None

    def _refuse_late(self, optimizer: Optimizer) -> None:
        if any(id(parameter) in self._placed for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} was prepared after its model, and DeepSpeed cuts a model's parameters "
                f"together with the states of its optimizer: prepare both in one call,\n    {_TOGETHER}"
            )

    def _start_engine(self, model: Module, optimizer: Optimizer) -> Module:
        refuse_types(model, self._precision.name, self.plugin.zero_stage)
        if not isinstance(optimizer, DummyOptim):
            refuse_optimizer(optimizer)
        if "nvme" in (self.plugin.offload_optimizer_device, self.plugin.offload_param_device):
            raise NotImplementedError(_NVME)
        schedule = self._schedules[-1] if self._schedules else None
        make = None if schedule is None else schedule.lr_scheduler_callable
        if make is not None and "scheduler" in self.plugin.hf_ds_config.config:
            raise ValueError(
                "DummyScheduler(lr_scheduler_callable=…), and the DeepSpeed configuration has a scheduler: leave one "
                "of them out"
            )
        facts = Facts.of(model, optimizer, schedule, self._moves)
        world_size = self.world.world_size
        config = filled(self.plugin, self._precision.name, self._batch_size, world_size, self._window, facts)
        deepspeed = import_deepspeed(self.device)
        refuse_precision(self._precision.name, self.device)
        self._own_group = partitions.join_group(self.world)
        before_builds(config, self.world)
        if self.world.is_distributed:
            barrier()  # no rank builds before the way is clear
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        is_own = not isinstance(optimizer, DummyOptim)
        state = optimizer.state_dict()
        optimizer.state.clear()
        own = {id(parameter) for group in self._groups for parameter in group}
        self._set_aside = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
        for parameter in self._set_aside:
            parameter.requires_grad_(False)
        self._in_full = partitions.values_in_full(model, HALVES.get(self._precision.name))
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))  # without it DeepSpeed asks MPI
        with named_locks(), partitions.scalars_sent(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports only now
            engine, *_ = deepspeed.initialize(
                args=SimpleNamespace(device_rank=self.device.index or 0),
                model=model,
                optimizer=optimizer if is_own else None,
                model_parameters=optimizer.groups_as_given() if isinstance(optimizer, DummyOptim) else None,
                config=config,
                dist_init_required=False,
            )
        self.plugin.deepspeed_config = config
        if isinstance(optimizer, DummyOptim):
            optimizer.take(engine.basic_optimizer)
        optimizer.zero_grad = self._zero_gradients  # type: ignore[method-assign]
        self._hooks = compute_in_half(model, self._precision)
        self._engine, self._optimizer, self._has_ended = guarded_engine(engine), optimizer, False
        before_results_leave(self._make_whole, self.forget)
        if is_own:
            partitions.keep_optimizer(engine, optimizer)
        self._changes = ProgramChanges(
            engine,
            optimizer,
            partitions.step_in_place(engine),
            partitions.write_parts,
            lambda state, strict: self.load_state_dict(engine, dict(state), strict=strict),
            lambda state: self.load_optimizer_state_dict(optimizer, dict(state)),
        )
        if state["state"]:
            partitions.load_whole_optimizer(engine, self._groups, state)
        if make is not None:
            engine.lr_scheduler = make(engine.basic_optimizer)  # the engine moves it in its step
        if schedule is not None:
            schedule.take(engine.lr_scheduler)
        self._reduced = ReducedParts(engine, self.device)
        self._statistics = list(running_statistics([model]))
        engine.set_gradient_accumulation_boundary(True)
        model = engine
        return model

    def keeps_together(self, model: Module) -> bool:
        return self._is_engine(model)

    def finds_parallel(self) -> bool:
        return self._engine is not None

    def _is_engine(self, model: Module) -> bool:
        return self._engine is not None and without_compile(model) in (self._engine, self._engine.module)

    # -- a step

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        return NotAtTheEnd(self._engine) if self._is_engine(model) else nullcontext()

    def alone(self, model: Module) -> AbstractContextManager[Any]:
        raise NotImplementedError(
            "find_batch_size: DeepSpeed reduces gradients in its backward, and a trial step cannot be undone: choose "
            "the batch size with strategy='fsdp', or with find_executable_batch_size"
        )

    def lend_gradients(self, models: Sequence[Module], collectives: Collectives) -> Gradients:
        raise CannotSplit(f"forward_backward leads no step whose gradients DeepSpeed keeps. {INSTEAD}")

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self._engine is None or not loss.requires_grad:
            if self._has_ended:
                raise NotPrepared(_ENDED)
            loss.backward(**kwargs)
            return
        engine, kept = self._engine, []
        ends_window = bool(engine.is_gradient_accumulation_boundary())
        if self._is_due:
            if self.plugin.offload_optimizer_device != "none":
                raise NotImplementedError(_ONE_BACKWARD)
            if not ends_window:
                raise NotImplementedError(_AFTER_A_WINDOW)
            if self.plugin.zero_stage < 3:  # the engine would put the new gradients in the place of these
                kept = partitions.gradients(engine)
        goes_on, self._has_gradients = self._has_gradients, True
        self._changes.before_backward()
        engine.run_backward(loss, **kwargs)
        if goes_on and ends_window:
            partitions.complete_window(engine)
        for new, old in zip(partitions.gradients(engine), kept, strict=True) if kept else ():
            if new is not old:
                new.add_(old)
        self._is_due = ends_window

    def step(self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> tuple[Any, Taken]:
        if optimizer is not self._optimizer:
            return super().step(optimizer, precision, closure)
        if closure is not None:
            raise ValueError("DeepSpeed cannot step with a closure (LBFGS): use strategy='fsdp' or 'ddp'")
        engine = self._engine
        if not self._is_due:
            return None, True
        self._changes.before_step()
        self._reduced.begin_step()
        engine.take_step()
        self._reduced.end_step()
        partitions.zero_gradients(engine)  # what the next window does not use would move by them again
        self._is_due = self._has_gradients = False
        if self._statistics and self.world.is_distributed:  # rank 0's, as under DDP
            for buffer in self._statistics:
                broadcast(buffer, 0)
        return None, engine.was_step_applied()

    def _zero_gradients(self, set_to_none: bool = True) -> None:
        """Do what ``optimizer.zero_grad`` does, also where the engine would keep gradients: of a step not taken."""
        self._engine.optimizer.zero_grad(set_to_none)
        if self._has_gradients:
            partitions.zero_gradients(self._engine)
        self._is_due = self._has_gradients = False

    def norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        if self._engine is None:
            return super().norm(parameters, norm_type)
        if self._engine.is_gradient_accumulation_boundary():
            self._last_norm = partitions.gradient_norm(self._engine, norm_type, self.device)
        return self._last_norm  # within a window no rank has its gradients yet

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        if self._engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self._refuse_some_of_all("clip_grad_norm_", parameters)
        total = self.norm((), norm_type)
        self._clip_by_program()
        if clips := float(self._engine.gradient_clipping()):
            if (max_norm, norm_type) != (clips, 2):
                raise ValueError(
                    f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}), and the DeepSpeed configuration "
                    f"says gradient_clipping: {clips}, which is of the norm 2: make them equal, or leave one out"
                )
            return total  # the engine clips in its step, once
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for piece in partitions.gradients(self._engine):
            piece.mul_(factor.to(piece.device))
        return total

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        if self._engine is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        self._refuse_some_of_all("clip_grad_value_", parameters)
        self._clip_by_program()
        if clips := float(self._engine.gradient_clipping()):
            raise ValueError(
                f"clip_grad_value_, and the DeepSpeed configuration says gradient_clipping: {clips}: leave one of "
                "them out"
            )
        most = clip_value * float(self._engine.optimizer.loss_scale)
        for piece in partitions.gradients(self._engine):
            piece.clamp_(-most, most)

    def _clip_by_program(self) -> None:
        """Leave clipping to the program, which clips by itself, if its configuration left it open."""
        if self.plugin.gradient_clipping == AUTO:
            self._engine._config.gradient_clipping = self._engine.optimizer.clip_grad = 0.0

    def _refuse_some_of_all(self, call: str, parameters: Iterable[Tensor]) -> None:
        own = {id(parameter) for group in self._groups for parameter in group if parameter.requires_grad}
        if left := own - set(map(id, parameters)):
            raise NotImplementedError(
                f"{call}: DeepSpeed's gradients are clipped together, and {len(left)} of {len(own)} trained parameters "
                "are not among these: pass model.parameters(), or use strategy='fsdp'"
            )

    # -- states

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's own scaler of losses; None before there is an engine."""
        return None if self._engine is None else getattr(self._engine.optimizer, "loss_scaler", None)

    def state_dict(self, model: Module) -> dict[str, Any]:
        if not self._is_engine(model):
            return super().state_dict(model)
        self._meet("get_state_dict or save_state")
        return partitions.whole_model(self._engine, self._in_full, self.world.is_local_main_process)

    def load_state_dict(self, model: Module, state: dict[str, Any], **options: Any) -> None:
        if self._is_engine(model):
            self._meet("load_state or load_state_dict")
            partitions.load_whole_model(self._engine, self._in_full, state, options.get("strict", True))
        else:
            super().load_state_dict(model, with_tied(self.unwrap(model), state), **options)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        if optimizer is not self._optimizer:
            return super().optimizer_state_dict(optimizer)
        self._meet("save_state")
        return partitions.whole_optimizer(self._engine, self._groups, self.world.is_main_process)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if optimizer is self._optimizer:
            partitions.load_whole_optimizer(self._engine, self._groups, state)
        else:
            super().load_optimizer_state_dict(optimizer, state)

    def forget(self) -> None:
        if self._engine is not None:
            self._end_watching()
            self._engine.destroy()
            self._let_go()

    def release(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        self._make_whole()

    def _make_whole(self) -> None:
        """Make the trained model and its optimizer whole and plain on every rank. Collective."""
        if self._engine is None or self._optimizer is None:
            return
        self._meet("the end of the training")
        self._end_watching()
        new = partitions.dissolve(self._engine, self._optimizer, self._groups, self._in_full)
        self._set_aside = [new[id(parameter)] for parameter in self._set_aside]
        self._let_go()

    def _meet(self, call: str) -> None:
        """Wait for every rank to come here: the engine's exchanges that follow would take anything for their own.

        Raises:
            CollectiveMismatch: A rank does something else.
        """
        if not self.world.is_distributed:
            return
        emit(CollectiveEntered(call))
        calls = process_group.exchange.all(call, call)
        if len(set(calls)) > 1:
            sides = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(calls))
            raise CollectiveMismatch(
                f"the ranks met in different calls, and DeepSpeed gathers its pieces from all of them; nothing was "
                f"exchanged.\n{sides}\n  Every rank must make the same calls: one under `if is_main_process` belongs "
                "outside of it."
            )

    def _end_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._changes is not None:
            self._changes.end()

    def _let_go(self) -> None:
        self._train_again()
        if self._optimizer is not None:
            vars(self._optimizer).pop("zero_grad", None)
            self._former.add(self._optimizer)
        self._engine = self._optimizer = self._changes = self._reduced = None
        self._groups, self._hooks, self._statistics, self._in_full = [], [], [], {}
        self._placed, self._schedules, self._batch_size = set(), [], None
        self._is_due = self._has_gradients = False
        self._has_ended = True
        self._leave_own_group()

    def _train_again(self) -> None:
        for parameter in self._set_aside:
            parameter.requires_grad_(True)
        self._set_aside = []

    def _leave_own_group(self) -> None:
        own, self._own_group = self._own_group, None
        partitions.leave_group(own)

    def unwrap(self, model: Module) -> Module:
        plain = without_compile(model)
        return plain.module if is_engine(plain) else plain  # type: ignore[return-value]


def _parameters_of_others(model: Module, optimizer: Optimizer) -> int:
    own = set(map(id, model.parameters()))
    return sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])


def is_engine(model: Module) -> bool:
    """Return whether a model is an engine of DeepSpeed, in use or dissolved; without an import."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
