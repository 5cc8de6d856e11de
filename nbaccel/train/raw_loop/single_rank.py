"""Watch an unmodified loop in the only rank of a run. Runs in ranks.

The loop is not changed: batches, gradients and steps are torch's. The observations provide the panel's numbers, let a
run stop between two steps, and explain why its batches are not cut if memory runs out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.events import LoopEntered, LoopKind, Loss, TrainingMode, emit
from nbaccel.train.checkpoint.serialization import pack, unpack
from nbaccel.train.distributed.callers import lasting_place
from nbaccel.train.raw_loop.changes_by_flags import LoopChange, runs_in_trainer
from nbaccel.train.raw_loop.deferred_calls import StepCounter
from nbaccel.train.raw_loop.graph import forget_scaled, is_scaled
from nbaccel.train.raw_loop.loader_pass import LoaderPass, PassGauge, PassGauges, PassKey
from nbaccel.train.raw_loop.lone_loop import LoneLoop
from nbaccel.train.raw_loop.rank_streams import idle_gpu
from nbaccel.train.step.raw_loop_hooks import count_steps_by, hold_loop_state, when_beginning_anew

__all__ = ["SingleRankWatch"]

_OF_A_TRAINER = "a trainer has a loop of its own (give it a smaller batch size, and more gradient accumulation)"
_LEFT_WHOLE = (
    "a loop that prepares nothing is left as it is in its only rank (prepared, and with accelerator.backward(loss), it "
    "goes on in parts; by hand: a smaller batch_size, and as much more gradient accumulation)"
)


class SingleRankWatch(LoneLoop):
    """Watches one rank's tasks, one after the other; a launcher calls it around each.

    Args:
        changes: What flags change of the loop, the outermost first.
    """

    def __init__(self, changes: Sequence[LoopChange] = ()) -> None:
        self._steps = StepCounter(lambda: self._batches)
        super().__init__(changes)

    def _begin_passes(self) -> None:
        super()._begin_passes()
        self._backwards = 0
        self._gauges = PassGauges(lambda: self._steps.done, self._steps.rates.read)

    # -- the task

    def begin(self, namespace: dict[str, Any] | None) -> None:
        super().begin(namespace)
        self._steps.begin()
        when_beginning_anew(self._begin_anew)
        count_steps_by(lambda: self._steps.under_way)
        hold_loop_state("loop", self)

    def keeps(self, tensors: Sequence[Any]) -> bool:
        """Return True during a task, since a single rank is equal to itself."""
        return self._is_armed

    def note_wrapper(self) -> None:
        """Do nothing: one rank's random numbers are its own."""

    @property
    def is_at_work(self) -> bool:
        """True if something was trained in this task."""
        return self._backwards > 0

    # -- its state, see `LoopState`

    def window_is_open(self) -> bool:
        return False

    def batches_are_parts(self) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps.done, "epochs": pack(self._gauges.state()).structure}

    def restore(self, state: dict[str, Any]) -> None:
        self._steps.go_on_at(state["steps"])
        self._gauges.count_from_here()
        self._gauges.restore(unpack(state["epochs"], {}))
        if "shared" in state and (common := unpack(state["shared"], {})["passes"]["streams"]["_common"]) is not None:
            torch.default_generator.set_state(torch.frombuffer(bytearray(common), dtype=torch.uint8))

    def _begin_anew(self) -> None:
        """Begin another attempt of the program."""
        if self._is_armed:
            self._gauges.end()
            self._begin_passes()
            self._steps.begin_anew()
            self._hooks.begin_anew()

    def leave(self) -> None:
        """Stop watching: the task is over, the program prepares by itself, or a trainer reports instead."""
        if self._is_armed:
            self._steps.end_step()
            super().leave()
            count_steps_by(None)
            hold_loop_state("loop", None)
            self._gauges.end()

    def note_call(self, optimizer: Optimizer) -> None:
        self._steps.meet(optimizer)

    # -- backwards and steps

    def _run(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a graph backwards for ``torch.autograd.backward`` and ``grad``; only the former trains."""
        is_here = threading.get_ident() == self._thread and torch._C._functorch.maybe_current_level() is None
        if not (is_here and self._is_armed and kwargs.get("accumulate_grad", False)):
            return real(outputs, *args, **kwargs)
        if self._is_of_a_trainer():
            emit(LoopEntered(None, obstacle=_OF_A_TRAINER))
            self.leave()
            return real(outputs, *args, **kwargs)
        if self._backwards == 0:
            emit(TrainingMode(LoopKind.UNMODIFIED))
            if line := idle_gpu(each.device for each in outputs if isinstance(each, Tensor)):
                self.say(line)
        self._steps.enter([root for root in outputs if isinstance(root, Tensor)])  # may raise RunStopped
        loss = _loss_of(outputs)
        found = real(outputs, *args, **kwargs)
        self._note_backward(loss)
        return found

    def _is_of_a_trainer(self) -> bool:
        """Return whether a library's trainer runs this backward. Called at the first one of a pass."""
        if self._backwards and (self._now is None or self._now.gauge.has_trained):
            return False
        return runs_in_trainer()

    def _note_backward(self, loss: Tensor | None) -> None:
        self._backwards += 1
        this = self._now
        if not self._batches:
            self._gauges.note_no_loader()
        elif this is not None and this.gauge.may_train and not this.gauge.has_trained:
            self._gauges.note_trained(this)
        if loss is not None:
            emit(Loss(loss, self._steps.count))
        forget_scaled()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._steps.meet(optimizer)
        self._steps.note(optimizer)

    def _after_step(self, *_: Any) -> None:
        self._steps.end_step()

    # -- passes

    def _gauge(self, key: PassKey, iterator: Any, batches: int | None, may_train: bool) -> PassGauge:
        return self._gauges.begin(key, iterator, batches, may_train, lasting_place())

    def _enter(self, this: LoaderPass) -> None:
        super()._enter(this)
        emit(LoopEntered(this.batch_size, obstacle=_LEFT_WHOLE))

    def _end_pass(self, gauge: PassGauge) -> None:
        gauge.end()


def _loss_of(outputs: Any) -> Tensor | None:
    """Return the root of a backward, if it is one number, without the factor of a scaler."""
    if len(outputs) != 1 or not isinstance(outputs[0], Tensor) or outputs[0].numel() != 1:
        return None
    root: Tensor = outputs[0]
    if not is_scaled(root.grad_fn):
        return root.detach()
    factor = getattr(root.grad_fn, "_saved_other", None)
    return None if factor is None else root.detach() / factor
