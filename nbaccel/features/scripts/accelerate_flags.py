"""The flags of `accelerate launch`: those that `nbaccel launch` takes, and the treatment of the others.

Runs in `nbaccel launch`; starts nothing. A program that is started by `accelerate launch FLAGS script.py` is started
here with the same flags. Flags with a meaning here are arguments of the parser (`add_arguments`); those of FSDP and
DeepSpeed become the variables by which Accelerate passes them on (`fsdp_environ`, `deepspeed_environ`). All others are
rows of one table: they have no effect, which is reported, or are refused in a sentence. The keys of Accelerate's
configuration file are the same names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from IPython.core.error import UsageError

from nbaccel.options.flags import one_of, read_batches, read_seconds

__all__ = [
    "MODES",
    "Idle",
    "add_arguments",
    "deepspeed_environ",
    "fsdp_environ",
    "given_to_deepspeed",
    "given_to_fsdp",
    "is_elsewhere",
    "spelled",
    "take",
    "torchruns",
    "whole",
]

_FITS = (
    "leave the flag out, and make the model fit by --strategy fsdp, by -p bf16, by -a with smaller batches, or by "
    "accelerator.gradient_checkpointing(model)"
)

MODES = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "tpu")
"""Flags for the distribution of a run; one of them in a command replaces a file's `distributed_type`."""

_TORCHRUNS = ("--tee", "--log-dir", "--role", "--max-restarts", "--monitor-interval")
"""Flags that torchrun takes under the same names."""

_SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Sharding strategies of FSDP1; Accelerate also numbers them, from 1."""

_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True, slots=True)
class Row:
    """Flags without a meaning here.

    Args:
        names: As a configuration file spells them, separated by blanks; a star stands for any ending.
        why: The end of a sentence on them; empty if there is nothing to report, since the run is as if the flag were
            given.
    """

    names: str
    why: str = ""
    is_refused: bool = False
    takes_value: bool = True


_TABLE = (
    # refused
    Row("use_megatron_lm", f"Megatron-LM does not drive trainings here; {_FITS}", is_refused=True, takes_value=False),
    Row("use_parallelism_config", f"ranks have one dimension here; {_FITS}", is_refused=True, takes_value=False),
    Row("tpu tpu_cluster", "TPUs are not driven here; start the program by Accelerate or torch_xla",
        is_refused=True, takes_value=False),
    Row("mpirun_hostfile", "ranks are not started by MPI here; run this command on every machine, with "
        "--num_machines, --machine_rank and --main_process_ip", is_refused=True),
    Row("aws_access_key_id aws_secret_access_key", "jobs of SageMaker are not started here; run this command in one",
        is_refused=True),
    # as if it was given
    Row("quiet -q same_network no_tpu_cluster", takes_value=False),
    # without effect
    Row("enable_cpu_affinity", "ranks are not bound to cores; taskset or numactl before the command binds them",
        takes_value=False),
    Row("fp8_use_autocast_during_eval", "it goes with 8-bit training", takes_value=False),
    Row("fp8_*", "it goes with 8-bit training"),
    Row("fsdp_config", "it goes with --use_fsdp"),
    Row("fsdp_*", "FSDP2, which is what runs, has no such option"),
    Row("deepspeed_*", "ranks are started by nbaccel itself, on every machine"),
    Row("megatron_lm_*", "it goes with --use_megatron_lm"),
    Row("parallelism_config_*", "it goes with --use_parallelism_config"),
    Row("tpu_use_sudo downcast_bf16", "it goes with --tpu", takes_value=False),
    Row("vm env main_training_function tpu_* commands command_file", "it goes with --tpu"),
    Row("mpirun_*", "it goes with --mpirun_hostfile"),
)  # fmt: skip


def spelled(flag: str) -> str:
    """Return a flag with dashes: `--num_processes` becomes `--num-processes`; the text after `=` stays.

    Example:
        >>> spelled("--log_dir=my_logs"), spelled("-n"), spelled("my_script.py")
        ('--log-dir=my_logs', '-n', 'my_script.py')
    """
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def is_elsewhere(flag: str) -> bool:
    """Return whether `flag` is one of Accelerate's without a meaning here."""
    return _row(flag) is not None


