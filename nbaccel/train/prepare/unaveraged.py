"""UnaveragedGradients: refuse a step with gradients that nobody has averaged, before it is taken. Runs in ranks.

A prepared model averages its gradients, if its forward has announced the backward and every parameter got a gradient.
What it did not average (see `Reduction`), and gradients of parameters that belong to no prepared model, may have been
averaged by the program. So the ranks compare them, through the store of their group and without a collective: equal
ones are stepped with, different ones are the error. A step without such gradients reads none and waits for nobody.

Reasons: docs/design/step.md
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base.quantities import numbers_in_order
from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.step.accumulation import Accumulation
from nbaccel.train.step.gradients import Freshness
from nbaccel.train.strategies import Strategy

__all__ = ["OtherOptimizers", "UnaveragedGradients"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by their bytes. Sums of integers depend neither on the order of the summands nor on the device."""

_SHOWN = 6

_IN_A_WINDOW = "in a window"
"""A doubt of `Reduction`: gradients of a batch after which nothing is averaged yet."""

_NOT_ENDED = "in a window that was not ended"
"""A doubt of `Reduction`: the loop was left in a window."""

_AVERAGE = 'parameter.grad = accelerator.reduce(parameter.grad, "mean")'


class UnaveragedGradients:
    """Looks before each step of one optimizer whether it would use gradients that nobody has averaged.

    A prepared optimizer owns it. The parameters are looked through when the optimizer has others than before, or
    another model was prepared; which of them need no gradient may change between.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, accumulation: Accumulation) -> None:
        self._reference = weakref.ref(optimizer)
        self._strategy = strategy
        self._accumulation = accumulation
        self._known: list[tuple[int, Any, Any]] = []  # of each group: how many parameters, the first and the last one
        self._replicas: tuple[weakref.ref[Any], ...] | None = None  # of the strategy, when it was looked at
        self._stepped: list[weakref.ref[Any]] = []  # those with parameters of this optimizer
        self._outside: list[Parameter] = []  # that no model averages, though a program can train them
        self._steps_sharded = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how to make one that knows nothing yet: weak references cannot be pickled."""
        return type(self), (self._optimizer, self._strategy, self._accumulation)

    def refuse(self, is_ours: bool) -> None:
        """Refuse the step that the optimizer is about to take, if its gradients differ between ranks.

        Args:
            is_ours: Whether `accelerator.backward` made them; otherwise the program's own ``loss.backward()``.

        Raises:
            NotPrepared: Gradients differ between ranks; every rank raises it.
        """
        if self._accumulation.is_local or self._accumulation.is_held:
            return
        optimizer, known = self._reference(), self._known
        assert optimizer is not None  # it steps
        groups = optimizer.param_groups
        is_same = self._replicas is self._strategy.replicas and len(groups) == len(known)
        if is_same:
            for group, (count, first, last) in zip(groups, known):  # noqa: B905  # as many, and strict takes longer
                parameters = group["params"]
                if len(parameters) != count or (count and (parameters[0] is not first or parameters[-1] is not last)):
                    is_same = False
        if not is_same:
            self._look_through()
        is_in_doubt = False
        for reference in self._stepped:
            replica = reference()
            if replica is not None:
                if not is_ours:
                    self._judge_raw(replica)
                if self._accumulation.left and replica.reduction.is_held and not replica.reduction.doubt:
                    replica.reduction.doubt = _NOT_ENDED
                if replica.reduction.doubt:
                    is_in_doubt = True
        for parameter in self._outside:
            if parameter.grad is not None:
                is_in_doubt = True
                break
        if is_in_doubt:
            self._compare()

    def after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure`, which computes gradients, with a look at them afterwards."""

        @functools.wraps(closure, updated=())
        def refusing(*args: Any, **kwargs: Any) -> Any:
            before = self._accumulation.backwards
            loss = closure(*args, **kwargs)
            self.refuse(is_ours=self._accumulation.backwards != before)
            return loss

        return refusing

    # -- what the optimizer steps

    @property
    def _optimizer(self) -> Optimizer:
        """The optimizer, which owns this object or is about to step."""
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def _look_through(self) -> None:
        groups = [group["params"] for group in self._optimizer.param_groups]
        self._known = [(len(each), each[0] if each else None, each[-1] if each else None) for each in groups]
        self._replicas = self._strategy.replicas
        stepped = {id(parameter) for group in groups for parameter in group}
        averaged: set[int] = set()
        self._stepped = []
        for replica in self._living():
            own = set(map(id, replica.reduction.parameters))
            # What the program has told DDP to leave out is its own matter.
            named, ignored = replica.module.named_parameters(), replica.parameters_to_ignore
            averaged |= own | {id(parameter) for name, parameter in named if name in ignored}
            if own & stepped:
                self._stepped.append(weakref.ref(replica))
        sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        self._steps_sharded = any(isinstance(parameter, sharded) for group in groups for parameter in group)
        self._outside = [
            parameter
            for group in groups
            for parameter in group
            if isinstance(parameter, Parameter) and id(parameter) not in averaged and not isinstance(parameter, sharded)
        ]

    def _living(self) -> Iterator[Any]:
        return (replica for reference in self._strategy.replicas if (replica := reference()) is not None)

    def _judge_raw(self, replica: Any) -> None:
        """Judge the gradients of a backward that the program has called itself, and that nobody has looked at."""
        reduction = replica.reduction
        # One reduction serves several optimizers; one that has stepped with it has gradients of another backward now.
        is_served = bool(reduction.stepped) and id(self._optimizer) not in reduction.stepped
        if reduction.is_pending or not (is_served or reduction.is_held):
            reduction.judge(replica)
        reduction.stepped.add(id(self._optimizer))

    # -- gradients in doubt

    def _compare(self) -> None:
        """Compare the gradients in doubt with those of the peers.

        Raises:
            NotPrepared: The sums differ between ranks.
        """
        doubtful = [replica for replica in self._living() if replica.reduction.doubt]
        ids = {id(parameter) for replica in doubtful for parameter in replica.reduction.parameters}
        ids |= set(map(id, self._outside))
        parameters = [
            (number, parameter)
            for number, parameter in enumerate(
                each for group in self._optimizer.param_groups for each in group["params"]
            )
            if id(parameter) in ids and parameter.grad is not None
        ]
        call = f"comparing gradients before {self._name}.step"
        exchange = process_group.exchange
        sums = dict(zip([number for number, _ in parameters], _sums(parameters), strict=True))
        kind = f"{self._name} of {sum(len(group['params']) for group in self._optimizer.param_groups)} parameters"
        mine = json.dumps([kind, sorted(sums.items())])
        digests = exchange.all(hashlib.blake2b(mine.encode(), digest_size=16).hexdigest(), call)
        if len(set(digests)) == 1:
            for replica in doubtful:
                self._strategy.trust(replica)
            return
        theirs = [json.loads(each) for each in exchange.all(mine, call)]
        rank = self._strategy.world.rank
        apart = [peer for peer, digest in enumerate(digests) if digest != digests[rank]]
        others = [peer for peer in apart if theirs[peer][0] != kind]
        if others:
            raise self._refusal(
                f"rank {numbers_in_order(others)} steps {theirs[others[0]][0]}, and this one {kind}", ""
            )
        found = [dict(theirs[peer][1]) for peer in range(len(theirs))]
        numbers = sorted({number for each in found for number in each})
        differ = {number for number in numbers if len({each.get(number) for each in found}) > 1}
        raise self._explained(differ, apart, doubtful)

    def _explained(self, differ: set[int], apart: Sequence[int], doubtful: Sequence[Any]) -> NotPrepared:
        listed = [each for group in self._optimizer.param_groups for each in group["params"]]
        names = {
            id(each): name for replica in self._living() for name, each in replica.module.named_parameters()
        }  # also of what was frozen when the model was prepared
        outside = set(map(id, self._outside))
        new = [number for number in sorted(differ) if id(listed[number]) in outside]
        shown = [names.get(id(listed[number]), _unnamed(number, listed[number])) for number in new or sorted(differ)]
        what = f"the gradient{'s' * (len(shown) > 1)} of {_shortened(shown)}"
        found = f"{what} {'are' if len(shown) > 1 else 'is'} averaged by nobody, and other ones in rank "
        found += numbers_in_order(apart)
        if new and all(id(listed[number]) in names for number in new):
            return self._refusal(
                found,
                "They were frozen, or not yet in the model, when it was prepared, and a model averages what it trains "
                "then. Make such changes before prepare. To train layers only later, freeze them after prepare "
                "(requires_grad_(False)), with find_unused_parameters:\n"
                "    Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
            )
        if new:
            return self._refusal(
                found,
                "No prepared model has them. Prepare every module that is trained, or make it a part of the prepared "
                f"model before prepare. To average them yourself, before the step:\n    {_AVERAGE}",
            )
        if any(replica.reduction.doubt == _IN_A_WINDOW for replica in doubtful):
            return self._refusal(
                found,
                "This batch only adds to the gradients of its window (gradient_accumulation_steps), and this optimizer "
                "was not prepared, so it steps in every batch. Prepare it, or step it where "
                "accelerator.sync_gradients is True.",
            )
        if any(replica.reduction.doubt == _NOT_ENDED for replica in doubtful):
            return self._refusal(
                found,
                "They are of a window of gradient_accumulation_steps that was not ended: its loop was left, by `break` "
                "for one. Step inside of the loop, where accelerator.sync_gradients is True: the next loop continues "
                "the window. Or drop these gradients, by optimizer.zero_grad(), or average them yourself, before the "
                f"step:\n    {_AVERAGE}",
            )
        if unused := next(filter(None, map(self._strategy.explain_unfinished, doubtful)), ""):
            return self._refusal(found, unused)
        return self._refusal(
            found,
            "The last backward came from no forward of the prepared model: the loss was computed by the model inside "
            "(accelerator.unwrap_model(model), model.module), or one forward had two backwards. Call the prepared "
            "model, and let its forward call the model's other methods; add losses up before one backward. To average "
            f"gradients yourself, before the step:\n    {_AVERAGE}",
        )

    def _refusal(self, found: str, cause: str) -> NotPrepared:
        clock, world = self._accumulation.clock, self._strategy.world
        return NotPrepared(
            f"{self._name}.step in {world.place}, step {clock.step}: {found}. Each rank would train a model of its "
            f"own. The weights are as before.\n  {cause}"
        )

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__


class OtherOptimizers:
    """Looks at the steps of optimizers that were not prepared, which may step a prepared model.

    They are torch's to call, so each step of torch's comes here. An optimizer without a parameter of a prepared model
    is the program's matter: one rank alone may step it.

    Args:
        prepared: The prepared optimizers, which look for themselves.
    """

    def __init__(self, strategy: Strategy, accumulation: Accumulation, prepared: Sequence[Any]) -> None:
        self._strategy = weakref.ref(strategy)
        self._accumulation = accumulation
        self._prepared = prepared
        self._looks: dict[int, _OtherLook] = {}  # by the optimizer's id, as long as it lives

    def begin(self) -> None:
        """Look at every step of torch's optimizers from now on, as long as the strategy lives, which owns this object.

        torch keeps the hook for good, and goes through its hooks while one runs, so that none can be removed.
        """
        strategy, own = self._strategy(), weakref.ref(self)
        assert strategy is not None
        strategy.others = self

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (others := own()) is None:
                return None
            for known in others._prepared:
                if known.optimizer is optimizer:
                    return None
            return others._before_step(optimizer, args, kwargs)

        register_optimizer_step_pre_hook(before_step)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return None: another process has a look of its own."""
        return type(None), ()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        strategy = self._strategy()
        if strategy is None:
            return None
        look = self._looks.get(id(optimizer))
        if look is None:
            look = self._looks[id(optimizer)] = _OtherLook(optimizer, weakref.proxy(strategy), self._accumulation)
            weakref.finalize(optimizer, self._looks.pop, id(optimizer), None).atexit = False
        # An optimizer may take something else first, a learning rate say, or call its closure otherwise.
        is_named = "closure" in kwargs
        closure = kwargs.get("closure") if is_named else args[1] if len(args) > 1 else None
        if not callable(closure) or isinstance(closure, torch.nn.Module):
            look.refuse_other(optimizer)
            return None
        if is_named:
            return args, {**kwargs, "closure": look.after(closure)}
        return (args[0], look.after(closure), *args[2:]), kwargs


class _OtherLook(UnaveragedGradients):
    """The look at an optimizer that was not prepared."""

    def __init__(self, optimizer: Optimizer, strategy: Strategy, accumulation: Accumulation) -> None:
        super().__init__(optimizer, strategy, accumulation)
        self._freshness = Freshness()
        self._backwards = 0  # of the Accelerator, at the last step

    def refuse_other(self, optimizer: Optimizer) -> None:
        """Refuse the step that `optimizer` is about to take without a closure, if its gradients differ between ranks.

        Raises:
            NotPrepared: Gradients differ between ranks; every rank raises it.
        """
        backwards = self._accumulation.backwards
        is_ours = backwards != self._backwards or not self._freshness.has_new(optimizer)
        self._backwards = backwards
        if not self._accumulation.window.sync:
            self._doubt_held()
        self.refuse(is_ours)
        self._freshness.note(optimizer)

    def _doubt_held(self) -> None:
        """Doubt gradients of a batch that only adds to those of its window: a prepared optimizer would not step."""
        for replica in self._living():
            if replica.reduction.is_held:
                replica.reduction.doubt = _IN_A_WINDOW

    def _look_through(self) -> None:
        super()._look_through()
        if not (self._stepped or self._steps_sharded):
            self._outside = []


def _unnamed(number: int, parameter: Tensor) -> str:
    return f"parameter {number} of the optimizer, {'x'.join(map(str, parameter.shape)) or 'one number'}"


def _shortened(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _sums(parameters: Sequence[tuple[int, Tensor]]) -> list[int]:
    """Return a number for each gradient; equal gradients have equal ones, on any device."""
    sums = [_sum_of_bits(parameter.grad) for _, parameter in parameters if parameter.grad is not None]
    devices = {each.device for each in sums}
    if len(devices) == 1:
        return [int(number) for number in torch.stack(sums).tolist()]  # one wait for the device
    return [int(each) for each in sums]


def _sum_of_bits(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce()
        return _sum_of_bits(values.indices()) * 31 + _sum_of_bits(values.values())
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.contiguous().view(_INTEGERS[values.element_size()])
    rows = bits.reshape(len(bits) if bits.ndim else 1, -1).sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()  # equal rows in another order are others
