"""Make Accelerate and transformers in a rank forget that the notebook ran in one process. Runs in ranks; imports none.

They find the rank and the world again. Accelerate keeps one state per process: in a rank it is as in a new process. A
transformers `TrainingArguments` or `Trainer`, and an accelerate `Accelerator`, that came from the notebook get the
rank, the world and the device at their first use; objects that cannot be set up again are refused with the line to
move. Not covered: numbers that the user's program derived from them in the notebook.

If a rank is the only one, nothing changes: the notebook's values are right here, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from nbaccel.errors import NotInRanks
from nbaccel.features.other_libraries.existing_world import SetUpAnew, name_of, names_in, refuse
from nbaccel.launching.ipc.import_hooks import Assignment, Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank
from nbaccel.namespace.wrappers import MADE_WITH

__all__ = ["of_accelerate", "of_transformers"]

_STATES = ("PartialState", "AcceleratorState", "GradientState")
_ASKS_FOR_THE_WORLD = frozenset(
    {"num_processes", "process_index", "world_size", "prepare", "prepare_model", "prepare_deepspeed", "prepare_fsdp"}
)
"""Names in a constructor that show that its numbers, or the models that it holds, were made for one process."""

_PLUGINS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


# --- accelerate --------------------------------------------------------------------------------------------------


def of_accelerate(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make accelerate determine the rank and the world again."""
    yield "accelerate.accelerator", _note_settings
    if here.world.is_distributed:
        states = _States()
        prepared = SetUpAnew(("gradient_state",), _refuse_prepared)
        yield "accelerate.state", states.forget
        yield "accelerate.accelerator", partial(_watch_accelerators, states)
        yield "accelerate.optimizer", lambda module: prepared.watch(module.AcceleratedOptimizer)
        yield "accelerate.scheduler", lambda module: prepared.watch(module.AcceleratedScheduler)
        yield "accelerate.data_loader", partial(_watch_loaders, prepared)
        yield "accelerate.logging", states.set_up_for_loggers