@dataclass(frozen=True, slots=True)
class Idle:
    """A flag that was given and has no effect.

    Args:
        why: See `Row`.
    """

    flag: str
    why: str

    @staticmethod
    def lines(given: Iterable[Idle], place: str = "") -> list[str]:
        """Return one line for all flags that share a reason.

        Args:
            place: Where they were found, if not in the command.

        Example:
            >>> Idle.lines([Idle("--fp8_format", "it goes with 8-bit training")])
            ['--fp8_format has no effect here: it goes with 8-bit training.']
        """
        by_reason: dict[str, list[str]] = {}
        for idle in given:
            by_reason.setdefault(idle.why, []).append(idle.flag)
        return [
            f"{place}{', '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect here: {why}."
            for why, flags in by_reason.items()
        ]


def take(words: Sequence[str]) -> tuple[int, list[Idle]]:
    """Return how many of the first `words` are a flag without a meaning here and its value, and the notes on it.

    Raises:
        UsageError: The flag is refused, or its value is missing.
    """
    flag = words[0].partition("=")[0]
    row = _row(flag)
    assert row is not None, "see is_elsewhere"
    if row.is_refused:
        raise UsageError(f"{flag}: {row.why}.")
    has_its_value = "=" in words[0]
    if row.takes_value and not has_its_value and len(words) < 2:
        raise UsageError(f"argument {flag}: expected one argument")  # as argparse says it
    return 1 + (row.takes_value and not has_its_value), [Idle(flag, row.why)] if row.why else []


