"""`nbaccel launch SCRIPT …`: a script on every device of this machine, or of several, as a notebook's cell would run.

Runs in a terminal. It reads the flags that the cells know, under the same names, and what nbaccel.toml chooses;
`launch.elastic` does the rest. What only a notebook can do (bring variables back, draw, restart in smaller batches)
has no flag here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from IPython.core.error import UsageError

from nbaccel.cli.answer import failed, say
from nbaccel.configfile import FILE_NAME
from nbaccel.errors import LaunchRefused
from nbaccel.hardware import Survey
from nbaccel.launch.elastic import Elastic, Nodes, Program
from nbaccel.launch.gpu_trouble import before_a_run
from nbaccel.launch.preflight import Devices, choose_devices, threads_per_rank
from nbaccel.notebook.configuration import Configuration
from nbaccel.notebook.flags import flags_parser, some_flags
from nbaccel.notebook.mistakes import in_our_words, what_is_unknown
from nbaccel.notebook.options import Options
from nbaccel.notebook.parsing import chosen
from nbaccel.notebook.plan import choose_precision, settings_of
from nbaccel.notebook.values import checked
from nbaccel.settings import RunSettings

__all__ = ["launch"]

_OF_CELLS = (
    *("num-processes", "mixed-precision", "accumulate", "devices", "cpu", "seed", "debug"),
    *("checkpoint-every", "checkpoint-dir", "keep-checkpoints", "resume"),
)
"""The flags of a cell that mean a script too."""

_DIFFERENT = {
    "mixed_precision": "auto (what suits the device), no, fp16 or bf16; default what the script says, else no",
    "seed": "shared seed, rank r computes with N + r; default what the script does",
}
"""Help of those whose default is not a cell's, by destination."""

_WRONG_USE = 2
_HELP = "nbaccel launch --help lists every flag."


def launch(words: Sequence[str]) -> int:
    """Run what `words` say; returns the script's exit status, or 2 with a sentence where nothing was started."""
    parser = _parser()
    mine, rest = _split(parser, words)
    try:
        asked, unknown = parser.parse_known_args(mine)
        if unknown:
            return failed(f"{_unknown(parser, unknown[0])} {_HELP}", _WRONG_USE)
        if asked.help:
            parser.print_help()
            return 0
        run = _elastic(asked, _program(rest, asked.module))
        if asked.dry_run:
            print(run)
            return 0
        ending = run.run()
    except UsageError as error:
        return failed(in_our_words(str(error), _HELP), _WRONG_USE)
    except LaunchRefused as error:
        return failed(str(error), _WRONG_USE)
    return failed(ending.message, ending.status) if ending.message else ending.status


def _parser() -> argparse.ArgumentParser:
    parser = some_flags(_OF_CELLS, prog="nbaccel launch", description="Run SCRIPT on every device, as torchrun does.")
    parser.usage = "nbaccel launch [flags] SCRIPT [arguments of the script]"
    parser.epilog = f"{FILE_NAME} of the folder is followed; flags win over it. What stands behind SCRIPT is SCRIPT's."
    parser.allow_abbrev = False
    for action in parser._actions:
        action.help = _DIFFERENT.get(action.dest, action.help)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--nnodes", metavar="N", type=checked(_positive), default=1,
                        help="machines; -n is the ranks on each; default 1")  # fmt: skip
    parser.add_argument("--node-rank", metavar="R", type=checked(_natural), help="which of them this is, 0-based")
    parser.add_argument("--master-addr", metavar="IP", help="address of node 0")
    parser.add_argument("--master-port", metavar="PORT", type=checked(_port), help="port of node 0; default 29500")
    parser.add_argument("--dry-run", action="store_true", help="print the command that would run, and end")
    parser.add_argument("-h", "--help", action="store_true", help="print this, and end")
    return parser


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags, and the script with what is its own.

    A flag whose value may be left out (`--resume`) takes one by `=` only: what follows may be the script.
    """
    mine, rest = [], list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        action = parser._option_string_actions.get(rest[0])
        takes = 2 if action is not None and action.nargs is None else 1
        mine += rest[:takes]
        del rest[:takes]
    return mine, rest[1:] if rest[:1] == ["--"] else rest


def _unknown(parser: argparse.ArgumentParser, word: str) -> str:
    flag = word.partition("=")[0]
    if flag in flags_parser()._option_string_actions:
        return f"{flag} is for the cells of a notebook; a script has no use for it."
    return what_is_unknown(parser, word)


def _program(words: Sequence[str], is_module: bool) -> Program:
    """
    Raises:
        UsageError: there is nothing that could run.
    """
    if not words:
        raise UsageError(f"a {'module' if is_module else 'script'} is missing: nbaccel launch -n 2 train.py. {_HELP}")
    name, *arguments = words
    if not is_module:
        if name.endswith(".ipynb"):
            raise UsageError(f"{name} is a notebook: jupyter nbconvert --to script {name} makes a script of it.")
        if not Path(name).is_file():
            raise UsageError(
                f"there is no script {name} in {Path.cwd()}; a value of --resume is written --resume=PATH, and a "
                "module needs -m."
            )
    return Program(name, tuple(arguments), is_module)


def _elastic(asked: argparse.Namespace, program: Program) -> Elastic:
    """
    Raises:
        UsageError, LaunchRefused: in one sentence, why this cannot be launched.
    """
    flags = Options(**{field.name: getattr(asked, field.name, None) for field in fields(Options)})
    configuration = Configuration()
    options = flags.over(configuration.options)
    if idle := [key for key in chosen(configuration.parser, configuration.options) if key not in _OF_CELLS]:
        say(f"{FILE_NAME} sets {', '.join(idle)} too, which a script cannot follow.")
    survey = Survey.take()
    devices = choose_devices(options.world_size, options.devices, bool(options.cpu), survey)
    settings = settings_of(options, _precision(options, devices))
    nodes = Nodes(asked.nnodes, asked.node_rank, asked.master_addr, asked.master_port)
    threads = threads_per_rank(survey.cpu_count, devices.num_processes)
    say(_described(devices, settings, threads, nodes))
    for line in before_a_run(devices.gpus):
        say(line)
    return Elastic(program, devices.num_processes, threads, nodes, settings.environ() | devices.environ())


def _precision(options: Options, devices: Devices) -> str | None:
    """None where nobody chose: then a script computes as it would by itself, without mixed precision."""
    return None if options.mixed_precision is None else choose_precision(options, devices)[0]


def _described(devices: Devices, settings: RunSettings, threads: int, nodes: Nodes) -> str:
    parts: Iterable[str] = [
        str(devices),
        f"node {nodes.rank} of {nodes.count}" if nodes.count > 1 else "",
        f"precision {settings.mixed_precision}" if settings.mixed_precision else "",
        f"accumulate {settings.gradient_accumulation_steps}" if settings.gradient_accumulation_steps else "",
        f"seed {settings.seed}" if settings.seed is not None else "",
        f"{threads} CPU thread{'s' * (threads > 1)} each",
    ]
    return ", ".join(filter(None, parts))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"machines are 1 or more; got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"nodes are numbered from 0; got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"a port lies in 1..65535; got {text!r}")
    return int(text)
