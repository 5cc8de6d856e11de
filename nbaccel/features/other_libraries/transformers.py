"""Makes a transformers `Trainer` report, and stop when asked. Runs in ranks; imports no transformers.

Losses and other numbers come when the trainer logs them (its `logging_steps`), with its own step; the progress is read
a few times per second. `evaluate` and `predict` are shown as evaluations, also outside of a training.
"""

from __future__ import annotations

import time
from typing import Any

from nbaccel.base.events import LoopKind, Loss, Metric, Progress, TrainingMode, emit
from nbaccel.features.other_libraries.boundaries import StepBoundaries, TrainerProgress

__all__ = [
    "TransformersCallback",
    "add_callback",
    "remove_callback",
]


def add_callback(trainer: Any) -> bool:
    """Make `trainer` report; return False if it does already."""
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, TransformersCallback) for callback in callbacks):
        return False
    # Every trainer has callbacks (that of the default flow at least), and their base is the class to build on.
    base = next(kind for callback in callbacks for kind in type(callback).__mro__ if kind.__name__ == "TrainerCallback")
    trainer.add_callback(type("NbaccelReports", (TransformersCallback, base), {})())
    return True


def remove_callback(trainer: Any) -> None:
    """Undo `add_callback`."""
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, TransformersCallback)]


class TransformersCallback:
    """The methods of a `TrainerCallback` that report; all others are the library's own."""

    _boundaries: StepBoundaries | None = None
    _training: TrainerProgress | None = None
    _evaluation: TrainerProgress | None = None
    _evaluated = 0
    _heard_at: float | None = None
    """Time of the training's last report: an evaluation in it began then, but is reported batches later."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Accelerate's optimizer, which the trainer has prepared, knows the precision in which it computes.
        precision = getattr(getattr(kwargs.get("optimizer"), "accelerator_state", None), "mixed_precision", None)
        emit(TrainingMode(LoopKind.TRAINER, in_force={} if precision is None else {"mixed_precision": str(precision)}))
        self._boundaries = StepBoundaries(state.global_step)
        self._training = TrainerProgress(lambda: _progress(args, state), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hear()
        if self._boundaries is not None and self._boundaries.enter(state.global_step):
            control.should_training_stop = True
            control.should_evaluate = False  # a user who stops a run does not want to wait for it

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._boundaries is not None and self._boundaries.is_asked:
            control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        numbers = dict(logs or {})
        if "loss" in numbers:
            emit(Loss(float(numbers["loss"]), state.global_step))
        self._hear()
        emit(Metric(numbers, state.global_step))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._boundaries is None:
            self._boundaries = StepBoundaries(state.global_step)
        if self._evaluation is None:
            self._evaluated, batches = 0, _length(kwargs.get("eval_dataloader"))
            self._evaluation = TrainerProgress(
                lambda: Progress(state.global_step, self._evaluated, batches, is_training=False),
                state.global_step,
                self._heard_at,
            )
        self._evaluated += 1
        self._boundaries.enter_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None
            self._hear()
        if self._training is None:
            self._leave()

    def on_predict(self, args: Any, state: Any, control: Any, *more: Any, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.close()
            self._training = self._heard_at = None
        self._leave()

    def _hear(self) -> None:
        self._heard_at = None if self._training is None else time.monotonic()

    def _leave(self) -> None:
        if self._boundaries is not None:
            self._boundaries.leave()
            self._boundaries = None


def _progress(args: Any, state: Any) -> Progress:
    """Return the progress by the trainer's steps, which determine its end. Whole epochs are counted if there are some.

    After the last step of an epoch, when it is evaluated, that epoch is at its end.
    """
    epochs = int(args.num_train_epochs)
    if args.max_steps > 0 or epochs != args.num_train_epochs or state.max_steps % max(1, epochs):
        epochs = 1
    steps = state.max_steps // max(1, epochs)
    epoch = max(0, min((state.global_step - 1) // max(1, steps), epochs - 1))
    return Progress(
        step=state.global_step,
        batch=state.global_step - epoch * steps,
        batches=steps,
        epoch=epoch,
        epochs=epochs,
        samples=args.train_batch_size * args.gradient_accumulation_steps,
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
