"""The compatibility page: every name of Accelerate 1.15 that a notebook user meets, ours or not, and what differs.

`python notebooks/compatibility.py` writes `03_accelerate_compatibility.ipynb` from the table below. Tests hold the
table against nbaccel and against the real accelerate, and the notebook against the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

PAGE = Path(__file__).parent / "03_accelerate_compatibility.ipynb"

STATES = {
    "yes": "the same meaning and the same numbers",
    "differs": "ours, with a difference on purpose",
    "later": "not in this version",
    "no": "not planned",
}


@dataclass(frozen=True)
class Row:
    """One name. state: a key of `STATES`.  note: what a user should know; for `differs`, the difference."""

    name: str
    state: str
    note: str = ""

    @property
    def is_ours(self) -> bool:
        return self.state in ("yes", "differs")


@dataclass(frozen=True)
class Group:
    """Names that live in one place.

    theirs, ours: where a program finds them, "package.module" or "package.module:Class".
    table: a line per name, "name | state | note"; several names with one state and note are separated by commas.
    """

    title: str
    theirs: str
    ours: str
    table: str

    def rows(self) -> Iterator[Row]:
        for line in filter(str.strip, self.table.splitlines()):
            names, state, *note = (part.strip() for part in line.split("|", 2))
            for name in names.split(","):
                yield Row(name.strip(), state, "".join(note))


DIFFERENCES = """
| what | Accelerate 1.15 | nbaccel |
|---|---|---|
| last, shorter window of accumulation | its m batches weigh m/N of a step | they weigh a whole step; `GradientAccumulationPlugin(scale_last_window=False)` for Accelerate's numbers |
| `clip_grad_norm_` in a block of `accumulate` that does not step | clips what has been summed so far | clips once, the sum of the window, in the block that steps; under `if accelerator.sync_gradients:` both do this |
| a batch that is taken inside `accumulate` | the loader's last batch ends the window of the block after it | it ends the window of the block that trains on it |
| several loaders in turn under `accumulate` | the last batch of the loader begun last ends a window | that of any of them does |
| two models with a block of `accumulate` each, on the same batch | each block counts as a batch: with N = 2 the first model never steps | each model has windows of its own |
| `loss.backward()` in place of `accelerator.backward(loss)` | trains, not divided where batches accumulate; fails in the scaler under fp16 | trains, with its steps counted and one warning of what is missed; refused in a sentence under fp16 |
| two `Accelerator()` in one process | share their accumulation; another precision is an error that asks for a restart | do not know each other |
| `break` out of a prepared loader | the loader stays the active one | the loop is over, its window too |
| several processes on a CPU machine | train separately unless `cpu=True` | form one group |
| a model that was not prepared, in several ranks | N separate trainings | in a cell one training, its batches split over the ranks; in a function, and with `--strict`, an error before the first step, with the `prepare` line |
| a loader that was not prepared beside a model that was | each rank trains on all batches, without a word | the same, with one warning at the line of the loop |
| `save_state` on the main process only | the other ranks' random states are missing, or a deadlock | works; ranks without a state begin derived ones, and it says so |
| `save_state()` with automatic names, in a folder that has some | an error: the number exists | goes on behind the newest, and a line says so; a number that is set by hand and exists is refused |
| `total_limit` | deletes whatever has the lowest number, or no number | deletes checkpoints of this run, and of those that it goes on from |
| `release_memory(model)` | the `Accelerator` holds the model | nothing of ours holds it |
| `accelerate.__version__`, after `import nbaccel as accelerate` | its version | "1.15.0", that of the interface, which programs compare; `nbaccel.__version__` is our own |
| resuming inside an epoch | dropout draws other numbers than it would have | the next loss is bit for bit the one of the uninterrupted run |
| `split_between_processes` of ranges, arrays, sets, strings | not split: every rank does all | split, or an error that says why not |
| shuffling in several ranks | rank 0's generator is sent around at every epoch | follows from the seed, the epoch and how often it was begun, without a message; `use_seedable_sampler=True` gives Accelerate's order |
| a prepared loader that one rank begins alone | waits for the others, or is answered by another collective | `next(iter(loader))` and loops without gradients leave the order of the training as it is; after a loop that may train, the next one of all ranks is an error |
| random numbers that a dataset draws in the main process (`num_workers=0`) | shift against those of the loop and of other loaders: one batch is read ahead | come in the order of raw PyTorch where batches stay on the CPU, so an epoch that is resumed draws them again; one batch is read ahead on CUDA, and of a loader whose end its length does not tell |
| `Accelerator(split_batches=True)` | is ignored: only `DataLoaderConfiguration(split_batches=True)` splits | splits, as the configuration does |
| `even_batches=False`, and ranks with different numbers of batches | waits in the last backward | may be iterated; the first backward is an error with the numbers, unless inside `join_uneven_inputs` |
| collectives with other shapes or in another order | a hang, or garbage, unless in debug mode | the first 16 of each group are compared: an error on every rank that names both sides |
| `destroy_process_group` | the state goes on to claim two processes | a later use forms a new group |
| `device` of a CPU rank | `cpu:0`, which no tensor's device equals | `cpu` |
| fp16 on a CPU | is silently fp32 | is fp16, with a gradient scaler |
| loss scale after many skipped steps | sinks to 0 without a word | a warning; `GradScalerKwargs(min_scale=…)` |
| `log` without a step | the tracker counts | the optimizer step under way; wandb still counts by itself |
| a chosen tracker whose package is missing | left out without a word | an error with the `pip install` line |
| `notebook_launcher(mixed_precision=…)` | is not passed on | is what `Accelerator()` uses |
| `notebook_launcher` after CUDA was used | restart your notebook | the ranks start from a clean process |
| what `notebook_launcher` returns | None | rank 0's value |
| a process group that the function of `notebook_launcher(..., num_processes=1)` leaves | stays, and the next call fails | is ended |
| an error in a rank | rank 0's lost connection, 73 lines | the first rank that failed, with its own traceback |
"""  # noqa: E501 - rows of a table

GROUPS = (
    Group(
        "`from accelerate import …`",
        "accelerate",
        "nbaccel",
        """
        Accelerator, PartialState, skip_first_batches | yes
        notebook_launcher | differs | returns rank 0's value; any state of CUDA; arguments on ports mean nothing here
        debug_launcher | differs | returns rank 0's value
        AutocastKwargs, DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs | yes
        DistributedType, InitProcessGroupKwargs, ProfileKwargs, synchronize_rng_states | yes
        GradScalerKwargs | yes | and `min_scale`
        find_executable_batch_size | differs | all ranks land on one size; halves where Accelerate takes x 0.9
        FullyShardedDataParallelPlugin | differs | FSDP2 alone; options of FSDP1 are translated, or named in one warning
        DeepSpeedPlugin | differs | stages 1 to 3 of one model; with the package `deepspeed`
        ParallelismConfig | later | for models larger than one device: `strategy="fsdp"`
        init_on_device, cpu_offload, cpu_offload_with_hook | yes
        init_empty_weights | differs | tied parameters stay tied
        infer_auto_device_map | differs | keeps room only where something is fetched, for two blocks; `reserve=`
        dispatch_model, disk_offload | differs | weights that a checkpoint has are read from it, and not written again
        load_checkpoint_and_dispatch, load_checkpoint_in_model | differs | the same; wrong shapes are refused first
        prepare_pippy | no
        is_rich_available | no | `nbaccel.utils.is_rich_available`
        """,
    ),
    Group(
        "`Accelerator(…)`",
        "accelerate:Accelerator.__init__",
        "nbaccel:Accelerator.__init__",
        """
        device_placement, gradient_accumulation_steps, cpu, dataloader_config, log_with | yes
        split_batches | differs | splits; Accelerate reads `DataLoaderConfiguration(split_batches=True)` alone
        project_dir, project_config, step_scheduler_with_optimizer, kwargs_handlers | yes
        dynamo_backend, dynamo_plugin | yes
        mixed_precision | differs | "no", "fp16" and "bf16"; fp8 is refused
        gradient_accumulation_plugin | yes | and `scale_last_window`
        rng_types | differs | accepted with a warning: the order of a loader follows from (seed, epoch)
        fsdp_plugin | differs | FSDP2 alone; `strategy="fsdp"` chooses it too
        deepspeed_plugin | differs | one plugin; `strategy="deepspeed"` chooses it too
        deepspeed_plugins, torch_tp_plugin, megatron_lm_plugin, parallelism_config | no | refused by name
        """,
    ),
    Group(
        "`accelerator.…`",
        "accelerate:Accelerator",
        "nbaccel:Accelerator",
        """
        prepare, prepare_model, prepare_data_loader, prepare_optimizer, prepare_scheduler | yes
        accumulate, backward | differs | a short last window weighs a whole step
        no_sync, trigger_sync_in_backward, sync_gradients, gradient_accumulation_steps | yes
        autocast, unscale_gradients, optimizer_step_was_skipped | yes
        clip_grad_norm_, clip_grad_value_ | differs | inside a window of `accumulate`: once, in the block that steps
        gather | differs | values without a tensor, such as texts, are gathered too
        gather_for_metrics | differs | mappings that hold texts keep their values
        reduce | differs | `scale` holds on every device; in Accelerate on a TPU alone
        pad_across_processes | yes
        split_between_processes | differs | also ranges, arrays and sets; a mapping is not changed in place
        wait_for_everyone, main_process_first, local_main_process_first, print | yes
        on_main_process, on_local_main_process, on_last_process, on_process, on_local_process | yes
        is_main_process, is_local_main_process, is_last_process, num_processes, process_index | yes
        local_process_index, distributed_type, use_distributed, mixed_precision | yes
        device | differs | `cpu`, not `cpu:0`
        set_trigger, check_trigger | yes
        save_state | differs | atomic and checked; no collective, so it may be called on the main process only
        load_state | differs | reads Accelerate's folders too; pickles only with `trust=True`, or as torch is told
        register_for_checkpointing, register_save_state_pre_hook, register_load_state_pre_hook | yes
        get_state_dict | differs | the names of a compiled model come without `_orig_mod.`
        save, save_model, unwrap_model, project_dir, logging_dir | yes
        save_iteration | differs | behind the newest that is there, unless it is set by hand
        free_memory, clear | yes
        end_training | yes
        init_trackers | differs | a missing package is an error with the command that installs it
        log | differs | a default step, `average=True`; None is left out; tensors on a GPU do not make the step wait
        get_tracker | yes
        profile, join_uneven_inputs, skip_first_batches, verify_device_map | yes
        even_batches, split_batches, dispatch_batches, non_blocking, use_seedable_sampler | yes
        use_stateful_dataloader | yes | every prepared loader has a `state_dict`, without torchdata
        multi_device, should_save_model, data_parallel_rank | yes
        deepspeed_plugin | yes
        fp8_backend, parallelism_config, torch_device_mesh | differs | always None
        is_fsdp2 | differs | true with `strategy="fsdp"`, whatever version was asked for
        is_composable_parallelism_enabled | differs | always False
        context_parallel_rank, data_parallel_shard_rank, pipeline_parallel_rank | differs | always 0
        tensor_parallel_rank | differs | always 0
        maybe_context_parallel | differs | changes nothing
        lomo_backward | differs | raises NotImplementedError, which says what to use
        deepspeed_ulysses_dl_adapter | no
        """,
    ),
    Group(
        "`PartialState().…`",
        "accelerate:PartialState",
        "nbaccel:PartialState",
        """
        default_device, set_device, initialized, use_distributed | yes
        destroy_process_group | differs | a later use forms a new group
        is_last_process, is_local_main_process, is_main_process, print, wait_for_everyone | yes
        main_process_first, local_main_process_first, split_between_processes | yes
        on_main_process, on_local_main_process, on_last_process, on_process, on_local_process | yes
        """,
    ),
    Group(
        "`from accelerate.state import …`",
        "accelerate.state",
        "nbaccel.state",
        """
        PartialState | yes
        AcceleratorState | differs | several with several precisions may follow each other
        GradientState | differs | `accelerator.gradient_state`: every accelerator has its own
        is_initialized | differs | always true: a state needs no Accelerator before it
        """,
    ),
    Group(
        "`accelerator.gradient_state.…`",
        "accelerate.state:GradientState",
        "nbaccel.train.prepare.contexts:GradientState",
        """
        active_dataloader, end_of_dataloader, in_dataloader, num_steps, remainder | yes
        adjust_scheduler, sync_with_dataloader | yes
        """,
    ),
    Group(
        "Prepared loaders",
        "accelerate.data_loader:DataLoaderShard",
        "nbaccel.train.data:PreparedLoader",
        """
        set_epoch, remainder, total_batch_size, total_dataset_length, state_dict, load_state_dict, batch_sampler | yes
        """,
    ),
    Group(
        "`from accelerate.utils import …`",
        "accelerate.utils",
        "nbaccel.utils",
        """
        set_seed, synchronize_rng_state, synchronize_rng_states, RNGType | yes
        gather | differs | values without a tensor are gathered too
        gather_object | differs | mappings are joined by key; a value that cannot be pickled is an error on every rank
        reduce | differs | `scale` holds on every device; in Accelerate on a TPU alone
        broadcast, broadcast_object_list, pad_across_processes, wait_for_everyone | yes
        concatenate, send_to_device, recursively_apply, slice_tensors, listify, is_torch_tensor | yes
        find_batch_size, convert_to_fp32, convert_outputs_to_fp32 | yes
        extract_model_from_parallel, release_memory, patch_environment | yes
        save | yes | and a path is complete or as it was
        load | differs | tensors and plain data; other objects with `weights_only=False`
        tqdm | yes
        DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration, KwargsHandler | yes
        AutocastKwargs, GradScalerKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs, ProfileKwargs | yes
        DDPCommunicationHookType, DistributedType | yes
        LoggerType | differs | csv and jsonl too
        PrecisionType | differs | no fp8
        is_bf16_available, is_cuda_available, is_mps_available, is_npu_available, is_xpu_available | yes
        is_bnb_available, is_datasets_available, is_deepspeed_available, is_mlflow_available, is_peft_available | yes
        is_tensorboard_available, is_torch_xla_available, is_transformers_available, is_wandb_available | yes
        is_matplotlib_available, is_pandas_available, is_rich_available, is_torchvision_available | yes
        find_executable_batch_size | differs | all ranks land on one size; halves where Accelerate takes x 0.9
        FullyShardedDataParallelPlugin | differs | FSDP2 alone; options of FSDP1 are translated, or named in one warning
        TorchDynamoPlugin | yes
        DynamoBackend, MegatronLMPlugin, TorchTensorParallelPlugin | no
        AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs | no
        merge_fsdp_weights | no
        write_basic_config | differs | chooses for the notebooks of the folder, in its `nbaccel.toml`
        clear_environment, is_compiled_module, is_torch_version | yes
        compare_versions | differs | the first name may also be a version
        convert_bytes | no
        """,
    ),
    Group(
        "`from accelerate.utils.modeling import …`, and from `accelerate.utils`",
        "accelerate.utils.modeling",
        "nbaccel.utils.modeling",
        """
        infer_auto_device_map | differs | keeps room only where something is fetched, for two blocks; `reserve=`
        get_balanced_memory | differs | the least limits with which the model is on accelerators alone; `reserve=`
        get_max_memory | differs | less the room for a context and for activations, and without a context of CUDA
        check_device_map | differs | names of single tensors count, and a place that is none is an error
        clean_device_map | differs | does not change the map that it gets
        load_checkpoint_in_model, load_state_dict | differs | files are mapped; wrong shapes are refused first
        compute_module_sizes, calculate_maximum_sizes, get_max_layer_size, convert_file_size_to_int | yes
        dtype_byte_size, find_tied_parameters, retie_parameters, named_module_tensors | yes
        get_non_persistent_buffers, set_module_tensor_to_device, align_module_device, has_offloaded_params | yes
        check_tied_parameters_in_config, check_tied_parameters_on_same_device, load_offloaded_weights | yes
        get_state_dict_from_offload, get_state_dict_offloaded_model | no | `model.state_dict()` has all tensors
        """,
    ),
    Group(
        "`from accelerate.utils.offload import …`, and from `accelerate.utils`",
        "accelerate.utils.offload",
        "nbaccel.utils.offload",
        """
        offload_state_dict, offload_weight, load_offloaded_weight, save_offload_index | yes
        extract_submodules_state_dict, OffloadedWeightsLoader, PrefixedDataset | no | weights wait in their checkpoint
        """,
    ),
    Group(
        "`from accelerate.utils.bnb import …`, and from `accelerate.utils`",
        "accelerate.utils.bnb",
        "nbaccel.utils.bnb",
        """
        BnbQuantizationConfig | yes
        load_and_quantize_model | differs | on a CPU too; parts on the host and on the disk are not quantised
        quantize_and_offload_8bit | no | what waits is not quantised
        """,
    ),
    Group(
        "`from accelerate.hooks import …`",
        "accelerate.hooks",
        "nbaccel.hooks",
        """
        ModelHook, SequentialHook, CpuOffload, UserCpuOffloadHook, AlignDevicesHook | yes
        add_hook_to_module | differs | hooked modules can be pickled
        remove_hook_from_module, remove_hook_from_submodules | differs | what was on the disk is in memory then
        attach_align_device_hook, attach_align_device_hook_on_blocks, attach_execution_device_hook | no
        LayerwiseCastingHook | no
        """,
    ),
    Group(
        "`from accelerate.logging import …`",
        "accelerate.logging",
        "nbaccel.logging",
        """
        get_logger | differs | works before there is a state
        MultiProcessAdapter | yes
        """,
    ),
    Group(
        "`from accelerate.launchers import …`",
        "accelerate.launchers",
        "nbaccel.launchers",
        """
        notebook_launcher, debug_launcher | differs | see above
        """,
    ),
    Group(
        "`from accelerate.tracking import …`",
        "accelerate.tracking",
        "nbaccel.tracking",
        """
        GeneralTracker | yes | tensors have become numbers before they come to `log`
        on_main_process | yes
        AimTracker, ClearMLTracker, CometMLTracker, DVCLiveTracker, MLflowTracker, SwanLabTracker | yes
        TensorBoardTracker, TrackioTracker, WandBTracker | yes
        """,
    ),
    Group(
        "`from accelerate.local_sgd import …`",
        "accelerate.local_sgd",
        "nbaccel.local_sgd",
        """
        LocalSGD | yes
        """,
    ),
    Group(
        "`from accelerate.optimizer import …`",
        "accelerate.optimizer",
        "nbaccel.optimizer",
        """
        AcceleratedOptimizer | yes | the class of prepared optimizers
        """,
    ),
    Group(
        "`from accelerate.scheduler import …`",
        "accelerate.scheduler",
        "nbaccel.scheduler",
        """
        AcceleratedScheduler | yes | the class of prepared schedulers
        """,
    ),
    Group(
        "`from accelerate.data_loader import …`",
        "accelerate.data_loader",
        "nbaccel.data_loader",
        """
        skip_first_batches, prepare_data_loader, SeedableRandomSampler, get_sampler | yes
        DataLoaderShard, DataLoaderDispatcher | yes | the classes of prepared loaders
        BatchSamplerShard, IterableDatasetShard, SkipBatchSampler, SkipDataLoader | yes
        DataLoaderAdapter, DataLoaderStateMixin | no
        """,
    ),
)

INTRODUCTION = """\
# What of Accelerate is here