class _States:
    """Accelerate's three states, each shared by all objects of its class in a process."""

    def __init__(self) -> None:
        self._notebooks: dict[str, dict[str, Any]] = {name: {} for name in _STATES}

    def forget(self, module: Any) -> list[Change]:
        """Empty the states, and keep their values; make an object that was sent to this rank share the rank's state."""
        kinds = {name: getattr(module, name) for name in _STATES}

        def share(state: Any, values: dict[str, Any]) -> None:
            self._notebooks[type(state).__name__] = values
            state.__dict__ = state._shared_state

        return [
            partial(self._empty, kinds),
            *(Assignment(kind, "__setstate__", share) for kind in kinds.values()),
            *self._set_up_at_first_use(module.PartialState),
        ]

    def _empty(self, kinds: Mapping[str, Any]) -> None:
        for name, kind in kinds.items():
            self._notebooks[name] = dict(kind._shared_state)
            kind._shared_state.clear()

    def of_notebook(self, name: str) -> Mapping[str, Any]:
        """Return the notebook's values of the state of that name."""
        return self._notebooks[name]

    def _set_up_at_first_use(self, kind: Any) -> list[Change]:
        """Set up a `PartialState` without an Accelerator: one of the notebook, or one that a library makes first.

        Without the argument "cpu", accelerate takes a process without a GPU for the only one.
        """

        def beginning(begins: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(begins)
            def begin(state: Any, cpu: bool = False, **kwargs: Any) -> None:
                begins(state, cpu or (not kind._shared_state and _is_on_cpu()), **kwargs)

            return begin

        def finding(missing: Callable[..., Any]) -> Callable[..., Any]:
            def attribute(state: Any, name: str) -> Any:
                if kind._shared_state or name.startswith("__"):
                    return missing(state, name)
                self._set_up(kind)
                return getattr(state, name)

            return attribute

        return [Replacement([kind], "__init__", beginning), Replacement([kind], "__getattr__", finding)]

    def _set_up(self, kind: Any) -> None:
        kind(self._notebooks["PartialState"].get("_cpu", False))

    def set_up_for_loggers(self, module: Any) -> list[Change]:
        """Let accelerate's loggers work, which need a state, if the notebook had set up one."""

        def logging(logs: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(logs)
            def log(adapter: Any, *args: Any, **kwargs: Any) -> None:
                if self._notebooks["PartialState"] and not module.PartialState._shared_state:
                    self._set_up(module.PartialState)
                kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1  # this frame
                logs(adapter, *args, **kwargs)

            return log

        return [Replacement([module.MultiProcessAdapter], "log", logging)]


def _note_settings(module: Any) -> list[Change]:
    """Record in every Accelerator the arguments that it was made with: the notebook gets one like it."""

    def noting(begins: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(begins)
        def begin(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            begins(accelerator, *args, **kwargs)
            vars(accelerator)[MADE_WITH] = args, kwargs

        return begin

    return [Replacement([module.Accelerator], "__init__", noting)]


def _is_on_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")


def _watch_accelerators(states: _States, module: Any) -> list[Change]:
    kind = module.Accelerator
    anew = SetUpAnew(("state", "gradient_state"), partial(_renew_accelerator, states, module))
    models = SetUpAnew((), lambda model: None)

    def preparing(prepares: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepares)
        def prepare_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model not in models and getattr(model, "_is_accelerate_prepared", False):
                # An accelerator of the notebook prepared it, for one process: nothing would be wrapped here.
                model._is_accelerate_prepared = False
            wrapped = prepares(accelerator, model, *args, **kwargs)
            models.add(wrapped)
            return wrapped

        return prepare_model

    return [*anew.watch(kind), Replacement([kind], "prepare_model", preparing)]


def _renew_accelerator(states: _States, module: Any, accelerator: Any) -> None:
    """Set `accelerator` up again, with its own settings, for this rank."""
    values = vars(accelerator)
    if any(values.get(name) for name in ("_models", "_optimizers", "_schedulers", "_dataloaders")):
        refuse(accelerator, "what it prepared there belongs to one process")
    if any(os.environ.get(name, "").lower() == "true" for name in _PLUGINS):
        refuse(accelerator, "its plugins were set up for one process")
    was = states.of_notebook("AcceleratorState")
    accumulation = states.of_notebook("GradientState").get("plugin_kwargs", {})
    groups = values.get("init_handler")
    values["state"] = module.AcceleratorState(
        mixed_precision=was.get("_mixed_precision"),
        cpu=was.get("_cpu", False),
        dynamo_plugin=was.get("dynamo_plugin"),
        _from_accelerator=True,
        **(groups.to_kwargs() if groups is not None else {}),
    )
    plugin = module.GradientAccumulationPlugin(**accumulation)
    values["gradient_state"] = module.GradientState(gradient_accumulation_plugin=plugin)
    if not values["state"].is_main_process:
        values["trackers"] = []  # the notebook's process was the main one


def _watch_loaders(prepared: SetUpAnew, module: Any) -> list[Change]:
    return [*prepared.watch(module.DataLoaderShard), *prepared.watch(module.DataLoaderDispatcher)]


def _refuse_prepared(value: object) -> NoReturn:
    name = name_of(value)
    raise NotInRanks(
        f"{f'`{name}`' if name else f'this {type(value).__name__}'} was prepared in an earlier cell, for one process: "
        "each rank would train on all the data by itself. Move the line `accelerator.prepare(...)` into "
        "this cell, or into the function that the ranks run, and give it what was not prepared yet."
    )


# --- transformers ------------------------------------------------------------------------------------------------


def of_transformers(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make transformers determine the rank and the world again."""
    if here.world.is_distributed:
        yield "transformers.training_args", _watch_arguments
        yield "transformers.trainer", _watch_trainers


def _watch_arguments(module: Any) -> list[Change]:
    names, kind = ("_setup_devices", "distributed_state", "_n_gpu"), module.TrainingArguments
    return SetUpAnew(names, partial(_renew_arguments, kind, names)).watch(kind)


def _renew_arguments(kind: type, names: tuple[str, ...], arguments: Any) -> None:
    """Find the world, the rank, the device and the number of GPUs for `arguments`."""
    if _asks_for_the_world(type(arguments), kind, "__post_init__"):
        refuse(arguments, "it worked out its numbers for one process")
    values = vars(arguments)
    for name in names:
        values.pop(name, None)
    _renew_precision(arguments)
    with _states_stay():
        _ = arguments._setup_devices


def _renew_precision(arguments: Any) -> None:
    """Set the precision to that of the arguments, else to the default of the ranks."""
    own = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else None
    variable = "ACCELERATE_MIXED_PRECISION"
    if "mixed_precision" not in vars(arguments):  # transformers 4 passes it to accelerate by the environment
        if own is not None:
            os.environ[variable] = own
    elif own is None:
        arguments.mixed_precision = os.environ.get(variable, "no")


@contextmanager
def _states_stay() -> Iterator[None]:
    """Keep the states that this rank's own code has set up already: making arguments drops them."""
    module: Any = sys.modules["accelerate.state"]
    shared = [module.PartialState._shared_state, module.AcceleratorState._shared_state]
    before = [dict(state) for state in shared]
    yield
    for state, values in zip(shared, before, strict=True):
        if values:
            state.clear()
            state.update(values)


def _watch_trainers(module: Any) -> list[Change]:
    kind = module.Trainer
    anew = SetUpAnew(("accelerator",), partial(_renew_trainer, module))

    def creating(creates: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(creates)
        def create_accelerator_and_postprocess(trainer: Any) -> None:
            _ = trainer.args.device  # as in a script: the arguments come first, and give accelerate device, precision
            creates(trainer)

        return create_accelerator_and_postprocess

    return [
        *anew.watch(kind),
        *(Replacement([kind], name, partial(_after_meeting, anew)) for name in ("train", "evaluate", "predict")),
        Replacement([kind], "create_accelerator_and_postprocess", creating),
    ]


def _after_meeting(anew: SetUpAnew, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        anew.meet(trainer)
        return method(trainer, *args, **kwargs)

    return called


def _renew_trainer(module: Any, trainer: Any) -> None:
    """Give `trainer` an accelerator of this rank, and redo what its constructor derived from the notebook's."""
    if _asks_for_the_world(type(trainer), module.Trainer, "__init__"):
        refuse(trainer, "its constructor worked out numbers, or prepared models, for one process")
    arguments = trainer.args
    # The constructor seeds: the order of samples follows from this, and each rank has a seed of its own by now.
    (module.enable_full_determinism if arguments.full_determinism else module.set_seed)(arguments.seed)
    vars(trainer).pop("accelerator", None)
    trainer.create_accelerator_and_postprocess()
    trainer._train_batch_size = arguments.train_batch_size
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    # What a training or an evaluation in the notebook left is prepared for one process.
    vars(trainer).pop("_eval_dataloaders", None)
    for name, inner in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler")):
        wrapper = vars(trainer).get(name)
        if type(wrapper).__module__.startswith("accelerate."):
            setattr(trainer, name, getattr(wrapper, inner))
    trainer.model_wrapped = trainer.model
    if trainer.model is not None and trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, arguments.device)


def _asks_for_the_world(kind: type, library: type, method: str) -> bool:
    """Return whether a class between `kind` and the `library`'s own has a constructor that depends on the world."""
    classes = kind.__mro__[: kind.__mro__.index(library)]
    codes = [getattr(vars(one).get(method), "__code__", None) for one in classes]
    return any(code is not None and names_in(code) & _ASKS_FOR_THE_WORLD for code in codes)
