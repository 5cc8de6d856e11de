"""Options: what the flags of `%%accelerate` say, and which one wins. Built in the kernel from text; starts nothing.

One table of flags serves parsing, help, completion and `%accelerate config`, whose keys are the long names. A value
is checked where it is read; what it means on this machine is decided later, in `plan`.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicHelpFormatter, argument, construct_parser, kwds

from nbaccel.errors import LaunchRefused
from nbaccel.intervals import parse_interval, parse_seconds, said
from nbaccel.launch.preflight import START_METHODS
from nbaccel.launch.spec import OOM_CHOICES
from nbaccel.notebook.mistakes import in_our_words, near, what_is_unknown
from nbaccel.settings import PRECISIONS

__all__ = [
    "AUTO",
    "Limit",
    "Options",
    "chosen",
    "command_line",
    "configured",
    "described",
    "flags",
    "flags_parser",
    "joined",
    "keys",
    "parse",
    "text_of",
]

AUTO = "auto"

_LARGEST_SEED = 2**32 - 1
"""NumPy's limit; rank r is seeded with seed + r."""
_SEED_ROOM = 100_000
_MOST_CURVES = 3
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a run may take.

    flag: which said so.  ends_well: the run was planned to end here, so the cell does not fail.
    """

    seconds: float
    flag: str
    ends_well: bool


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of one cell, or of `%accelerate config`. None: not chosen.

    num_processes: a number or "auto".  mixed_precision: as flagged, "auto" too.
    inputs: names of `--in`.  ranks: whose output is shown, "all" or "0,2-3".
    timeout, hang_timeout, time_limit: seconds.
    resume: "" for the newest checkpoint in `checkpoint_dir`, else a path.
    """

    num_processes: int | str | None = None
    mixed_precision: str | None = None
    accumulate: int | None = None
    out: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    ranks: str | None = None
    devices: str | None = None
    cpu: bool | None = None
    timeout: float | None = None
    hang_timeout: float | None = None
    start: str | None = None
    plot: tuple[str, ...] | None = None
    plain: bool | None = None
    seed: int | None = None
    debug: bool | None = None
    oom: str | None = None
    checkpoint_every: str | None = None
    checkpoint_dir: str | None = None
    keep: int | None = None
    resume: str | None = None
    time_limit: float | None = None

    def over(self, weaker: Options) -> Options:
        """These choices, and `weaker`'s where these say nothing. "auto" is a choice."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(weaker, **{name: value for name, value in chosen.items() if value is not None})

    @property
    def world_size(self) -> int | None:
        """The number of ranks that was asked for; None for as many as there are devices."""
        return self.num_processes if isinstance(self.num_processes, int) else None

    @property
    def limit(self) -> Limit | None:
        """Which of the two limits comes first, if there is one."""
        limits = [
            Limit(seconds, flag, ends_well)
            for seconds, flag, ends_well in (
                (self.timeout, "--timeout", False),
                (self.time_limit, "--time-limit", True),
            )
            if seconds is not None
        ]
        return min(limits, default=None, key=lambda limit: limit.seconds)

    def shown_ranks(self, world_size: int) -> frozenset[int] | None:
        """The ranks whose output is shown; None for all.

        Raises:
            LaunchRefused: a rank that the run does not have.
        """
        if self.ranks in (None, "all"):
            return None
        shown = frozenset(_expand(self.ranks or ""))
        if max(shown) >= world_size:
            raise LaunchRefused(
                f"--ranks {self.ranks}: this run has {world_size} rank{'s' * (world_size > 1)}, "
                f"{'0 alone' if world_size == 1 else f'0-{world_size - 1}'}; name some of these, or all."
            )
        return shown


# --- reading values ---------------------------------------------------------------------------------------------


def _processes(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks is 1 or more, or auto; got {text!r}")
    return int(text)


def _one_of(what: str, *names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in names:
            *others, last = names
            raise argparse.ArgumentTypeError(f"{what} is {', '.join(others)} or {last}; got {text!r}")
        return text.lower()

    return read


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"batches per optimizer step are 1 or more; got {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if wrong or not names:
        what = f"{wrong[0]!r} is not the name of a variable" if wrong else "no name was given"
        raise argparse.ArgumentTypeError(f"{what}; write names with commas between them, such as model,history")
    return names


def _curves(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not 1 <= len(names) <= _MOST_CURVES:
        raise argparse.ArgumentTypeError(
            f"{_MOST_CURVES} curves have room beside each other, and one is the least; got {text!r}. "
            'Write names with commas between them, such as loss,acc, and quotes around spaces: "val loss,acc"'
        )
    return names


def _expand(ranks: str) -> Iterable[int]:
    """
    >>> list(_expand("0,2-4"))
    [0, 2, 3, 4]
    """
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _ranks(text: str) -> str:
    if text == "all":
        return text
    is_list = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    if not is_list or not list(_expand(text)):
        raise argparse.ArgumentTypeError(f"ranks are all, a number, or a list such as 0,2-3; got {text!r}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a time limit is a number of seconds above 0; got {text!r}")
    return seconds


def _checked(read: Callable[[str], Any], keeps_text: bool = False) -> Callable[[str], Any]:
    """`read` for argparse, which shows the sentences of no other error."""

    def value(text: str) -> Any:
        try:
            read_value = read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text if keeps_text else read_value

    return value


def _kept(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"checkpoints to keep are 1 or more; got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_SEED - _SEED_ROOM:
        raise argparse.ArgumentTypeError(f"a seed lies in 0..{_LARGEST_SEED - _SEED_ROOM}; got {text!r}")
    return int(text)


# --- the table --------------------------------------------------------------------------------------------------

_flag: Callable[..., Any] = argument  # IPython publishes no type for it

_FLAGS = (
    _flag("-n", "--num-processes", metavar="N", type=_processes,
          help="ranks to start; default auto: one per GPU, or one on the CPU"),
    _flag("-p", "--mixed-precision", metavar="P", choices=(AUTO, *PRECISIONS),
          type=_one_of("a precision", AUTO, *PRECISIONS),
          help="auto, no, fp16 or bf16; default auto: what suits the device"),
    _flag("-a", "--accumulate", metavar="K", type=_at_least_one,
          help="batches per optimizer step; default 1"),
    _flag("-o", "--out", metavar="NAMES", type=_names,
          help="variables to bring back from rank 0: model,history; default none"),
    _flag("-i", "--in", metavar="NAMES", type=_names, dest="inputs",
          help="variables to send to a zygote though the cell does not mention them; default none"),
    _flag("-r", "--ranks", metavar="RANKS", type=_ranks,
          help="whose output is shown: 0, all, or a list 0,2-3; default all"),
    _flag("-d", "--devices", metavar="GPUS",
          help="GPUs to use, by number or UUID: 2,3; default all that are visible"),
    _flag("--cpu", action="store_true", default=None,
          help="use no GPU; default off"),
    _flag("-t", "--timeout", metavar="S", type=_seconds,
          help="stop after S seconds, as one interrupt would, with TimeoutError; default never"),
    _flag("--hang-timeout", metavar="S", type=_seconds,
          help="end when no rank enters a step or collective for S seconds, and say where each is; default never"),
    _flag("--start", metavar="HOW", choices=START_METHODS, type=_one_of("a start", *START_METHODS),
          help="auto, fork, zygote or inline; default auto: fork unless the notebook has used CUDA"),
    _flag("--plot", metavar="CURVES", type=_curves,
          help="numbers to draw, of those that accelerator.log and backward report: loss,acc; default the loss"),
    _flag("--plain", action="store_true", default=None,
          help="show text only, no panel, no rich output; default off"),
    _flag("--seed", metavar="N", type=_seed,
          help="shared seed, rank r computes with N + r; default drawn for each run, and printed"),
    _flag("--debug", action="store_true", default=None,
          help="check every collective, not only the first ones; default off"),
    _flag("--oom", metavar="HOW", choices=OOM_CHOICES, type=_one_of("what follows", *OOM_CHOICES),
          help="shrink or stop when a rank dies of memory; default shrink: start again with smaller batches"),
    _flag("--checkpoint-every", metavar="T", type=_checked(parse_interval, keeps_text=True),
          help="save in the background every 10min, or every 500steps; default never"),
    _flag("--checkpoint-dir", metavar="DIR",
          help="where to; default nbaccel_checkpoints in the working directory"),
    _flag("--keep", metavar="K", type=_kept,
          help="how many of these checkpoints stay; default 3"),
    _flag("--resume", metavar="PATH", nargs="?", const="",
          help="go on from the checkpoint in PATH, or from the newest in --checkpoint-dir; default off"),
    _flag("--time-limit", metavar="T", type=_checked(parse_seconds),
          help="end well after 11h30m: finish the step, save, bring --out back; default never"),
)  # fmt: skip

_HELP_WIDTH, _HELP_COLUMN = 120, 32


def flags(function: Function) -> Function:
    """Give a magic all flags; goes below `magic_arguments`."""
    for flag in reversed(_FLAGS):
        function = flag(function)
    wide: Callable[..., Any] = kwds  # one line per flag, whatever the width of the terminal
    decorated: Function = wide(formatter_class=_help_formatter)(function)
    return decorated


def flags_parser() -> argparse.ArgumentParser:
    """The magic's parser, for those who have no magic."""

    @flags
    def accelerate() -> None: ...

    make: Callable[..., argparse.ArgumentParser] = construct_parser
    return make(accelerate)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return MagicHelpFormatter(prog, max_help_position=_HELP_COLUMN, width=_HELP_WIDTH)


