"""Features: what stands outside of the core. One table of their names; each is loaded at its first use.

The core imports no folder below this one. It names a feature by its flag, command or method, and this table says where
that is. Whoever deletes a folder loses what it has, and the core still works. The table runs in every process; a
feature may import every folder below it, `notebook` included.

Reasons: docs/design/layout.md
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nbaccel.errors import FeatureMissing

__all__ = ["feature", "mode_flag", "module_of", "modules_of", "named", "needed_by", "shown_by"]

_TABLE = {  # "module:object", below this package
    # modes of a cell, by their flag
    "--sweep": "sweep.cell_mode:SweepMode",
    "--check": "check.cell_mode:CheckMode",
    "--speed": "speed.cell_mode:SpeedMode",
    "--nodes": "cluster.cell_mode:NodesMode",
    # what draws
    "the panel of a run": "panel.notebook_views:NotebookViews",
    "the picture of a run": "panel.run_figure:RunFigure",
    "the button of a run": "panel.stop_button:StopButton",
    "Run.figure": "panel.figure:draw",
    "Run.plot": "panel.display_slot:kept",
    "Run.panel": "panel.panel:Panel",
    # parts of the history of a run
    "counted items of a map": "map.item_count:ItemCount",
    # values of flags
    "the values of --sweep": "sweep.swept_values:cut_out",
    "a value of --sweep": "sweep.swept_values:read_swept",
    # strategies
    "--strategy fsdp": "sharded.fully_sharded:FullySharded",
    "--strategy deepspeed": "deepspeed.zero:ZeroPartitioned",
    # what lasts from cell to cell
    "%%accelerate --bg": "background.left_cell:leave",
    "a run in the background": "background.background_run:Background",
    "the place of a run in the background": "background.left_cell:place_in_the_cell",
    "ranks that stay": "persistent.persistent_session:PersistentSession",
    "ranks that stay: commands": "persistent.stay_commands:run_command",
    # commands
    "%accelerate doctor": "reports.doctor:doctor_report",
    "%accelerate memory": "reports.memory_report:report_of_memory",
    "%accelerate why": "reports.why:why_report",
    "the form of %accelerate config": "reports.form:Form",
    "the table of %accelerate config": "reports.choices:overview",
    "the batch size of the notebook's loaders": "reports.choices:batch_size_of",
    "%accelerate estimate": "batch_size.command:estimate_report",
    "%accelerate export": "export.export_command:export_script",
    "%accelerate runs": "runs.runs:show_runs",
    "%accelerate nodes": "cluster.cell_mode:show_nodes",
    # commands of the terminal
    "nbaccel launch": "scripts.script_command:launch",
    "nbaccel demo": "scripts.demo_command:add_arguments",
    "nbaccel estimate-memory": "batch_size.estimate_command:add_arguments",
    # other ways to start
    "ranks from a clean process": "clean_start.zygote:Zygote",
    "launch(nodes=...)": "cluster.cell_mode:launch_on_nodes",
    # what leaves the GPUs for a run
    "free_kernel": "free_kernel.models_on_host:models_on_host",
    # rows of the doctor's report
    "doctor: nodes": "cluster.node_environment:ways_to_nodes",
    # tasks of ranks
    "a cell that saves itself": "cell_checkpoints.saving_task:SavingCellTask",
    # trackers
    "log_with": "trackers.tracker_hub:Trackers",
    "log_with=aim": "trackers.aim:Aim",
    "log_with=clearml": "trackers.clearml:ClearML",
    "log_with=comet_ml": "trackers.comet_ml:Comet",
    "log_with=csv": "trackers.text:Csv",
    "log_with=dvclive": "trackers.dvclive:DVCLive",
    "log_with=jsonl": "trackers.text:JsonLines",
    "log_with=mlflow": "trackers.mlflow:MLflow",
    "log_with=swanlab": "trackers.wandb:SwanLab",
    "log_with=tensorboard": "trackers.tensorboard:TensorBoard",
    "log_with=trackio": "trackers.wandb:Trackio",
    "log_with=wandb": "trackers.wandb:WeightsAndBiases",
    # setups of ranks
    "loops of a launched function": "loop_flags.rank_setup:change_loops",
    # what IPython asks for
    "what Tab offers": "completion.offers:Offers",
    # words on flags
    "flags without an effect": "flag_effects.flag_watch:FlagWatch",
    # changes of loops that prepare nothing
    "-p or -a above an unmodified loop": "loop_flags.loop_changes:loop_changes",
    # modules that show what a feature has
    "testing: conformance": "conformance:strategy_programs",
    # what forms groups of ranks anew after they were aborted
    "groups of ranks that stay": "retry.outside_retry:renew",
    # choices
    "keep-runs": "runs.runs:keep_runs",
    # methods of the Accelerator
    "Accelerator.estimate": "batch_size.estimate:estimate_of_accelerator",
    "Accelerator.find_batch_size": "batch_size.planner:BatchSizePlanner",
    "Accelerator.forward_backward": "micro_batches.forward_backward:StepRecovery",
    "Accelerator.forward_backward(micro_batch_size='auto')": "batch_size.planner:find_micro_batch_size",
    "gradients for forward_backward": "micro_batches.lent_gradients:Gradients",
    "gradients of DDP for forward_backward": "micro_batches.gradient_buckets:lend_of_replicas",
    "Accelerator.map": "map.map_worker:map_in_ranks",
    "Accelerator.prepare(device_map=...)": "big_models.map_of_rank:place_for_rank",
    "Accelerator.profile": "accelerate_helpers.profiling:profiling",
    # what meets a library in ranks, by the library's name
    "ranks with accelerate": "other_libraries.one_process:of_accelerate",
    "ranks with transformers": "other_libraries.one_process:of_transformers",
    "ranks with lightning_utilities": "other_libraries.existing_world:of_lightnings_utilities",
    "ranks with lightning": "other_libraries.existing_world:of_lightning",
    "ranks with lightning_fabric": "other_libraries.existing_world:of_lightning",
    "ranks with pytorch_lightning": "other_libraries.existing_world:of_lightning",
    "log-ins of wandb": "other_libraries.tracked_runs:log_ins_of_wandb",
    "log-ins of huggingface_hub": "other_libraries.tracked_runs:log_ins_of_the_hub",
    "reports of rich": "other_libraries.existing_world:text_of_rich",
    "reports of transformers": "other_libraries.trainer_reports:reports",
    "reports of lightning": "other_libraries.trainer_reports:reports",
    "reports of pytorch_lightning": "other_libraries.trainer_reports:reports",
    "one program with tqdm": "other_libraries.progress_bars:bars",
    "one program with rich": "other_libraries.progress_bars:bars",
    "one program with fastprogress": "other_libraries.progress_bars:bars",
    "one program with torchmetrics": "other_libraries.local_metrics:metrics",
    "one program with ignite": "other_libraries.local_metrics:metrics",
    "one program with torch.utils.tensorboard": "other_libraries.tracked_runs:one_run_of_tensorboard",
    "one program with mlflow": "other_libraries.tracked_runs:one_run_of_mlflow",
    "one program with wandb": "other_libraries.tracked_runs:one_run_of_wandb",
    "inline runs with transformers": "other_libraries.trainer_reports:reports_meanwhile",
    "inline runs with lightning": "other_libraries.trainer_reports:reports_meanwhile",
    "inline runs with pytorch_lightning": "other_libraries.trainer_reports:reports_meanwhile",
    # folders that `load_state` may find
    "a checkpoint of Accelerate": "accelerate_checkpoints.accelerate_format:read_foreign",
    "random states of Accelerate": "accelerate_checkpoints.accelerate_format:restore_foreign_generators",
    # what a program may hand to `prepare`
    "a model on several devices": "big_models.map_of_rank:refuse_unexchanged",
    "a model with weights on the meta device": "big_models.map_of_rank:refuse_waiting",
    "the base of a quantised model": "quantised_base.frozen_base:KnownBases",
}


def feature(name: str) -> Any:
    """Return the object that the table has under a name; loads it at the first call.

    Args:
        name: A name of the table.

    Raises:
        FeatureMissing: The folder of the feature does not exist.
    """
    module, _, attribute = _TABLE[name].partition(":")
    path = f"{__name__}.{module}"
    if (found := getattr(sys.modules.get(path), attribute, None)) is not None:
        return found
    return getattr(module_of(name, path), attribute)


@functools.cache  # asked for by each launch and each rank, and some of the table's texts are wherever it was loaded
def named(beginning: str) -> tuple[str, ...]:
    """Return the names of the table that begin with a text, without that text.

    Args:
        beginning: The text, such as "mode ".
    """
    return tuple(name.removeprefix(beginning) for name in _TABLE if name.startswith(beginning))


def modules_of(beginning: str) -> dict[str, str]:
    """Return the modules of the names of the table that begin with a text, by these names without that text.

    Args:
        beginning: The text, such as "mode ".
    """
    return {name: f"{__name__}.{_TABLE[beginning + name].partition(':')[0]}" for name in named(beginning)}


def mode_flag(options: object) -> str | None:
    """Return the flag by which a cell runs in another mode; None if it runs as usual.

    Args:
        options: The flags of the cell.
    """
    return next((f"--{name}" for name in named("--") if getattr(options, name, None)), None)


def module_of(name: str, module: str) -> ModuleType:
    """Import `module`, which `name` needs.

    Raises:
        FeatureMissing: It belongs to a feature that is not there.
    """
    with needed_by(name):
        return importlib.import_module(module)


@contextmanager
def needed_by(name: str) -> Iterator[None]:
    """Around imports of features that `name` cannot do without.

    Raises:
        FeatureMissing: One of them is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing(name, _folder(error)) from None


@contextmanager
def shown_by(face: str) -> Iterator[None]:
    """Around the imports of what the module `face` shows of features, at its end.

    Where their folder is not there, `face` can be imported, and whoever asks for one of its names is told so.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        folder, module = _folder(error), sys.modules[face]
        others = module.__getattr__

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name in module.__all__:
                raise _missing(f"{face}.{name}", folder)
            return others(name)

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def _folder(error: ModuleNotFoundError) -> str:
    """Return the folder of features that is not there; raise `error` if it is about anything else."""
    if not str(error.name).startswith(f"{__name__}."):
        raise error
    return ".".join(str(error.name).split(".")[:3])


def _missing(name: str, folder: str) -> FeatureMissing:
    return FeatureMissing(
        f"{name} belongs to {folder}, which this installation of nbaccel lacks: install nbaccel as a whole, or leave "
        "it out."
    )
