"""nbaccel: train on every device of the machine from a notebook cell. The public names; their code is in the packages.

Importing it costs milliseconds and touches neither torch nor IPython nor a device: a name is loaded from its
module when it is first asked for. `%load_ext nbaccel` gives the notebook `%%accelerate` and `%accelerate`.
Modules that programs know from Accelerate (``nbaccel.utils``, ``nbaccel.state``, …) are attributes as well, as there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; a test keeps it equal to the table below
    from types import FrameType, ModuleType

    from IPython.core.interactiveshell import InteractiveShell

    from nbaccel.base.settings import RunSettings as RunSettings
    from nbaccel.base.tracking import GeneralTracker as GeneralTracker
    from nbaccel.base.world import World as World
    from nbaccel.errors import (
        CannotFork as CannotFork,
        CannotSave as CannotSave,
        CannotSend as CannotSend,
        CannotSplit as CannotSplit,
        CheckpointCorrupt as CheckpointCorrupt,
        CollectiveMismatch as CollectiveMismatch,
        LaunchRefused as LaunchRefused,
        NbaccelError as NbaccelError,
        NestedLaunch as NestedLaunch,
        NoBatchSizeFits as NoBatchSizeFits,
        NoInput as NoInput,
        NoSuchDevice as NoSuchDevice,
        NotPrepared as NotPrepared,
        PeerFailed as PeerFailed,
        RankDied as RankDied,
        RanksFailed as RanksFailed,
        ResultsMissing as ResultsMissing,
        RunStopped as RunStopped,
        StepCorrupted as StepCorrupted,
        UntrustedPickle as UntrustedPickle,
    )
    from nbaccel.features.accelerate_helpers.accelerate_launchers import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from nbaccel.features.accelerate_helpers.shared_generators import synchronize_rng_states as synchronize_rng_states
    from nbaccel.features.big_models.checkpoint_loading import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from nbaccel.features.big_models.device_plan import infer_auto_device_map as infer_auto_device_map
    from nbaccel.features.big_models.dispatching import (
        cpu_offload as cpu_offload,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
    )
    from nbaccel.features.big_models.empty_weights import (
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
    )
    from nbaccel.features.big_models.model_hooks import cpu_offload_with_hook as cpu_offload_with_hook
    from nbaccel.features.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from nbaccel.features.length_batches.length_batches import batches_by_length as batches_by_length
    from nbaccel.features.local_sgd.averaged_models import LocalSGD as LocalSGD
    from nbaccel.features.map.map_items import map as map
    from nbaccel.features.retry import find_executable_batch_size as find_executable_batch_size
    from nbaccel.features.runs.runs import Runs as Runs
    from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from nbaccel.features.sweep.sweep import sweep as sweep
    from nbaccel.launching.api import Run as Run, launch as launch
    from nbaccel.notebook.magics import panel as panel
    from nbaccel.train.accelerator import Accelerator as Accelerator
    from nbaccel.train.checkpoint.directory import ProjectConfiguration as ProjectConfiguration
    from nbaccel.train.data import (
        DataLoaderConfiguration as DataLoaderConfiguration,
        skip_first_batches as skip_first_batches,
    )
    from nbaccel.train.distributed.partial_state import (
        AcceleratorState as AcceleratorState,
        PartialState as PartialState,
    )
    from nbaccel.train.distributed.process_control import DistributedType as DistributedType
    from nbaccel.train.distributed.rng import set_seed as set_seed
    from nbaccel.train.oom.memory.free_memory import free_memory as free_memory
    from nbaccel.train.step.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from nbaccel.train.step.kwargs_handlers import (
        AutocastKwargs as AutocastKwargs,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
    )

    last_run: Run | None
    runs: Runs
    __version__: str

_VERSION = "0.1.0"

_INTERFACE = "1.15.0"
"""The version of Accelerate whose names and their meaning this package provides."""

_HOME = {
    "Accelerator": "nbaccel.train.accelerator",
    "AcceleratorState": "nbaccel.train.distributed.partial_state",
    "AutocastKwargs": "nbaccel.train.step.kwargs_handlers",
    "CannotFork": "nbaccel.errors",
    "CannotSave": "nbaccel.errors",
    "CannotSend": "nbaccel.errors",
    "CannotSplit": "nbaccel.errors",
    "CheckpointCorrupt": "nbaccel.errors",
    "CollectiveMismatch": "nbaccel.errors",
    "DDPCommunicationHookType": "nbaccel.train.step.kwargs_handlers",
    "DataLoaderConfiguration": "nbaccel.train.data",
    "DeepSpeedPlugin": "nbaccel.features.deepspeed.plugin",
    "DistributedDataParallelKwargs": "nbaccel.train.step.kwargs_handlers",
    "DistributedType": "nbaccel.train.distributed.process_control",
    "FullyShardedDataParallelPlugin": "nbaccel.features.sharded.fsdp_options",
    "GeneralTracker": "nbaccel.base.tracking",
    "GradScalerKwargs": "nbaccel.train.step.kwargs_handlers",
    "GradientAccumulationPlugin": "nbaccel.train.step.accumulation",
    "InitProcessGroupKwargs": "nbaccel.train.step.kwargs_handlers",
    "LaunchRefused": "nbaccel.errors",
    "LocalSGD": "nbaccel.features.local_sgd.averaged_models",
    "NbaccelError": "nbaccel.errors",
    "NestedLaunch": "nbaccel.errors",
    "NoBatchSizeFits": "nbaccel.errors",
    "NoInput": "nbaccel.errors",
    "NoSuchDevice": "nbaccel.errors",
    "NotPrepared": "nbaccel.errors",
    "PartialState": "nbaccel.train.distributed.partial_state",
    "PeerFailed": "nbaccel.errors",
    "ProfileKwargs": "nbaccel.train.step.kwargs_handlers",
    "ProjectConfiguration": "nbaccel.train.checkpoint.directory",
    "RankDied": "nbaccel.errors",
    "RanksFailed": "nbaccel.errors",
    "ResultsMissing": "nbaccel.errors",
    "Run": "nbaccel.launching.api",
    "RunSettings": "nbaccel.base.settings",
    "RunStopped": "nbaccel.errors",
    "Runs": "nbaccel.features.runs.runs",
    "StepCorrupted": "nbaccel.errors",
    "UntrustedPickle": "nbaccel.errors",
    "World": "nbaccel.base.world",
    "batches_by_length": "nbaccel.features.length_batches.length_batches",
    "cpu_offload": "nbaccel.features.big_models.dispatching",
    "cpu_offload_with_hook": "nbaccel.features.big_models.model_hooks",
    "debug_launcher": "nbaccel.features.accelerate_helpers.accelerate_launchers",
    "disk_offload": "nbaccel.features.big_models.dispatching",
    "dispatch_model": "nbaccel.features.big_models.dispatching",
    "find_executable_batch_size": "nbaccel.features.retry",
    "free_memory": "nbaccel.train.oom.memory.free_memory",
    "infer_auto_device_map": "nbaccel.features.big_models.device_plan",
    "init_empty_weights": "nbaccel.features.big_models.empty_weights",
    "init_on_device": "nbaccel.features.big_models.empty_weights",
    "launch": "nbaccel.launching.api",
    "load_checkpoint_and_dispatch": "nbaccel.features.big_models.checkpoint_loading",
    "load_checkpoint_in_model": "nbaccel.features.big_models.checkpoint_loading",
    "map": "nbaccel.features.map.map_items",
    "notebook_launcher": "nbaccel.features.accelerate_helpers.accelerate_launchers",
    "panel": "nbaccel.notebook.magics",
    "set_seed": "nbaccel.train.distributed.rng",
    "skip_first_batches": "nbaccel.train.data",
    "sweep": "nbaccel.features.sweep.sweep",
    "synchronize_rng_states": "nbaccel.features.accelerate_helpers.shared_generators",
}
"""Each public name, and the module that defines it or that the name stands for."""

_MODULES = frozenset(
    [
        "accelerator",
        "big_modeling",
        "checkpointing",
        "commands",
        "data_loader",
        "hooks",
        "inference",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "parallelism_config",
        "scheduler",
        "state",
        "tracking",
        "utils",
    ]
)
"""Modules that ``import accelerate`` makes available."""

__all__ = sorted(_HOME.keys() - {"map"})  # a star import must not replace Python's own map


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "last_run":
        return _last_run()
    if name == "runs":
        return _runs()
    if name == "__version__":
        return _version_for(sys._getframe(1))
    if name not in _HOME:
        from nbaccel.base.missing_names import missing_from

        return missing_from(__name__, "nbaccel.utils")(name)
    value = globals()[name] = getattr(_module_of(name), name)
    return value


def _module_of(name: str) -> ModuleType:
    if not _HOME[name].startswith(f"{__name__}.features."):
        return import_module(_HOME[name])
    from nbaccel.features import module_of

    return module_of(f"{__name__}.{name}", _HOME[name])


def _version_for(reader: FrameType) -> str:
    """Return nbaccel's version, or Accelerate's interface version to a program with ``import nbaccel as accelerate``.

    Such programs compare it, as all examples of diffusers do: for a version older than 0.16 they register no hooks, so
    that their checkpoints would silently lack the averaged weights.
    """
    called = reader.f_locals.get("accelerate", reader.f_globals.get("accelerate"))
    return _INTERFACE if called is sys.modules[__name__] else _VERSION


def _last_run() -> Run | None:
    """Return the last run of this process, of a `%%accelerate` cell or of `launch`; None before the first. See `Run`.

    It changes with each run, so it cannot be imported by name: write `nbaccel.last_run`.
    """
    launching = sys.modules.get("nbaccel.launching.launcher")  # without it there was no run
    return None if launching is None else launching.default_launcher().last_run


def _runs() -> Runs:
    """Return the runs of this process, oldest first; see `Runs`.

    With `keep-runs` chosen in a notebook that has the extension, the runs of earlier kernels come first, and those that
    another kernel has added meanwhile last.
    """
    from nbaccel.launching.launcher import default_launcher

    magics = sys.modules.get("nbaccel.notebook.magics")
    if magics is not None:
        magics.follow_kept_runs()
    runs: Runs = _module_of("Runs").Runs(default_launcher().ended_runs)
    return runs


def __dir__() -> list[str]:
    others = ["map", "last_run", "runs", "__version__", "load_ipython_extension", "unload_ipython_extension"]
    return [*__all__, *others]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics with a notebook; ``%load_ext nbaccel`` calls it.

    Args:
        ipython: The shell of the notebook.

    Example:
        In a notebook::

            %load_ext nbaccel
    """
    from nbaccel.notebook.magics import register

    register(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Restore a notebook to its state before ``%load_ext``; ``%unload_ext nbaccel`` calls it.

    Args:
        ipython: The shell of the notebook.

    Example:
        In a notebook::

            %unload_ext nbaccel
    """
    from nbaccel.notebook.magics import unregister

    unregister(ipython)