def _row(flag: str) -> Row | None:
    name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else flag
    if name.removeprefix("fsdp_") in _FSDP or name in _DEEPSPEED:
        return None
    return next((row for row in _TABLE if any(fnmatchcase(name, pattern) for pattern in row.names.split())), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of `accelerate launch` that have a meaning here; its own flags come first."""
    group = parser.add_argument_group(
        "flags of accelerate launch", "with underscores or dashes; what else it knows has no effect, or is refused"
    )
    # fmt: off
    group.add_argument("--config-file", metavar="FILE",
                       help="a file of `accelerate config` to follow; default the one in its own place, if it is there")
    group.add_argument("--multi-gpu", action="store_true", help="all GPUs, which is the default")
    group.add_argument("--num-machines", metavar="N", type=whole("machines are 1 or more", 1),
                       help="as --nnodes; -n is then the ranks of all machines together")
    group.add_argument("--machine-rank", dest="node_rank", metavar="R", type=whole("machines are numbered from 0", 0),
                       help="as --node-rank")
    group.add_argument("--main-process-ip", metavar="IP", help="as --master-addr")
    group.add_argument("--main-process-port", metavar="PORT", type=whole("a port lies in 0..65535", 0, 65535),
                       help="as --master-port")
    group.add_argument("--gradient-accumulation-steps", dest="accumulate", metavar="K", type=read_batches,
                       help="as -a")
    group.add_argument("--gpu-ids", metavar="GPUS", help="as -d, or all")
    group.add_argument("--num-cpu-threads-per-process", metavar="N", type=whole("threads are 1 or more", 1),
                       help="CPU threads of each rank; default a share of the cores, or OMP_NUM_THREADS")
    group.add_argument("--no-python", action="store_true", help="SCRIPT is a program that no Python runs")
    group.add_argument("--dynamo-backend", metavar="B", help="compile prepared models: inductor, …; default no")
    group.add_argument("--dynamo-mode", metavar="M", type=one_of("a mode", *_DYNAMO_MODES),
                       help="default, reduce-overhead or max-autotune")
    group.add_argument("--dynamo-use-fullgraph", action="store_true", default=None, help="one graph, or an error")
    group.add_argument("--dynamo-use-dynamic", action="store_true", default=None, help="shapes may change")
    group.add_argument("--dynamo-use-regional-compilation", action="store_true", default=None,
                       help="compile the blocks that a model repeats")
    group.add_argument("--rdzv-backend", metavar="B", help="how machines meet: static (default), c10d, …")
    group.add_argument("--rdzv-conf", metavar="K=V,…", help="its options, as torchrun takes them")
    group.add_argument("-t", "--tee", metavar="STREAMS", help="as torchrun takes it, with --log_dir")
    group.add_argument("--log-dir", metavar="DIR", help="as torchrun takes it")
    group.add_argument("--role", metavar="NAME", help="as torchrun takes it")
    group.add_argument("--max-restarts", metavar="N", type=whole("restarts are 0 or more", 0),
                       help="start the ranks again so often when one fails; default 0")
    group.add_argument("--monitor-interval", metavar="S", type=read_seconds, help="seconds between looks at the ranks")
    # fmt: on
    group.add_argument("--use-fsdp", action="store_true", help="as --strategy fsdp")
    for name, (metavar, read, text) in _FSDP.items():
        group.add_argument(spelled(f"--fsdp_{name}"), metavar=metavar, type=read, help=text)
    group.add_argument("--use-deepspeed", action="store_true", help="as --strategy deepspeed")
    for name, (metavar, read, text) in _DEEPSPEED.items():
        group.add_argument(spelled(f"--{name}"), metavar=metavar, type=read, help=text)


def given_to_fsdp(asked: argparse.Namespace) -> list[str]:
    """Return the flags of `asked` that mean something to the strategy "fsdp" alone, as Accelerate spells them."""
    return [f"--fsdp_{name}" for name in _FSDP if getattr(asked, f"fsdp_{name}") is not None]


def fsdp_environ(asked: argparse.Namespace) -> dict[str, str]:
    """Return the variables by which the flags of a run of "fsdp" reach its ranks, for Accelerate's programs too."""
    given = {
        f"FSDP_{_RENAMED.get(name, name).upper()}": value
        for name in _FSDP
        if (value := getattr(asked, f"fsdp_{name}")) is not None
    }
    return {"ACCELERATE_USE_FSDP": "true"} | given if asked.use_fsdp else given


def given_to_deepspeed(asked: argparse.Namespace) -> list[str]:
    """Return the flags of `asked` that mean something to the strategy "deepspeed" alone, as Accelerate spells them."""
    return [f"--{name}" for name in _DEEPSPEED if getattr(asked, name) is not None]


def deepspeed_environ(asked: argparse.Namespace) -> dict[str, str]:
    """Return the variables by which the flags of a run of "deepspeed" reach its ranks, as those of Accelerate are."""
    given = {
        f"ACCELERATE_{_RENAMED.get(name, f'deepspeed_{name}').upper()}": value
        for name in _DEEPSPEED
        if (value := getattr(asked, name)) is not None
    }
    return {"ACCELERATE_USE_DEEPSPEED": "true"} | given if asked.use_deepspeed else given


def torchruns(asked: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of `asked` for torchrun itself, in its words."""
    given = ((flag, getattr(asked, flag.removeprefix("--").replace("-", "_"))) for flag in _TORCHRUNS)
    return tuple(word for flag, value in given if value is not None for word in (flag, str(value)))


def whole(sentence: str, least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers; `sentence` says which are right."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{sentence}; got {text!r}")
        return int(text)

    return read


def _read_truth(text: str) -> str:
    return one_of("this", "true", "false")({"1": "true", "yes": "true", "0": "false", "no": "false"}.get(text, text))


def _in_capitals(what: str, *names: str) -> Callable[[str], str]:
    """Return a reader of one of `names`, which returns it in capitals, as Accelerate writes it."""
    read = one_of(what, *names)
    return lambda text: read(text).upper()


def _read_sharding(text: str) -> str:
    is_number = text.isdecimal() and 0 < int(text) <= len(_SHARDINGS)
    name = _SHARDINGS[int(text) - 1] if is_number else text.lower()
    if name == "no_shard":
        raise argparse.ArgumentTypeError(f"{text} leaves the model whole on every rank, which is --strategy ddp")
    return _in_capitals("what is sharded over all ranks", *_SHARDINGS[:2])(name)


def _read_resharding(text: str) -> str:
    return _read_sharding(text) if text.lower() in _SHARDINGS else _read_truth(text)


def _read_norm(text: str) -> str:
    try:
        is_right = float(text) > 0
    except ValueError:
        is_right = False
    if not is_right:
        raise argparse.ArgumentTypeError(f"a norm is a number above 0; got {text!r}")
    return text


def _read_least(text: str) -> str:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number of parameters is 0 or more; got {text!r}")
    return text


_FSDP: Mapping[str, tuple[str, Callable[[str], str], str]] = {
    "version": ("V", one_of("a version", "1", "2"), "accepted; 2 is what runs"),
    "reshard_after_forward": ("BOOL", _read_resharding, "free gathered parameters after the forward; default true"),
    "sharding_strategy": ("S", _read_sharding, "the same by FULL_SHARD or SHARD_GRAD_OP"),
    "offload_params": ("BOOL", _read_truth, "keep the shards in the host's memory; default false"),
    "auto_wrap_policy": (
        "P",
        _in_capitals("a policy", "transformer_based_wrap", "size_based_wrap", "no_wrap"),
        "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP; default by what the model is",
    ),
    "transformer_layer_cls_to_wrap": ("NAMES", str, "classes of what is gathered together, for the first policy"),
    "min_num_params": ("N", _read_least, "size of what is gathered together, for the second policy"),
    "ignored_modules": ("REGEX", str, "names of modules that stay whole on every rank"),
    "state_dict_type": (
        "T",
        _in_capitals("a state", "sharded_state_dict", "full_state_dict"),
        "SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    "activation_checkpointing": ("BOOL", _read_truth, "compute activations again in the backward; default false"),
    "cpu_ram_efficient_loading": ("BOOL", _read_truth, "transformers loads weights on rank 0 alone; default false"),
    "activation_checkpointing_offload": ("BOOL", _read_truth, argparse.SUPPRESS),
    "backward_prefetch": ("P", str, argparse.SUPPRESS),
    "forward_prefetch": ("BOOL", _read_truth, argparse.SUPPRESS),
    "use_orig_params": ("BOOL", _read_truth, argparse.SUPPRESS),
    "sync_module_states": ("BOOL", _read_truth, argparse.SUPPRESS),
}
"""Flags of FSDP without their beginning: placeholder, reader, help. Of the last five the plugin says what they do."""

_PLACES = ("none", "cpu", "nvme")

_DEEPSPEED: Mapping[str, tuple[str, Callable[[str], str], str]] = {
    "deepspeed_config_file": ("FILE", str, "a configuration of DeepSpeed, JSON"),
    "zero_stage": ("S", one_of("a stage", "1", "2", "3"), "1, 2 or 3; default 2"),
    "offload_optimizer_device": ("P", one_of("a place", *_PLACES), "none, cpu or nvme, for optimizer states"),
    "offload_param_device": ("P", one_of("a place", *_PLACES), "the same for parameters, in stage 3"),
    "offload_optimizer_nvme_path": ("DIR", str, "a folder on a fast disk, for nvme"),
    "offload_param_nvme_path": ("DIR", str, "the same for parameters"),
    "gradient_clipping": ("X", _read_norm, "the largest norm of all gradients, in every step"),
    "zero3_init_flag": ("BOOL", _read_truth, argparse.SUPPRESS),
    "zero3_save_16bit_model": ("BOOL", _read_truth, argparse.SUPPRESS),
}
"""Flags of DeepSpeed: placeholder, reader, help. Of the last two the plugin says what they do."""

_RENAMED = {
    "transformer_layer_cls_to_wrap": "transformer_cls_to_wrap",
    "deepspeed_config_file": "deepspeed_config_file",
    "gradient_clipping": "gradient_clipping",
    "zero3_init_flag": "deepspeed_zero3_init",
}
"""Flags whose variable has another name."""
