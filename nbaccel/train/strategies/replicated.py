"""Replicated: every rank holds the whole model, torch's DistributedDataParallel averages gradients. Runs in ranks."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbaccel.base.exchange_time import EVERY, MEASURED, exchange_clock
from nbaccel.base.quantised import base_of
from nbaccel.base.task_end import before_results_leave
from nbaccel.errors import CollectiveMismatch
from nbaccel.features import feature
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.distributed.store_exchange import StoreExchange
from nbaccel.train.distributed.transport import collective_counter, group_timeout
from nbaccel.train.step.kwargs_handlers import DDPCommunicationHookType
from nbaccel.train.strategies.ddp_options import explain_twice_ready, explain_unused
from nbaccel.train.strategies.single import IGNORED, Strategy, is_parallel, waiting_names, without_compile

if TYPE_CHECKING:
    from nbaccel.features.micro_batches.gradient_buckets import Buckets
    from nbaccel.features.micro_batches.lent_gradients import Gradients

__all__ = ["Reduction", "Replica", "Replicated", "living_modules"]

_NO_BUFFERS = "!tensors.empty() INTERNAL ASSERT"
"""In DDP's error, before it sends anything, for a model that has lost its last buffers: `prune.remove` takes masks, and
leaves the parameter that the reducer knows, under another name."""

_SHOWN = 4
"""Names in an error."""

_NOT_ANNOUNCED = "not announced"
"""A doubt of `Reduction`: a backward that should have synchronised came from no forward of the model."""


_NOTHING_HOOKED = (torch.empty(0, device="cpu"), None)


# torch notices an unfinished backward only at the next forward: https://github.com/pytorch/pytorch/issues/128949.
class Reduction:
    """State of the gradients of one model in DDP, as far as it is known without looking at them.

    A forward with gradients announces a backward, which DDP's reducer answers by averaging. Gradients of a backward
    that nothing has announced stay in their rank, and so do those of one in which a parameter got none.

    Attributes:
        parameters: Those that the reducer averages.
        watched: Those of them that show whether a backward has reached the model. The reducer waits for all, so one
            shows it for a backward that was announced.
        is_pending: A forward has announced a backward that has not come yet.
        is_held: A forward has run since the last reduction whose backward is to stay in its rank.
        doubt: Why nobody may have averaged the present gradients, `_NOT_ANNOUNCED` or the reducer's own error; else
            empty.
        stepped: Ids of the optimizers that have used this reduction, where the program called ``loss.backward()``
            itself.
        hooked: Gives the parameters in turn, without end, each with the node of autograd that adds up its gradient and
            has the reducer's hook.
    """

    __slots__ = ("doubt", "hooked", "is_held", "is_pending", "parameters", "stepped", "watched")

    def __init__(self, replica: DistributedDataParallel) -> None:
        named, ignored = replica.module.named_parameters(), replica.parameters_to_ignore
        self.parameters = tuple(each for name, each in named if each.requires_grad and name not in ignored)
        finds_unused = replica.find_unused_parameters or replica.static_graph
        self.watched = self.parameters if finds_unused else self.parameters[:1]
        self.is_pending = self.is_held = False
        self.doubt = ""
        self.stepped: set[int] = set()
        with torch.enable_grad():
            self.hooked = itertools.cycle([(each, _accumulator(each)) for each in self.parameters])

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self.__slots__}
        return {**kept, "hooked": itertools.cycle(())}  # a copy of the model has nodes of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def has_lost_hooks(self) -> bool:
        """Return whether a parameter has a new node, without the reducer's hook; gradients must be on.

        Autograd makes one for new data of another type or on another device: a model that is cast, or moved to the host
        and back, would be trained without averages, and the reducer does not notice (Lightning#17937). As a rule all
        parameters are moved together, so each forward looks at one of them.
        """
        parameter, node = next(self.hooked, _NOTHING_HOOKED)
        return _accumulator(parameter) not in (node, None)

    @property
    def is_watched_whole(self) -> bool:
        return self.watched is self.parameters

    def marks(self) -> list[tuple[Any, int]]:
        """Return marks of the watched gradients, which differ once a backward has reached them."""
        gradients = [parameter.grad for parameter in self.watched]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def is_reached_since(self, marks: Sequence[tuple[Any, int]]) -> bool:
        """Return whether a backward has reached the watched gradients since these `marks`."""
        return any(
            now is not before or number != earlier
            for (now, number), (before, earlier) in zip(self.marks(), marks, strict=True)
        )

    def judge(self, replica: DistributedDataParallel) -> None:
        """Note that a backward has reached the model; read from the reducer whether it has averaged everything."""
        if not self.is_pending:
            self.doubt = self.doubt or _NOT_ANNOUNCED
            return
        self.is_pending = self.is_held = False
        self.stepped.clear()
        try:
            replica.reducer._check_reducer_finalized()
        except RuntimeError as error:
            self.doubt = str(error)
        else:
            self.doubt = ""


def _accumulator(parameter: Tensor) -> Any:
    """Return the node of autograd that adds up the gradient of `parameter`; None if that needs none."""
    function = parameter.view_as(parameter).grad_fn
    return None if function is None else function.next_functions[0][0]


def _announce(module: Any, inputs: Any = None) -> None:
    """Note that the reducer of `module` expects a backward; `Replica` does it by itself in a forward."""
    reduction: Reduction | None = vars(module).get("reduction")  # a DDP module that was never prepared has none
    if reduction is not None and torch.is_grad_enabled() and not reduction.has_lost_hooks():
        if module.require_backward_grad_sync:
            reduction.is_pending = True
        else:
            reduction.is_held = True


class Replica(DistributedDataParallel):
    """DDP with parameter names in its errors, which can lend its gradients.

    Attributes:
        lent_to: The present user of the gradients; DDP's own buckets are freed then. A forward with gradients outside
            of `forward_backward` takes them back.
        reduction: What is known of its gradients.
        named_module_buffers: The buffers that DDP sends from rank 0 with a forward.
        changes: How often these have become others.
    """

    lent_to: Buckets | None = None

    def __init__(self, module: Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reduction = Reduction(self)
        count = collective_counter()
        self.number = None if count is None else count()  # preparing is collective: the same on all ranks
        self.changes = 0

    def _assign_modules_buffers(self) -> None:
        """Collect the buffers as torch does in each forward, but let ranks agree before they send others than before.

        gloo ends the process where a rank gets more bytes than it expects, and fills the rest with anything where it
        gets fewer.
        """
        named = {name: buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore}
        known: dict[str, Tensor] | None = vars(self).get("named_module_buffers")  # none while it is made
        if known is not None and named.keys() != known.keys():
            sent = {name: named.get(name, buffer) for name, buffer in known.items()}
            if "reducer" not in self.__dict__:  # it is made anew, by this rank alone
                named = sent
            elif self.number is not None and not self._join_config.enable:
                self._agree_on_buffers(named, sent)
        self.named_module_buffers, self.modules_buffers = named, list(named.values())

    def _agree_on_buffers(self, named: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
        """Return once every rank has the buffers `named`. Collective with ranks that send what they had, `sent`.

        Raises:
            CollectiveMismatch: A rank has other ones.
        """
        self.changes += 1
        place = dist.PrefixStore(f"nbaccel/buffers/{self.number}/{self.changes}", c10d._get_default_store())
        mine, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        exchange = StoreExchange(place, mine, size, group_timeout())
        exchange.lay("\n".join(sorted(named)))  # before rank 0 sends: the others find its word
        self.named_module_buffers, self.modules_buffers = sent, list(sent.values())
        self._sync_module_buffers(0)  # type: ignore[no-untyped-call]
        if mine and self.device_type == "cpu" and not exchange.has_laid(0):  # and its buffers have come
            raise CollectiveMismatch(_unlike_buffers(self.module, {mine: set(named), 0: set(sent)}))
        apart = ", ".join(sorted(named.keys() ^ sent.keys())[:_SHOWN])
        texts = exchange.texts(f"a forward of {type(self.module).__name__} with new or fewer buffers ({apart})")
        for rank, theirs in enumerate(texts):
            if theirs.splitlines() != sorted(named):
                raise CollectiveMismatch(
                    _unlike_buffers(self.module, {mine: set(named), rank: set(theirs.splitlines())})
                )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.lent_to is not None:
            if self.lent_to.is_busy or not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            self.lent_to.give_back()
        if torch.is_grad_enabled():
            # `Reduction.has_lost_hooks`, without a call between: each step comes here.
            parameter, node = next(self.reduction.hooked, _NOTHING_HOOKED)
            function = parameter.view_as(parameter).grad_fn
            if function is not None and function.next_functions[0][0] is not node:
                self._hook_anew()
            if self.require_backward_grad_sync:
                self.reduction.is_pending = True
            else:
                self.reduction.is_held = True
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _NO_BUFFERS in str(error) and not self.modules_buffers:
                return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # it knows now
            explained = explain_unused(str(error), self.module, self.reduction.parameters)
            if explained is None:
                raise
            raise explained from error

    def no_sync(self) -> Any:
        """Return DDP's own, without an effect for a static graph.

        Its reducer has to see the first backward, and asserts that otherwise with an internal error. A backward that
        averages what has been added up so far gives the same gradients.
        """
        return nullcontext() if self.static_graph else super().no_sync()

    def _hook_anew(self) -> None:
        """Let a new reducer hook the parameters as they are now; not collective."""
        self.free_buckets()
        self.build_buckets()
        for hook, state in self._comm_hooks:
            torch.distributed._register_comm_hook(self.reducer, state, hook)

    def free_buckets(self) -> None:
        """Drop DDP's reducer, which owns its buckets and its hooks in autograd."""
        self.__dict__.pop("reducer", None)
        self.__dict__.pop("logger", None)  # owns the reducer too
        self.reduction.is_pending = False  # nobody averages what an earlier forward has announced

    def build_buckets(self) -> None:
        """Undo `free_buckets`; not collective. Communication hooks must be registered again."""
        self.lent_to = None
        self.__setstate__({})  # torch's own way to make a new reducer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.reduction = Reduction(self)  # of the new reducer, with what is trained now

    def __getstate__(self) -> dict[str, Any]:
        if self.lent_to is None:
            state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
            return state
        return {name: value for name, value in self.__dict__.items() if name not in ("process_group", "lent_to")}


def _unlike_buffers(model: Module, buffers: Mapping[int, set[str]]) -> str:
    """Return the error for two ranks whose models have other `buffers` since they were prepared."""
    (mine, own), (rank, theirs) = buffers.items()
    apart = [
        f"rank {one} has {', '.join(sorted(more)[:_SHOWN])}{', ...' * (len(more) > _SHOWN)}, rank {other} has not"
        for one, other, more in ((mine, rank, own - theirs), (rank, mine, theirs - own))
        if more
    ]
    return (
        f"the ranks have different buffers in {type(model).__name__} since it was prepared: {'; '.join(apart)}. DDP "
        "sends the buffers of rank 0 to all ranks in each forward, so they have to be registered, or deleted, in "
        "all ranks before the same forward. A tensor of one rank alone may be a plain attribute."
    )


def _drop_held_of(reference: weakref.ref[Replicated]) -> None:
    if (strategy := reference()) is not None:
        strategy.drop_held()


class Replicated(Strategy):
    """DDP. Also understands DDP modules that the user made, and anything else that has a `no_sync`."""

    has_peers = True

    _awaiting: tuple[weakref.ref[Module], ...] = ()
    """Models whose gradients the next backward synchronises, although their forward may have run under `no_sync`."""

    _looks_closely = False
    """True if a backward is looked at before, too, since it may reach some models and not others."""

    def setup(self, models: Sequence[Module], optimizers: Sequence[Optimizer], moves: Sequence[bool]) -> list[Module]:
        ready = [self._replicated(model) for model in super().setup(models, optimizers, moves)]
        if ready and not self.replicas:
            before_results_leave(*[partial(_drop_held_of, weakref.ref(self))] * 2)
        for model in ready:
            self._watch(without_compile(model))
        return ready

    def drop_held(self) -> None:
        """Drop gradients of a window that was not ended: nobody has averaged them, and rank 0's would leave the run."""
        held = [each for reference in self.replicas if (each := reference()) is not None and each.reduction.is_held]
        dropped = [each for replica in held for each in replica.reduction.parameters if each.grad is not None]
        for parameter in dropped:
            parameter.grad = None
        for replica in held:
            replica.reduction.is_held = False
        if dropped and self.world.is_main_process:
            warn_user(
                "the run ends within a window of gradient_accumulation_steps, or of no_sync. Its gradients are of "
                "single ranks, averaged by nobody, so they are dropped: parameter.grad is None."
            )

    def _watch(self, model: Module) -> None:
        """Watch the reductions of `model`, if it is DDP's: ours, or one that the program has made."""
        if not isinstance(model, DistributedDataParallel):
            return
        if not hasattr(model, "reduction"):
            vars(model)["reduction"] = Reduction(model)
            model.register_forward_pre_hook(_announce)
        known = [reference for reference in self.replicas if reference() not in (None, model)]
        self.replicas = (*known, weakref.ref(model))
        self._looks_closely = len(self.replicas) > 1

    def _replicated(self, model: Module) -> Module:
        present = [parameter for parameter in model.parameters() if not parameter.is_meta]
        if is_parallel(model) or not any(parameter.requires_grad for parameter in present):
            return model  # DDP refuses a module without gradients, and there is nothing to average
        devices = {parameter.device for parameter in present}
        is_on_one = len(devices) == 1 and next(iter(devices)).type == "cuda"  # DDP takes no list for one on several
        with _ignored(model, {*waiting_names(model), *base_of(model)}):
            replica = Replica(model, device_ids=[self.device] if is_on_one else None, **self._options())
        self._compress(replica)
        return replica

    def _compress(self, replica: Replica) -> None:
        options = self.handlers.ddp
        if {options.comm_hook, options.comm_wrapper} != {DDPCommunicationHookType.NO}:
            from nbaccel.train.strategies.ddp_options import compress_gradients  # torch's hooks import slowly

            compress_gradients(replica, options, self.device)

    def _options(self) -> dict[str, Any]:
        """Return the options for DDP: defaults are its own, and some options change names between torch versions."""
        chosen = self.handlers.ddp.to_kwargs()
        return {name: value for name, value in chosen.items() if not name.startswith("comm_")}

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self._awaiting:
            self._expect_gradients(loss)
        before = self._marks() if self._looks_closely else None
        # On the CPU this thread computes, and rests while torch's reducer waits for the other ranks.
        exchange_clock.backwards += 1
        is_measured = loss.is_cpu and exchange_clock.backwards % EVERY == MEASURED
        began_s, busy_s = (time.perf_counter(), time.thread_time()) if is_measured else (0.0, 0.0)
        try:
            loss.backward(**kwargs)
        except RuntimeError as error:
            explained = explain_twice_ready(error, _replicated_modules)
            if explained is None:
                raise
            raise explained from error
        if is_measured:
            ended = time.perf_counter(), time.thread_time()
            exchange_clock.measured.append((began_s, busy_s, *ended, exchange_clock.backwards))
        # Without a call between: it is looked at after every backward.
        for reference in self.replicas:
            replica = reference()
            if replica is None or not replica.require_backward_grad_sync:
                continue
            reduction = replica.reduction
            if before is not None or not reduction.is_pending:
                self._judge(replica, before)
                continue
            reduction.is_pending = reduction.is_held = False
            try:
                replica.reducer._check_reducer_finalized()
            except RuntimeError as error:
                reduction.doubt = str(error)
            else:
                reduction.doubt = ""

    def _marks(self) -> dict[int, list[tuple[Any, int]]]:
        """Return the marks of each model's gradients, by the model's id."""
        living = [replica for reference in self.replicas if (replica := reference()) is not None]
        return {id(replica): replica.reduction.marks() for replica in living}

    def _judge(self, replica: Any, before: Mapping[int, Sequence[tuple[Any, int]]] | None) -> None:
        """Judge the backward that has just ended, if it may have reached `replica`."""
        reduction: Reduction = replica.reduction
        is_known = before is not None and (reduction.is_pending or reduction.is_watched_whole)
        if before is None or not is_known or reduction.is_reached_since(before[id(replica)]):
            reduction.judge(replica)

    def trust(self, replica: Any) -> None:
        reduction: Reduction = replica.reduction
        reduction.doubt = ""
        reduction.watched = reduction.parameters  # so that backwards that do not reach it raise no doubt any more
        self._looks_closely = True

    def explain_unfinished(self, replica: Any) -> str:
        reduction: Reduction = replica.reduction
        return str(explain_unused(reduction.doubt, replica.module, reduction.parameters) or "")

    def keeps_together(self, model: Module) -> bool:
        if is_parallel(model):
            return True
        # A module around one that is parallel may be trained too: that averages in each backward, held by no `no_sync`.
        parts = [part for part in model.modules() if is_parallel(part)]
        averaged = {id(parameter) for part in parts for parameter in part.parameters()}
        return all(id(parameter) in averaged for parameter in model.parameters() if parameter.requires_grad)

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if isinstance(module, (Replica, DistributedDataParallel)):  # ours first: DDP is abstract, and its check slow
            return module.no_sync() if module.static_graph else _NoReduce(module)
        no_sync = getattr(module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    within_window = no_sync  # without a call between: it is entered in every batch of a window

    def alone(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if isinstance(module, Replica) and module.lent_to is not None:
            return module.lent_to.alone()
        return _Alone(module) if isinstance(module, DistributedDataParallel) else self.no_sync(model)

    @contextmanager
    def apart(self, models: Sequence[Module], collectives: Collectives) -> Iterator[None]:
        replicas = [module for module in map(without_compile, models) if isinstance(module, DistributedDataParallel)]
        for replica in replicas:
            if "reducer" in replica.__dict__:  # otherwise gradients are lent
                replica.reducer._rebuild_buckets()  # what the next forward with gradients would do, with all ranks
            if replica.broadcast_buffers:
                _take_buffers(replica, collectives, self.world.is_main_process)
        with ExitStack() as stack:
            for replica in replicas:
                if isinstance(replica, Replica) and replica.lent_to is not None:
                    # Only the ranks that call the model would take them back.
                    stack.enter_context(replica.lent_to.staying())
                stack.enter_context(_Alone(replica))
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "replicas": (),
            "_awaiting": (),
            "others": None,
        }  # weak references cannot be pickled

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        return _Reduce(module) if isinstance(module, DistributedDataParallel) else nullcontext()

    def await_backward(self, model: Module) -> None:
        self._awaiting = (*self._awaiting, weakref.ref(without_compile(model)))

    def _expect_gradients(self, loss: Tensor) -> None:
        """Prepare the reducer for the forwards of `loss` under `no_sync`, where it expects no gradients."""
        awaiting, self._awaiting = self._awaiting, ()
        for reference in awaiting:
            module = reference()
            if not isinstance(module, DistributedDataParallel) or module.require_forward_param_sync:
                continue  # the last forward has prepared the reducer
            if "reducer" in module.__dict__:  # otherwise gradients are lent
                module.reducer.prepare_for_backward([loss])  # it looks for unused parameters from there
                _announce(module)

    def lend_gradients(self, models: Sequence[Module], collectives: Collectives) -> Gradients:
        lend = feature("gradients of DDP for forward_backward")
        gradients: Gradients = lend(models, collectives, self.handlers.ddp, self.world.is_main_process, self._compress)
        return gradients

    def unwrap(self, model: Module) -> Module:
        module = without_compile(model)
        while isinstance(module, DistributedDataParallel):
            module = without_compile(module.module)
        return module

    def finds_parallel(self) -> bool:
        # Takes some 10 ms, so it is called once, before refusing.
        return any(is_parallel(module) for module in living_modules())


def _take_buffers(replica: DistributedDataParallel, collectives: Collectives, is_main: bool) -> None:
    """Give all ranks the buffers of rank 0, as DDP does in a forward. Collective."""
    named = replica.module.named_buffers()
    buffers = [buffer for name, buffer in named if name not in replica.parameters_to_ignore]
    received = collectives.broadcast(buffers) if buffers else []
    if not is_main:
        with torch.no_grad():
            for buffer, sent in zip(buffers, received, strict=True):
                buffer.copy_(sent)


def _replicated_modules() -> list[Module]:
    return [thing.module for thing in living_modules() if isinstance(thing, Replica)]


def living_modules() -> Iterator[Module]:
    """Yield every module of this process. By type(): a lazy object's ``__class__`` may import its target."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), Module))


@contextmanager
def _ignored(model: Module, names: Collection[str]) -> Iterator[None]:
    """Let a DDP module that is made in the block leave out these parameters and buffers of `model`.

    It neither sends them, at its beginning and in every forward, nor looks at their type: they wait on the host or on
    the disk, or are a quantised base. The attribute is torch's own, and is not left on the program's model, which may
    be a plain one again that another DDP has to take whole.
    """
    if not names:
        yield
        return
    before = getattr(model, IGNORED, ())
    setattr(model, IGNORED, {*before, *names})
    try:
        yield
    finally:
        delattr(model, IGNORED)
        if before:
            setattr(model, IGNORED, before)


class _NoReduce:
    """DDP's own ``no_sync`` without a generator: it is entered for every batch of an accumulation window."""

    __slots__ = ("_before", "_module")

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = self._module.require_backward_grad_sync
        self._module.require_backward_grad_sync = False

    def __exit__(self, *exception: object) -> None:
        self._module.require_backward_grad_sync = self._before


class _Alone:
    """`_NoReduce` without buffers from rank 0: DDP sends them in the first forward after a synchronised one."""

    __slots__ = ("_before", "_module")

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def __enter__(self) -> None:
        module = self._module
        self._before = (module.require_backward_grad_sync, module.require_forward_param_sync)
        module.require_backward_grad_sync = module.require_forward_param_sync = False

    def __exit__(self, *exception: object) -> None:
        self._module.require_backward_grad_sync, self._module.require_forward_param_sync = self._before


class _Reduce:
    """Lets the next backward reduce gradients, although its forward ran under `no_sync`.

    DDP prepares its reducer in the forward, and then only when gradients must be reduced; here that is done later.
    The reducer is given no outputs, hence expects a gradient for every parameter.
    """

    __slots__ = ("_before", "_module")

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def __enter__(self) -> None:
        module = self._module
        self._before = (module.require_backward_grad_sync, module.require_forward_param_sync)
        module.require_backward_grad_sync = module.require_forward_param_sync = True
        module.reducer.prepare_for_backward([])
        _announce(module)

    def __exit__(self, *exception: object) -> None:
        self._module.require_backward_grad_sync, self._module.require_forward_param_sync = self._before
