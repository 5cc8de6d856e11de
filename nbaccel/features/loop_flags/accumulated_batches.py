"""Accumulate the batches of an unmodified loop: `-a K`, K of them make one optimizer step. Runs in ranks.

Each optimizer has a window of rounds, which its calls of `step` count: so the two of a GAN, a critic that steps more
often, and a loop without a loader are right as they are. In all rounds but the last one of a window the gradients of a
backward are taken out of ``p.grad``, and the step is left out; clipping and a scaler find nothing. In the last round
``p.grad`` is the mean of the window's batches: each was divided at the root of its graph, as `(loss / K).backward()`
does. An epoch's last window is as long as the batches that the loader still has.

A round's own gradients stay apart from those of the rounds before until the loop steps, since ``zero_grad`` drops them:
the loss of a generator also reaches the discriminator. Reasons: docs/design/one-line.md
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from nbaccel.errors import FlagConflict, NbaccelError
from nbaccel.train.distributed.callers import library_that_trains
from nbaccel.train.raw_loop.changes_by_flags import LoopChange, TrainedOptimizers, WatchedLoop
from nbaccel.train.raw_loop.deferred_calls import let_clipping_find_nothing
from nbaccel.train.raw_loop.graph import leaves_of, runs_backwards_inside
from nbaccel.train.raw_loop.loader_pass import Place
from nbaccel.train.raw_loop.trained_tensors import parameters_of, surrounding_parameters
from nbaccel.train.step.raw_loop_hooks import hold_loop_state

__all__ = ["AccumulatedBatches"]

_STATE = "accumulation"

_AHEAD = 1
"""Batches that a loop may take before it trains the first one, as one does that fetches the next while it computes."""

_ABANDONED_AFTER = 3
"""Passes with steps of other optimizers alone, at least one of them whole, after which a window is not waited for."""


class _Window:
    """Rounds of one optimizer that make one step.

    Attributes:
        length: Of its rounds.
        done: Rounds whose step was left out.
        sums: Gradients of these rounds, by parameter.
        placed: Parameters in whose ``grad`` they are, in the last round.
        called_at: Where the program was at the optimizer's last call; None where no loader tells.
        reached: Parameters that backwards have reached since its last call, and that were not dropped.
        reached_at: Where the first of them did.
        spans: Others have, with another batch.
        is_claimed: An optimizer was called since the last of them.
        dropped_at: Where the loop has dropped gradients of the last round, and no optimizer was called with them.
        is_granted: A scaler was allowed to step, and decides by itself whether it does.
        is_scaled: A scaler steps it, so its gradients are multiplied by the scale.
        is_known: It was called.
        is_others: A library counts this optimizer's batches.
        passes: In which others have stepped since its last call.
    """

    def __init__(self) -> None:
        self.length = 1
        self.called_at: Place | None = None
        self.is_scaled = self.is_known = self.is_others = False
        self.passes: set[int] = set()
        self.close()

    def close(self) -> None:
        self.done = 0
        self.leave_round()
        self.sums: dict[Tensor, Tensor] = {}
        self.placed: set[Tensor] = set()
        self.is_granted = False

    def leave_round(self) -> None:
        self.reached: set[Tensor] = set()
        self.reached_at: Place | None = None
        self.spans = self.is_claimed = False
        self.dropped_at: Place | None = None

    def reach(self, parameters: Iterable[Tensor], place: Place | None) -> None:
        """Note a backward that has reached `parameters`."""
        if not self.reached:
            self.reached_at, self.spans = place, False
        elif place is not None and self.reached_at is not None:
            self.spans |= place.at != self.reached_at.at
        self.reached.update(parameters)
        self.is_granted = self.is_claimed = False

    def claim(self) -> None:
        """Note a call of any optimizer: what backwards have reached may be of its loss."""
        self.is_claimed, self.dropped_at = True, None

    def drop(self, parameters: Sequence[Tensor]) -> None:
        """Note that gradients of `parameters` are dropped."""
        if not (self.is_claimed or self.placed.isdisjoint(parameters)):
            self.dropped_at = self.reached_at
            if self.reached_at is None and not all(map(_is_finite, self.placed)):
                self.close()  # no loader tells that the batch of a step which the loop leaves out is over
        self.placed.difference_update(parameters)
        self.reached.difference_update(parameters)

    def is_left_out(self, place: Place | None) -> bool:
        """Return whether the loop has left out the window's step itself, as where its gradients are infinite.

        It has dropped them, and computes those of a later batch. A backward of another pass, which was dropped, is none
        of this training.
        """
        before, last = self.dropped_at, self.called_at
        if place is None or before is None or before.at == place.at:
            return False
        return before.at[0] == place.at[0] or (last is not None and before.at[0] == last.at[0])

    @property
    def is_last(self) -> bool:
        """True in the round whose step is taken."""
        return self.done >= self.length - 1

    @property
    def is_open(self) -> bool:
        return self.done > 0

    @property
    def is_waited_for(self) -> bool:
        return self.is_open and len(self.passes) < _ABANDONED_AFTER


class AccumulatedBatches(LoopChange):
    """Takes one optimizer step for as many batches as `-a` says, in one rank's tasks, one after the other.

    Args:
        count: Batches for each step.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._flag = f"-a {count}"
        self._loop: WatchedLoop
        self._end_clipping: Callable[[], None] = lambda: None
        self._reset()

    def attach(self, loop: WatchedLoop) -> None:
        self._loop = loop

    def _reset(self) -> None:
        self._windows: weakref.WeakKeyDictionary[Optimizer, _Window] = weakref.WeakKeyDictionary()
        self._optimizers: TrainedOptimizers | None = None
        self._pending: dict[Tensor, Tensor] = {}  # gradients of this round
        self._refused: FlagConflict | None = None
        self._is_inside = self._is_known = self._is_others = self._is_unshared = self._has_begun = False
        self._scaler_has_waited = self._scaler_has_stepped = False  # since its last update
        self._has_unheld = False
        self._unheld_at: Place | None = None  # backwards of other tensors
        self._pass: int | None = None  # the pass that the last backward was of
        self._open_length = 0  # of the window of the optimizer that was called last, if that is open
        self._ahead = 0  # batches of it that are taken, and not trained yet
        self._looks_at_averages = True
        self._averages: list[tuple[Tensor, int]] = []  # other weights, with their versions
        self._thread = threading.get_ident()

    # -- the task

    def begin(self, optimizers: TrainedOptimizers) -> None:
        self._reset()
        self._optimizers = optimizers
        self._end_clipping = let_clipping_find_nothing()
        hold_loop_state(_STATE, self)

    def end(self) -> None:
        """End a task: an open window makes no step, and its gradients are dropped."""
        if self._optimizers is None:
            return
        left = max((window.done for window in self._windows.values() if window.is_waited_for), default=0)
        left = 0 if self._refused is not None else left
        if (left or self._pending) and _is_of_gradients(error := sys.exc_info()[1]):
            error.add_note(
                f"{self._flag}: gradients are there with the last of {self._count} batches, and p.grad is None before. "
                "A loop that needs those of each batch, as for SAM or for a norm of each, is right without -a."
            )
        self._reset()
        hold_loop_state(_STATE, None)
        self._end_clipping()
        if left:
            batches = "batch" if left == 1 else f"{left} batches"
            self._loop.say(
                f"{self._flag}: the last {batches} made no step, since the loop ended before there were {self._count}; "
                "the weights are those of the last step"
            )

    def begin_anew(self) -> None:
        optimizers, has_begun = self._optimizers, self._has_begun
        self._reset()
        self._optimizers, self._has_begun = optimizers, has_begun

    # -- its state, see `LoopState`

    def window_is_open(self) -> bool:
        """Return whether an optimizer has batches that no step has used."""
        return any(window.is_waited_for for window in self._windows.values())

    def batches_are_parts(self) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        """Return nothing: at a window's end there is no more than the program holds."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing, see `state`."""

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` has gradients that no step has used, and that the loop does not see."""
        window = self._windows.get(optimizer)
        return window is not None and (window.is_open or bool(window.reached))

    # -- what torch does

    def note_optimizer(self, optimizer: Optimizer) -> None:
        self._is_known = self._is_unshared = False

    def note_dropped(self, owner: Optimizer | Module) -> None:
        windows = [window for window in self._windows.values() if window.reached or window.placed]
        if windows:
            dropped = list(parameters_of(owner) if isinstance(owner, Optimizer) else owner.parameters())
            for parameter in dropped:
                self._pending.pop(parameter, None)
            for window in windows:
                window.drop(dropped)

    def run_backward(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 4 or not self._is_in_loop():
            return real(outputs, *args, **kwargs)
        if self._refused is not None:
            raise self._refused
        place = self._loop.place()
        self._look_ahead(place)
        if not kwargs.get("accumulate_grad", False):  # torch.autograd.grad
            if not self._has_begun and not any(map(self._window_of, args[3])):
                self._note_unheld([each for each in args[3] if isinstance(each, Parameter)], place)
            return real(outputs, *args, **kwargs)
        leaves, of_python = leaves_of([root for root in outputs if isinstance(root, Tensor)])
        if not self._has_begun and not any(map(self._window_of, leaves)):
            self._note_unheld(leaves, place)
        if self._are_shared_out(leaves):
            return real(outputs, *args, **kwargs)
        # A backward inside of this one may reach more, and so may the graph of another rank.
        if may_reach_others := self._loop.is_averaged() or runs_backwards_inside(of_python):
            assert self._optimizers is not None
            others = [each for optimizer in self._optimizers for each in parameters_of(optimizer)]
            leaves = list({id(each): each for each in (*leaves, *others)}.values())
        held = {leaf: window for leaf in leaves if (window := self._window_of(leaf)) is not None}
        if not held:
            return real(outputs, *args, **kwargs)
        self._look_at_averages()
        for window in dict.fromkeys(held.values()):
            if window.is_left_out(place):
                window.close()
                self._open_length = 0
            self._open(window, place)
        for parameter, window in held.items():
            if parameter.grad is None:
                window.placed.discard(parameter)
        divisor = self._divisor(held, place)
        untouched = {each: each.grad._version for each in leaves if may_reach_others and each.grad is not None}
        otherwise = {each: each.grad for each in leaves if self._length_of(each, held) != divisor}
        for leaf in otherwise:
            leaf.grad = None
        grads = args[0] if divisor == 1 else tuple(None if each is None else each / divisor for each in args[0])
        self._is_inside = True
        try:
            found = real(outputs, grads, *args[1:], **kwargs)
        finally:
            self._is_inside = False
        if self._optimizers is None:  # something has prepared
            return found
        with torch.no_grad():
            for leaf, before in otherwise.items():
                new = leaf.grad
                new = None if new is None else new * (divisor / self._length_of(leaf, held))
                leaf.grad = before if new is None else new if before is None else _sum(before, new)
            if not self._loop.is_partial():  # otherwise gradients come with the last part
                self._take(held, untouched, place)
        return found

    def step(self, optimizer: Optimizer, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[0] if args else None)
        return None if self.withholds(optimizer, closure) else real(*args, **kwargs)

    # -- the optimizers' calls

    def withholds(self, optimizer: Optimizer, closure: Any = None, by_scaler: bool = False) -> bool:
        """Return whether a step is left out, and count it; in a window's last round the window is over.

        Args:
            by_scaler: A scaler asks, which then steps the optimizer, or not.

        Raises:
            FlagConflict: The loop cannot be accumulated.
        """
        if self._refused is not None:
            raise self._refused
        if self._optimizers is None or self._loop.is_partial() or not self._is_ours():
            return False
        for each in self._windows.values():
            each.claim()
        window = self._windows.pop(optimizer, None) or _Window()
        self._windows[optimizer] = window  # the one that has stepped last is the last one
        was_granted, window.is_granted = window.is_granted, False
        if not window.is_known and library_that_trains():
            self._hand_back(optimizer, window)
        window.is_known, window.is_scaled = True, by_scaler or was_granted
        if window.is_others or (was_granted and not by_scaler):
            return False
        self._loop.note_call(optimizer)
        place, was_reached = self._loop.place(), bool(window.reached)
        if self._is_inside:
            self._refuse("the loop steps inside of loss.backward(), in which gradients cannot wait. Leave -a out")
        if window.spans and was_reached:
            self._refuse("the loop takes several batches for one step by itself. Leave -a out, or its own counting")
        if closure is not None:
            self._refuse(
                f"{type(optimizer).__name__} computes its losses itself (a closure), and takes a batch for each step. "
                "Leave -a out"
            )
        if place is not None and window.called_at == place:
            self._refuse(
                f"the loop takes several steps for each batch, and none would come before {self._count} batches. Leave "
                "-a out"
            )
        window.leave_round()
        if not was_reached:
            self._open(window, place)
        if place is None:
            self._ahead = 0
        window.called_at = place
        self._note_pass(window, place)
        pending = {each: self._pending.pop(each) for each in parameters_of(optimizer) if each in self._pending}
        if window.is_last:
            self._place_sums(window, parameters_of(optimizer))
            window.close()
            self._open_length = 0
            window.is_granted = by_scaler
            return False
        if not was_reached and any(each.grad is not None and each.requires_grad for each in parameters_of(optimizer)):
            self._refuse(
                "the loop steps with gradients that it has set itself (torch.autograd.grad), and which cannot be "
                "added up. Leave -a out, or call loss.backward()"
            )
        for parameter, gradient in pending.items():
            before = window.sums.get(parameter)
            window.sums[parameter] = gradient if before is None else _sum(before, gradient)
        window.done += 1
        self._open_length = window.length
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no scheduler shall say that no step was taken
        self._say_once()
        self._see_averages()
        return True

    # -- a scaler's calls, see `ScalerRule`

    def withholds_scaler(self, call: str, optimizer: Optimizer | None) -> bool:
        if self._optimizers is None or self._loop.is_partial():
            return False
        if optimizer is None:  # `update`
            is_withheld = self._scaler_has_waited and not self._scaler_has_stepped
            self._scaler_has_waited = self._scaler_has_stepped = False
            return is_withheld
        if call == "step":
            is_withheld = self.withholds(optimizer, by_scaler=True)
        else:
            window = self._windows.get(optimizer)
            is_withheld = window is not None and not window.is_last and not window.is_others
        self._scaler_has_waited |= is_withheld
        self._scaler_has_stepped |= not is_withheld
        return is_withheld

    def rescale(self, factor: Tensor) -> None:
        with torch.no_grad():
            for window in self._windows.values():
                for gradient in window.sums.values() if window.is_scaled else ():
                    gradient.mul_(factor.to(gradient.device))

    # -- parts of it

    def _is_in_loop(self) -> bool:
        is_here = threading.get_ident() == self._thread and torch._C._functorch.maybe_current_level() is None
        if self._optimizers is None or self._is_inside or not is_here or not self._is_ours():
            return False
        self._optimizers.search()
        return True

    def _is_ours(self) -> bool:
        """Return whether the loop is unmodified, and not that of a library which counts its batches."""
        if not self._is_known:
            self._is_known = True
            self._is_others = bool(library_that_trains())
        return not self._is_others

    def _are_shared_out(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether the program shares these out itself, as in DDP: this backward shows it to the watch, too."""
        if self._is_unshared or not leaves:
            return False
        self._is_unshared = not self._loop.is_shared_out(list(leaves))
        for window in () if self._is_unshared else map(self._window_of, leaves):
            if window is not None:
                window.is_others = True
        return not self._is_unshared

    @staticmethod
    def _length_of(leaf: Tensor, held: dict[Tensor, _Window]) -> int:
        """Return what divides a leaf's gradient: 1 where no optimizer holds it, as for an input."""
        return held[leaf].length if leaf in held else 1

    def _divisor(self, held: dict[Tensor, _Window], place: Place | None) -> int:
        """Return what the graph's root is divided by, as by hand; a leaf that needs another number is mended.

        Ranks whose gradients are averaged need the same one, and may have other graphs, and optimizers of before that
        live on: it is that of the optimizer which was called last. In one rank it is that of an optimizer which is
        about to step: another one, which has stepped for this batch, is reached by the way, and drops these gradients.
        """
        if self._loop.is_averaged():
            return self._open_length or self._length_from(place)
        windows = list(dict.fromkeys(held.values()))
        about = [window for window in windows if window.is_open or window.called_at != place or place is None]
        return min(about or windows, key=lambda window: not window.is_open).length

    def _window_of(self, leaf: Tensor) -> _Window | None:
        """Return the window of the optimizer that holds `leaf`: of several the one that was called last."""
        assert self._optimizers is not None
        holders = self._optimizers.holders(leaf)
        if not holders:
            return None
        if len(holders) > 1:
            called = [optimizer for optimizer in self._windows if any(optimizer is each for each in holders)]
            holders = called or holders
        window = self._windows.setdefault(holders[-1], _Window())
        return None if window.is_others else window

    def _open(self, window: _Window, place: Place | None) -> None:
        """Set the length of a window that has no round yet."""
        if window.is_open:
            return
        is_new = place is not None and (window.called_at is None or place.at != window.called_at.at)
        window.length = self._length_from(place) if is_new or place is None else self._count

    def _length_from(self, place: Place | None) -> int:
        """Return the length of a window that begins with the batch at `place`."""
        following = None if place is None or place.left is None else place.left + self._ahead
        if self._ahead and place is None:  # the pass has ended, and its last batch is trained now
            following = 0
        return self._count if following is None else min(self._count, following + 1)

    def _look_ahead(self, place: Place | None) -> None:
        """Find out, at a backward, how many batches the loop has taken of a pass before it trains one of them."""
        if place is not None and place.at[0] != self._pass:
            self._pass, taken = place.at
            self._ahead = _AHEAD if taken == 1 + _AHEAD else 0

    def _take(self, held: dict[Tensor, _Window], untouched: dict[Tensor, int], place: Place | None) -> None:
        """Take gradients out of ``p.grad``, or put there those of the rounds before.

        Args:
            untouched: Versions of gradients that may have been there before the backward.
        """
        touched: dict[_Window, list[Tensor]] = {}
        for parameter, window in held.items():
            if parameter.grad is not None and untouched.get(parameter) != parameter.grad._version:
                touched.setdefault(window, []).append(parameter)
        for window, parameters in touched.items():
            window.reach(parameters, place)
            if window.is_last:
                self._place_sums(window, list(window.sums))
                continue
            for parameter in parameters:
                new, before = parameter.grad, self._pending.get(parameter)
                assert new is not None
                self._pending[parameter] = new if before is None else _sum(before, new)
                parameter.grad = None

    def _place_sums(self, window: _Window, parameters: Iterable[Tensor]) -> None:
        """Add what the rounds before have summed to ``p.grad``, once, also where this round has reached nothing."""
        for parameter in parameters:
            if parameter in window.sums and parameter not in window.placed:
                window.placed.add(parameter)
                new, before = parameter.grad, window.sums[parameter]
                parameter.grad = before.clone() if new is None else _sum(new, before)

    def _refuse(self, why: str) -> NoReturn:
        self._refused = FlagConflict(f"{self._flag}: {why}.")
        raise self._refused

    def _hand_back(self, optimizer: Optimizer, window: _Window) -> None:
        """Leave an optimizer alone: its step shows that a library counts its batches."""
        window.is_others = True
        for parameter in parameters_of(optimizer):
            if (gradient := self._pending.pop(parameter, None)) is not None:
                parameter.grad = gradient * window.length
        window.close()

    def _note_pass(self, window: _Window, place: Place | None) -> None:
        window.passes.clear()
        if place is not None:
            for other in self._windows.values():
                if other is not window:
                    other.passes.add(place.at[0])

    # -- what is said

    def _say_once(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._loop.say(
                f"{self._flag}: {self._count} batches make one step of an optimizer, with the mean of their gradients; "
                "what the loop counts as steps are batches, and its schedulers move with each of them"
            )

    def _note_unheld(self, leaves: Sequence[Tensor], place: Place | None) -> None:
        """Say, at the second batch, that no optimizer holds what the loop trains."""
        if leaves and self._has_unheld and (place is None or place != self._unheld_at):
            self._has_begun = True
            self._loop.say(f"{self._flag} has no effect: no optimizer holds what this loop trains")
        self._has_unheld, self._unheld_at = self._has_unheld or bool(leaves), place

    def _see_averages(self) -> None:
        """Note the versions of weights that no optimizer holds, after the first step that is left out."""
        if self._looks_at_averages:
            self._looks_at_averages = False
            assert self._optimizers is not None
            parameters = surrounding_parameters()
            self._averages = [(each, each._version) for each in parameters if not self._optimizers.holders(each)]

    def _look_at_averages(self) -> None:
        """Say, at the next backward, that some of them have changed."""
        averages, self._averages = self._averages, []
        if any(tensor._version != version for tensor, version in averages):
            self._loop.say(
                f"{self._flag}: weights that no optimizer holds change with every batch, as an average of weights "
                f"does: such a one moves {self._count} times for each step"
            )


def _is_of_gradients(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a gradient that is None may have caused `error`: code of the program reads some where it began."""
    if isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
        return True
    traceback = None if error is None or isinstance(error, NbaccelError) else error.__traceback__
    while traceback is not None:
        package = str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("torch", "nbaccel") and _names_gradients(traceback.tb_frame.f_code):
            return True
        traceback = traceback.tb_next
    return False


def _names_gradients(code: CodeType) -> bool:
    inside = (each for each in code.co_consts if isinstance(each, CodeType) and each.co_name.startswith("<"))
    return "grad" in code.co_names or any(map(_names_gradients, inside))  # of comprehensions, too


def _is_finite(parameter: Tensor) -> bool:
    """Return whether a parameter's gradient is finite."""
    return parameter.grad is None or bool(torch.isfinite(parameter.grad.to_dense()).all())


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of two gradients, in place of the first one where that is possible."""
    if first.requires_grad or second.requires_grad:  # they have a graph
        return first + second
    return second + first if first.is_sparse and not second.is_sparse else first.add_(second)