A program written for Hugging Face Accelerate runs on nbaccel when its imports say `nbaccel` instead of `accelerate`.
This page lists the names that notebook programs meet, in Accelerate 1.15, and how each of them stands here. A name that
is not here fails at its import with one sentence that says what to use instead; classes that programs use only under a
flag (`MegatronLMPlugin`) fail when they are used. Small helpers and constants of `accelerate.utils` are
here too, and not listed. The page is generated from `notebooks/compatibility.py`; tests hold that table against both
libraries, and the programs of `tests/programs` give the same numbers with both."""

CHECK = """\
import importlib
import inspect

missing, found = [], 0
for place, names in ours.items():
    module, _, path = place.partition(":")
    value = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        value = getattr(value, part)
    there = set(inspect.signature(value).parameters) if path.endswith("__init__") else set(dir(value))
    found += len(there & set(names.split()))
    missing += [f"{place} {name}" for name in names.split() if name not in there]
print(f"{found} names are here; missing: {missing or 'none'}")"""


def check() -> str:
    """The cell that looks every name up."""
    lines = ["# Every name of the tables below that is ours, looked up in this installation.", "ours = {"]
    for group in GROUPS:
        names = sorted({row.name for row in group.rows() if row.is_ours})
        lines.append(f'    "{group.ours}": """')
        lines += [f"        {' '.join(names[start : start + 4])}" for start in range(0, len(names), 4)]
        lines.append('    """,')
    return "\n".join([*lines, "}", "", CHECK])


def table(group: Group) -> str:
    """The group as Markdown: a line per state and note."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in group.rows():
        lines.setdefault((row.state, row.note), []).append(f"`{row.name}`")
    order = sorted(lines, key=lambda key: list(STATES).index(key[0]))
    body = [f"| {' '.join(lines[key])} | {key[0]} | {key[1]} |" for key in order]
    return "\n".join([f"## {group.title}", "", "| names | here | note |", "|---|---|---|", *body])


def page() -> nbformat.NotebookNode:
    """The notebook."""
    legend = "\n".join(f"- **{state}**: {meaning}" for state, meaning in STATES.items())
    sources = [
        ("markdown", INTRODUCTION),
        ("code", check()),
        ("markdown", f"## What differs on purpose\n{DIFFERENCES.rstrip()}"),
        ("markdown", f"## How to read the tables\n\n{legend}"),
        *(("markdown", table(group)) for group in GROUPS),
    ]
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [make[kind](source, id=f"cell-{index}") for index, (kind, source) in enumerate(sources)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def text() -> str:
    """The notebook as its file."""
    return nbformat.writes(page()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
