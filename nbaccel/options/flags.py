"""Table of the flags of `%%accelerate`, used for parsing, help, completion and the configuration. Runs in the kernel.

It runs in the command line too, and starts nothing. A flag is one row here, one field of `RunOptions`, and if its text
has to be checked, a reader; nothing else has to change. A reader takes the text and returns the value, or raises
`argparse.ArgumentTypeError` with half a sentence on what was expected and what was given; argparse puts the flag before
it.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.magic_arguments import MagicHelpFormatter, argument, construct_parser, kwds

from nbaccel.base.quantities import parse_interval, parse_seconds
from nbaccel.base.settings import (
    BATCH_CHOICES,
    OOM_CHOICES,
    PRECISIONS,
    START_METHODS,
    STRATEGIES,
    installed_strategies,
)
from nbaccel.features import feature
from nbaccel.options.run_options import AUTO, CELL, FULL, NAMED, QUICK, expanded

__all__ = [
    "EXAMPLES",
    "HELP_COLUMN",
    "HELP_WIDTH",
    "SETTINGS",
    "checked",
    "flags",
    "flags_parser",
    "one_of",
    "read_batches",
    "read_names",
    "read_seconds",
    "settings",
    "unabbreviated",
]

_LARGEST_SEED = 2**32 - 1
"""NumPy's limit; rank r is seeded with seed + r."""
_SEED_ROOM = 100_000


def _read_processes(text: str) -> int | str:
    """Read a number of ranks, or "auto"."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks is 1 or more, or auto; got {text!r}")
    return int(text)


def one_of(what: str, *names: str) -> Callable[[str], str]:
    """Return a reader that takes one of `names`, in capitals too."""

    def read(text: str) -> str:
        if text.lower() not in names:
            *others, last = names
            raise argparse.ArgumentTypeError(f"{what} is {', '.join(others)} or {last}; got {text!r}")
        return text.lower()

    return read


def _read_strategy(text: str) -> str:
    """Read the name of a strategy: the project's own, in capitals too, or exactly that of an installed one."""
    if text.lower() in STRATEGIES:
        return text.lower()
    installed = installed_strategies()
    return text if text in installed else one_of("a strategy", *STRATEGIES, *installed)(text)


def read_batches(text: str) -> int:
    """Read the batches per optimizer step."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"batches per optimizer step are 1 or more; got {text!r}")
    return int(text)


def read_names(text: str) -> tuple[str, ...]:
    """Read names of variables with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if wrong or not names:
        what = f"{wrong[0]!r} is not the name of a variable" if wrong else "no name was given"
        raise argparse.ArgumentTypeError(f"{what}; write names with commas between them, such as model,history")
    return names


def _read_out(text: str) -> tuple[str, ...] | str:
    """Read names of variables, or a word for what a cell leaves in the notebook."""
    word = text.strip().lower()
    return NAMED if word in ("none", NAMED) else CELL if word == CELL else read_names(text)


def _read_curves(text: str) -> tuple[str, ...]:
    """Read names of numbers to draw, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(
            f"one curve is the least; got {text!r}. "
            'Write names with commas between them, such as loss,acc, and quotes around spaces: "val loss,acc"'
        )
    return names


def _read_ranks(text: str) -> str:
    """Check a list of ranks, or "all", and return it as text: the number of ranks is not known yet."""
    if text == "all":
        return text
    is_list = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    if not is_list or not list(expanded(text)):
        raise argparse.ArgumentTypeError(f"ranks are all, a number, or a list such as 0,2-3; got {text!r}")
    return text


def _read_rank(text: str) -> int:
    """Read the number of one rank; whether the run has it is not known yet."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a rank is a number, the first is 0; got {text!r}")
    return int(text)


def _read_only(text: str) -> str:
    """Check a list of some ranks, and return it as text."""
    if text == "all":
        raise argparse.ArgumentTypeError("all ranks take part in a cell without it; name some, such as 0,2-3")
    return _read_ranks(text)