def parse(parser: argparse.ArgumentParser, line: str) -> Options:
    """The options that the rest of a `%%accelerate` line gives.

    Raises:
        UsageError: one sentence on the first thing that is wrong.
    """
    try:
        arguments = shlex.split(joined(line), comments=True)
    except ValueError as error:
        raise UsageError(f"a quote in this line is not closed ({error}): %%accelerate {line}") from None
    try:
        known, unknown = parser.parse_known_args(arguments)
    except UsageError as error:
        raise UsageError(in_our_words(str(error))) from None
    if unknown:
        raise UsageError(f"{what_is_unknown(parser, unknown[0])} %accelerate? lists every flag.")
    return Options(**vars(known))


def joined(line: str) -> str:
    """A line whose lists have no blanks: `--out model, history` names two.

    >>> joined("--out model, history -n 2")
    '--out model,history -n 2'
    """
    return re.sub(r"\s*,\s*", ",", line)


def configured(parser: argparse.ArgumentParser, settings: Iterable[str], before: Options) -> Options:
    """`before` with each KEY=VALUE of `%accelerate config` set; `KEY=` goes back to the default.

    Raises:
        UsageError: an unknown key or a wrong value.
    """
    for setting in settings:
        key, is_given, text = setting.partition("=")
        key = key.replace("_", "-")  # as it is spelled in Python
        action = _action(parser, key)
        if action is None or not is_given:
            what = (
                f"{key!r} needs a value: {key}=…" if action else f"there is no setting {key!r}{near(key, keys(parser))}"
            )
            raise UsageError(f"{what}; settings are KEY=VALUE with one of {', '.join(keys(parser))}.")
        before = replace(before, **{action.dest: _value(parser, action, key, text) if text else None})
    return before


