"""Makes a Lightning `Trainer` report, and stop when asked. Runs in ranks; imports no Lightning.

It reports each training batch's loss, with the trainer's own step; the numbers that the module logs, at the end of
epochs and validations; and the progress, a few times per second. Not covered: `test`, `predict`, and `validate` outside
of `fit`; Fabric, whose loops are the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbaccel.base.events import LoopKind, Loss, Metric, Progress, TrainingMode, emit
from nbaccel.features.other_libraries.boundaries import StepBoundaries, TrainerProgress

__all__ = [
    "LightningCallback",
    "add_callback",
    "remove_callback",
]


def add_callback(trainer: Any) -> bool:
    """Make `trainer` report; return False if it does already."""
    if any(isinstance(callback, LightningCallback) for callback in trainer.callbacks):
        return False
    package = type(trainer).__module__.partition(".trainer.")[0]
    base = __import__(f"{package}.callbacks", fromlist=["Callback"]).Callback
    trainer.callbacks.append(type("NbaccelReports", (LightningCallback, base), {})())
    return True


def remove_callback(trainer: Any) -> None:
    """Undo `add_callback`."""
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, LightningCallback)]


class LightningCallback:
    """The hooks of a `Callback` that report; all others are the library's own."""

    _validation: TrainerProgress | None = None  # the sanity check before the training does not count

    def on_train_start(self, trainer: Any, module: Any) -> None:
        emit(TrainingMode(LoopKind.LIGHTNING))
        self._step = trainer.global_step
        self._epoch = trainer.current_epoch
        self._batch = 0
        self._boundaries = StepBoundaries(self._step)
        self._training = TrainerProgress(lambda: self._progress(trainer), self._step)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._epoch = trainer.current_epoch
        self._batch = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch_idx + 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            # Lightning has divided it by the length of the window, where it steps the optimizer itself.
            divisor = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            emit(Loss(loss.detach() * divisor if divisor != 1 else loss.detach(), self._step))
        if trainer.global_step != self._step:  # else the batch was inside an accumulation window
            self._step = trainer.global_step
            if self._boundaries.enter(self._step):
                trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        _report_numbers(trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        batches = sum(count for count in trainer.num_val_batches if isinstance(count, int))
        self._validated = 0
        self._validation = TrainerProgress(
            lambda: Progress(trainer.global_step, self._validated, batches or None, is_training=False),
            trainer.global_step,
        )

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._validation is not None:
            self._validated += 1
            self._boundaries.enter_evaluation()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._validation is not None:
            self._validation.close()
            self._validation = None
            if self._batch != trainer.num_training_batches:  # else the end of the epoch, which follows, has them
                _report_numbers(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._training.close()
        self._boundaries.leave()

    def _progress(self, trainer: Any) -> Progress:
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if trainer.max_steps > 0:  # the end is counted in steps
            return Progress(trainer.global_step, trainer.global_step, trainer.max_steps, 0, 1)
        return Progress(
            step=trainer.global_step,
            batch=self._batch,
            batches=batches if isinstance(batches, int) else None,
            epoch=self._epoch,
            epochs=epochs if epochs is not None and epochs > 0 else None,
        )


def _report_numbers(trainer: Any) -> None:
    if trainer.callback_metrics:
        emit(Metric(dict(trainer.callback_metrics), trainer.global_step))
