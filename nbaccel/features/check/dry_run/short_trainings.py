"""Shorten the trainings of transformers' and Lightning's `Trainer` in a dry run. Runs in ranks; imports neither.

A callback ends a training after two epochs of three optimizer steps each, as if the user had stopped it there.
Schedules keep the lengths of the whole run. Where the run evaluates and saves, both happen at least once, in the last
step if not before, and at most twice. A record of the kind "trainer" says how long the whole training would be, and so
does the record of its part, see `LoopLog.part`; evaluations and saves are parts of that part.

Accelerate's loaders, which transformers' trainer prepares, read ahead of their loop: they announce their passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from types import ModuleType
from typing import Any

from nbaccel.features.check.dry_run.loader_cuts import LoaderCuts
from nbaccel.features.check.forecasts.trainer_counts import EVALUATION, SAVE, TRAINING

__all__ = ["ShortTrainings"]

EPOCHS, WINDOWS = 2, 3
"""Epochs of a shortened training, and the optimizer steps that an epoch has batches for."""

MOST_TIMES = 2
"""How often a shortened training evaluates, and how often it saves."""

_Write = Callable[[Mapping[str, Any]], None]
_Part = Callable[[int, Mapping[str, Any]], AbstractContextManager[None]]
_Actions = Mapping[str, Callable[[ModuleType], None]]


class ShortTrainings:
    """Shortens trainings between `begin` and `end`.

    Args:
        when_loaded: Returns a context in which each action is called with the module of its name, as soon as that is
            loaded, and at once if it is already.
        part: See `LoopLog.part`.
    """

    def __init__(
        self,
        cuts: LoaderCuts,
        write: _Write,
        when_loaded: Callable[[_Actions], AbstractContextManager[None]],
        part: _Part,
    ) -> None:
        self._part = part
        self._cuts = cuts
        self._write = write
        self._when_loaded = when_loaded
        self._undo = ExitStack()
        self._training = 0  # open ones

    def begin(self) -> None:
        """Shorten what begins from now on."""
        of_lightning = functools.partial(self._wrap, "fit", self._shorten_lightning)
        validates = functools.partial(self._measure, "_EvaluationLoop", "run", EVALUATION)
        self._undo.enter_context(
            self._when_loaded(
                {
                    "transformers.trainer": self._begin_transformers,
                    "lightning.pytorch.trainer.trainer": of_lightning,
                    "pytorch_lightning.trainer.trainer": of_lightning,
                    "lightning.pytorch.loops.evaluation_loop": validates,
                    "pytorch_lightning.loops.evaluation_loop": validates,
                    "accelerate.data_loader": self._announce_loaders,
                }
            )
        )

    def end(self) -> None:
        """Leave trainings as they are."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        real = getattr(owner, name)
        setattr(owner, name, functools.wraps(real)(ours))
        self._undo.callback(setattr, owner, name, real)

    def _begin_transformers(self, module: ModuleType) -> None:
        self._wrap("train", self._shorten_transformers, module)
        self._measure("Trainer", "evaluate", EVALUATION, module)
        self._measure("Trainer", "_save_checkpoint", SAVE, module)

    def _measure(self, owner: str, method: str, number: int, module: ModuleType) -> None:
        """Make the calls of a method parts of the training; those outside of one are left alone."""
        kind = getattr(module, owner, None)
        real = getattr(kind, method, None)
        if real is None:
            return

        def measured(self_: Any, *args: Any, **kwargs: Any) -> Any:
            is_part = self._training and not getattr(getattr(self_, "trainer", None), "sanity_checking", False)
            with self._part(number, {}) if is_part else nullcontext():
                return real(self_, *args, **kwargs)

        self._replace(kind, method, measured)

    def _wrap(self, method: str, shorten: Callable[[Any, ExitStack], dict[str, Any]], module: ModuleType) -> None:
        """Call `shorten` with a trainer before each training, and with what is undone after it."""
        trains = getattr(module.Trainer, method)

        def shortened(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            facts: dict[str, Any] = {}
            with ExitStack() as afterwards:
                with suppress(Exception):  # an unknown version: the loader's third pass ends the training
                    facts = shorten(trainer, afterwards)
                self._training += 1
                afterwards.callback(self._end_training)
                with self._part(TRAINING, facts):
                    return trains(trainer, *args, **kwargs)

        self._replace(module.Trainer, method, shortened)

    def _end_training(self) -> None:
        self._training -= 1

    def _shorten_transformers(self, trainer: Any, afterwards: ExitStack) -> dict[str, Any]:
        callbacks = trainer.callback_handler.callbacks
        base = next(
            kind for callback in callbacks for kind in type(callback).__mro__ if kind.__name__ == "TrainerCallback"
        )
        ours = type("NbaccelShortens", (ShortTransformers, base), {})(self._cuts, self._write)
        callbacks.append(ours)
        afterwards.callback(callbacks.remove, ours)
        facts: dict[str, Any] = ours.facts
        return facts

    def _shorten_lightning(self, trainer: Any, afterwards: ExitStack) -> dict[str, Any]:
        package = type(trainer).__module__.partition(".trainer.")[0]
        base = __import__(f"{package}.callbacks", fromlist=["Callback"]).Callback
        ours = type("NbaccelShortens", (ShortLightning, base), {})(self._cuts, self._write)
        trainer.callbacks.append(ours)
        afterwards.callback(trainer.callbacks.remove, ours)
        facts: dict[str, Any] = ours.facts
        return facts

    def _announce_loaders(self, module: ModuleType) -> None:
        for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
            self._replace(kind, "__iter__", self._announcing(kind.__iter__))

    def _announcing(self, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            batches = real(loader)
            if not self._cuts.minds:
                return batches
            reads_for_all = type(loader).__name__ == "DataLoaderDispatcher" and not loader.split_batches
            return self._cuts.announce(loader, batches, loader.state.num_processes if reads_for_all else 1)

        return iterate


class ShortTransformers:
    """The methods of a `TrainerCallback` that end a training early; all others are the library's own."""

    def __init__(self, cuts: LoaderCuts, write: _Write) -> None:
        self.facts: dict[str, Any] = {}
        self._cuts = cuts
        self._write = write
        self._epochs = self._evaluations = self._saves = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        window = int(args.gradient_accumulation_steps)
        self._cuts.window_of(kwargs.get("train_dataloader"), window)
        self._evaluates, self._is_saving = _name(args.eval_strategy) != "no", _name(args.save_strategy) != "no"
        self._planned = min(EPOCHS, state.num_train_epochs)
        self.facts.update(
            {
                "steps": state.max_steps,
                "epochs": state.num_train_epochs,
                "batches_per_step": window,
                "evaluates": [_name(args.eval_strategy), state.eval_steps],
                "saves": [_name(args.save_strategy), state.save_steps],
                "keeps": args.save_total_limit,
            }
        )
        self._write({"kind": "trainer", **self.facts})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._limit(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._epochs += 1
        if self._epochs >= self._planned or control.should_training_stop:
            control.should_training_stop = True
            control.should_evaluate |= self._evaluates and not self._evaluations
            control.should_save |= self._is_saving and not self._saves
        self._limit(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluations += 1

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves += 1

    def _limit(self, control: Any) -> None:
        control.should_evaluate &= self._evaluations < MOST_TIMES
        control.should_save &= self._saves < MOST_TIMES


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


class ShortLightning:
    """The hooks of a `Callback` that end a training early; all others are the library's own."""

    def __init__(self, cuts: LoaderCuts, write: _Write) -> None:
        self.facts: dict[str, Any] = {}
        self._cuts = cuts
        self._write = write
        self._epochs = self._validations = 0
        self._limit: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        window = int(trainer.accumulate_grad_batches)
        self._cuts.window_of(trainer.train_dataloader, window)
        self._batches = WINDOWS * window
        limits = trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps, trainer.limit_val_batches
        self._min_epochs, self._min_steps, self._limit_val_batches = limits
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
        most = trainer.max_epochs
        self._planned = EPOCHS if most is None or most < 0 else min(EPOCHS, most)
        self.facts.update(
            {
                "steps": trainer.max_steps if trainer.max_steps > 0 else None,
                "epochs": most if most is not None and most > 0 else None,
                "batches_per_step": window,
                "batches": _number(trainer.num_training_batches),
                "evaluates": ["batches", _number(trainer.val_check_batch), trainer.check_val_every_n_epoch],
            }
        )
        self._write({"kind": "trainer", **self.facts})

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 >= min(self._batches, trainer.num_training_batches) and self._epochs + 1 >= self._planned:
            trainer.should_stop = True  # a validation follows, unless there have been some

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._epochs += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._validations += 1
            if self._validations >= MOST_TIMES:
                trainer.limit_val_batches = 0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._min_epochs, self._min_steps
        trainer.limit_val_batches = self._limit_val_batches


def _number(value: Any) -> int | None:
    """Return `value` if it is a whole number; Lightning has infinity for what is unknown."""
    return value if isinstance(value, int) else None