def read_seconds(text: str) -> float:
    """Read seconds, with a fraction if needed."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a time limit is a number of seconds above 0; got {text!r}")
    return seconds


def checked(read: Callable[[str], Any], keeps_text: bool = False) -> Callable[[str], Any]:
    """Return `read` for argparse, which shows the text of no other error."""

    def value(text: str) -> Any:
        try:
            read_value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text if keeps_text else read_value

    return value


def _read_count(text: str) -> int:
    """Read a number of runs or devices."""
    return _at_least_one("a number is", text)


def _read_file(text: str) -> str:
    """Read the path of a file whose folder exists."""
    if not text.strip() or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"a file is its path, such as runs.jsonl; got {text!r}")
    folder = os.path.dirname(os.path.abspath(text))
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"there is no folder {folder} for the file; make it, or name another")
    return text


def _read_kept(text: str) -> int:
    """Read the number of checkpoints to keep."""
    return _at_least_one("checkpoints to keep are", text)


def _at_least_one(they_are: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{they_are} 1 or more; got {text!r}")
    return int(text)


def _read_seed(text: str) -> int:
    """Read a seed that leaves room for the ranks."""
    if not text.isdecimal() or int(text) > _LARGEST_SEED - _SEED_ROOM:
        raise argparse.ArgumentTypeError(f"a seed lies in 0..{_LARGEST_SEED - _SEED_ROOM}; got {text!r}")
    return int(text)


Function = TypeVar("Function", bound=Callable[..., Any])

_flag: Callable[..., Any] = argument  # IPython publishes no type for it

SETTINGS = (
    _flag("-n", "--num-processes", metavar="N", type=_read_processes,
          help="ranks to start; default auto: one per GPU, or one on the CPU"),
    _flag("-p", "--mixed-precision", metavar="P", choices=(AUTO, *PRECISIONS),
          type=one_of("a precision", AUTO, *PRECISIONS),
          help="auto, no, fp16 or bf16; default auto: what suits the device"),
    _flag("-a", "--accumulate", metavar="K", type=read_batches,
          help="batches per optimizer step; default 1"),
    _flag("-o", "--out", metavar="NAMES", type=_read_out,
          help="variables to bring back from rank 0, and no others: model,history, or none; default cell: all that the "
               "cell would leave in the notebook"),
    _flag("-i", "--in", metavar="NAMES", type=read_names, dest="inputs",
          help="variables to send to a zygote though the cell does not mention them; default none"),
    _flag("-r", "--ranks", metavar="RANKS", type=_read_ranks,
          help="whose output is shown: 0, all, or a list 0,2-3; default all"),
    _flag("-d", "--devices", metavar="GPUS",
          help="GPUs to use, by number or UUID: 2,3; shared equally among ranks; default one per rank"),
    _flag("--cpu", action="store_true", default=None,
          help="use no GPU; default off"),
    _flag("--free-kernel", action="store_true", default=None,
          help="have the notebook's own models on the host, not on GPUs, during the run; default off"),
    _flag("-t", "--timeout", metavar="S", type=read_seconds,
          help="stop after S seconds, as one interrupt would, with TimeoutError; default never"),
    _flag("--hang-timeout", metavar="S", type=read_seconds,
          help="end when no rank enters a step or collective for S seconds, and say where each is; default never"),
    _flag("--start", metavar="HOW", choices=START_METHODS, type=one_of("a start", *START_METHODS),
          help="auto, fork, zygote or inline; default auto: fork unless the notebook has used CUDA"),
    _flag("--plot", metavar="CURVES", type=_read_curves,
          help="numbers to draw, of those that accelerator.log and backward report: loss,acc; default the loss"),
    _flag("--plain", action="store_true", default=None,
          help="show text only, no panel, no rich output; default off"),
    _flag("--keep-runs", metavar="FILE", type=_read_file,
          help="keep what nbaccel.runs lists in FILE, such as runs.jsonl, for later kernels too; default off"),
    _flag("--seed", metavar="N", type=_read_seed,
          help="shared seed, rank r computes with N + r; default drawn and printed, or none for an unmodified loop"),
    _flag("--debug", action="store_true", default=None,
          help="check every collective, not only the first ones; default off"),
    _flag("--independent", action="store_true", default=None,
          help="each rank trains a model of its own, and that is meant; default off: separate trainings are an error"),
    _flag("--strict", action="store_true", default=None,
          help="an unmodified loop is an error instead of being trained on all ranks; default off"),
    _flag("--batches", metavar="HOW", choices=BATCH_CHOICES, type=one_of("what ranks get", *BATCH_CHOICES),
          help="split every batch of an unmodified loop, or give each rank batches of its own; default split"),
    _flag("--strategy", metavar="NAME", type=_read_strategy,
          help="how ranks hold a prepared model: ddp, each the whole, or fsdp, each a part; default auto: ddp"),
    _flag("--oom", metavar="HOW", choices=OOM_CHOICES, type=one_of("what follows", *OOM_CHOICES),
          help="shrink or stop when a rank dies of memory; default shrink: start again with smaller batches"),
    _flag("--checkpoint-every", metavar="T", type=checked(parse_interval, keeps_text=True),
          help="save in the background every 10min, or every 500steps; default never"),
    _flag("--checkpoint-dir", metavar="DIR",
          help="where to; default nbaccel_checkpoints in the working directory"),
    _flag("--keep-checkpoints", metavar="K", type=_read_kept,
          help="how many of these checkpoints stay; default 3"),
    _flag("--resume", metavar="PATH", nargs="?", const="",
          help="go on from the checkpoint in PATH, or from the newest in --checkpoint-dir; default off"),
    _flag("--time-limit", metavar="T", type=checked(parse_seconds),
          help="end well after 11h30m: finish the step, save, bring back what there is; default never"),
)  # fmt: skip
"""Flags that a notebook can choose for all its cells; `%accelerate config` and nbaccel.toml use their long names."""

_OF_ONE_CELL = (
    _flag("--pdb", metavar="RANK", type=_read_rank,
          help="debug that rank here: breakpoint() stops in it, an error opens a post-mortem; default off"),
    _flag("--keep", action="store_true", default=None,
          help="let the ranks stay after the cell, as %%accelerate start does before it; default off"),
    _flag("--only", metavar="RANKS", type=_read_only,
          help="run on these of the ranks that stay: 0 or 0,2-3; default all"),
    _flag("--sweep", metavar="VALUES", action="append", type=lambda text: feature("a value of --sweep")(text),
          help="run the cell once for each combination: fold=0-4 lr=1e-3,1e-4; --out gives lists; default off"),
    _flag("--slots", metavar="N", type=_read_count,
          help="how many runs of a sweep go side by side; default as many as there are free GPUs for, or one"),
    _flag("--gpus-per-run", metavar="N", type=_read_count,
          help="GPUs, and ranks, of each run of a sweep; default as many as -n, or 1"),
    _flag("--bg", action="store_true", default=None,
          help="return at once, the run goes on: %%accelerate wait, status, attach, stop; default off"),
    _flag("--check", metavar="HOW", nargs="?", const=QUICK, type=one_of("a check", QUICK, FULL),
          help="try the cell from its first to its last line with a few batches, and change nothing; full compares "
               "seeds and gradients too; default off"),
    _flag("--nodes", metavar="WHERE",
          help="ranks on other machines: host1,host2 by ssh, slurm, or ray; -n counts all; default this machine"),
    _flag("--node-timeout", metavar="T", type=checked(parse_seconds),
          help="give a node up that has not answered for 60s; default 60s"),
    _flag("--speed", metavar="T", type=checked(parse_seconds),
          help="measure for 3min which changes make the cell faster, and change nothing; default off"),
)  # fmt: skip
"""Flags that apply to one cell only."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "num_processes": (AUTO, "1", "2", "4", "8"),
    "accumulate": ("1", "2", "4", "8"),
    "out": (CELL, "none"),
    "ranks": ("all", "0", "0,1"),
    "devices": ("0", "0,1"),
    "timeout": ("60", "600"),
    "hang_timeout": ("60", "600"),
    "plot": ("loss", "loss,lr"),
    "keep_runs": ("runs.jsonl",),
    "seed": ("0", "42"),
    "strategy": STRATEGIES,
    "checkpoint_every": ("10min", "30min", "500steps"),
    "checkpoint_dir": ("checkpoints",),
    "keep_checkpoints": ("1", "3"),
    "resume": ("checkpoints",),
    "time_limit": ("8h30m", "11h30m"),
    "pdb": ("0", "1"),
    "nodes": ("host1,host2", "slurm", "ray"),
    "node_timeout": ("60s", "10min"),
    "check": (FULL,),
    "speed": ("1min", "3min"),
    "only": ("0", "0,1"),
    "sweep": ("fold=0-4", "seed=0-4"),
    "slots": ("2", "4", "8"),
    "gpus_per_run": ("1", "2"),
}
"""Examples that completion offers after a flag with too many possible values, by its name in `Options`."""

HELP_WIDTH, HELP_COLUMN = 120, 32


def flags(function: Function) -> Function:
    """Give a magic all flags; placed below `magic_arguments`."""
    for flag in reversed(SETTINGS + _OF_ONE_CELL):
        function = flag(function)
    wide: Callable[..., Any] = kwds  # one line per flag, whatever the width of the terminal
    decorated: Function = wide(formatter_class=_help_formatter)(function)
    return decorated


def flags_parser() -> argparse.ArgumentParser:
    """Return the magic's parser, for code that has no magic."""

    @flags
    def accelerate() -> None: ...

    make: Callable[..., argparse.ArgumentParser] = construct_parser
    return unabbreviated(make(accelerate))


def unabbreviated(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser, which from now on takes flags that are written out: `--check` is not `--checkpoint-every`."""
    parser.allow_abbrev = False  # IPython's parser has no argument for it
    return parser


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return MagicHelpFormatter(prog, max_help_position=HELP_COLUMN, width=HELP_WIDTH)


def settings(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags of a full parser that `%accelerate config` can set."""
    return parser._actions[: len(SETTINGS)]