def keys(parser: argparse.ArgumentParser) -> list[str]:
    """The settings of `%accelerate config`: the long flags without their dashes."""
    return [action.option_strings[-1].removeprefix("--") for action in parser._actions]


def chosen(parser: argparse.ArgumentParser, options: Options) -> dict[str, Any]:
    """Setting to value, as it would be given, for everything that `options` choose."""
    values = ((key, _given(action, options)) for key, action in zip(keys(parser), parser._actions, strict=True))
    return {key: value for key, value in values if value is not None}


def _given(action: argparse.Action, options: Options) -> Any:
    """A flag's value as it would be given: a time that is kept in seconds gets its units back."""
    value = getattr(options, action.dest)
    return said(value).replace(" ", "") if action.dest == "time_limit" and value is not None else value


def described(parser: argparse.ArgumentParser, options: Options) -> str:
    """`options` as `%accelerate config` would take them; empty when nothing is chosen."""
    return " ".join(f"{key}={text_of(value)}" for key, value in chosen(parser, options).items())


def command_line(parser: argparse.ArgumentParser, options: Options) -> str:
    """The first line of a cell that chooses `options` by itself."""
    words = ["%%accelerate"]
    for action in parser._actions:
        value = _given(action, options)
        if value is None or value is False:  # no flag turns another off
            continue
        words += [action.option_strings[0]] + ([] if action.nargs == 0 else [shlex.quote(text_of(value))])
    return " ".join(words)


def text_of(value: Any) -> str:
    """A value as it is written behind KEY=.

    >>> text_of(True), text_of(("model", "history")), text_of("GPU-5eA"), text_of(1.5)
    ('true', 'model,history', 'GPU-5eA', '1.5')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def _action(parser: argparse.ArgumentParser, key: str) -> argparse.Action | None:
    """The flag of this name, long or short, without its dashes."""
    spelled = {f"--{key}", f"-{key}"}
    return next((action for action in parser._actions if spelled & {*action.option_strings}), None)


def _value(parser: argparse.ArgumentParser, action: argparse.Action, key: str, text: str) -> Any:
    if action.nargs == 0:
        if text.lower() not in _TRUTH:
            raise UsageError(f"{key} is true or false; got {text!r}.")
        return _TRUTH[text.lower()]
    try:
        return getattr(parser.parse_args([f"{action.option_strings[-1]}={text}"]), action.dest)
    except UsageError as error:
        raise UsageError(in_our_words(str(error))) from None
