"""Run `nbaccel launch SCRIPT …`: a script on every device of one or several machines. Runs in a terminal.

The script runs as a notebook's cell would run. The command reads the flags of cells, under the same names, those of
`accelerate launch`, and the choices of nbaccel.toml and of Accelerate's configuration file; `elastic`
does the rest. Features of notebooks alone (bringing variables back, drawing, restarting in smaller batches) have no
flag here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from nbaccel.base.hardware import Survey
from nbaccel.base.settings import PARTITIONING, RunSettings
from nbaccel.base.values import frozen
from nbaccel.errors import LaunchRefused
from nbaccel.features.scripts.accelerate_config import AccelerateConfig, default_path
from nbaccel.features.scripts.accelerate_flags import (
    MODES,
    Idle,
    add_arguments,
    deepspeed_environ,
    fsdp_environ,
    given_to_deepspeed,
    given_to_fsdp,
    is_elsewhere,
    spelled,
    take,
    torchruns,
    whole,
)
from nbaccel.features.scripts.elastic import Elastic, Nodes, Program
from nbaccel.launching.gpu_trouble import before_a_run
from nbaccel.launching.ipc.spec import Devices
from nbaccel.launching.script_plan import ScriptPlan
from nbaccel.options.configuration import FILE_NAME, Configuration
from nbaccel.options.flags import HELP_COLUMN, HELP_WIDTH, SETTINGS, flags_parser, unabbreviated
from nbaccel.options.given_flags import given_flags
from nbaccel.options.parsing import chosen, in_our_words, what_is_unknown
from nbaccel.options.run_options import AUTO, RunOptions
from nbaccel.output.terminal import failed, say

__all__ = ["launch"]

_OF_CELLS = (
    *("num-processes", "mixed-precision", "accumulate", "devices", "cpu", "seed", "debug", "strategy"),
    *("checkpoint-every", "checkpoint-dir", "keep-checkpoints", "resume"),
)
"""Flags of a cell that also apply to a script."""

_DIFFERENT = {
    "mixed_precision": "auto (what suits the device), no, fp16 or bf16; default what the script says, else no",
    "strategy": "how ranks share a model: auto, single, ddp, fsdp or deepspeed; default the script's, else auto: ddp",
    "seed": "shared seed, rank r computes with N + r; default what the script does",
}
"""Help of flags whose default differs from a cell's, by destination."""

_WRONG_USE = 2
_FIRST_PORT, _PORTS = 29500, 1000
"""Ports of node 0 under Slurm: jobs that share a machine have different ones, by their numbers."""
_HELP = "nbaccel launch --help lists every flag."


def launch(words: Sequence[str]) -> int:
    """Run the command in `words`; return the script's exit status, or 2 with a sentence if nothing was started."""
    parser = _parser()
    try:
        mine, idle, rest = _split(parser, words)
        asked, unknown = parser.parse_known_args(mine)
        if unknown:
            return failed(f"{_unknown(parser, unknown[0], rest)} {_HELP}", _WRONG_USE)
        if asked.help:
            parser.print_help()
            return 0
        program = _program(rest, asked)
        for line in Idle.lines(idle):
            say(line)
        run = _elastic(_choices(parser, asked), program)
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
    parser = _some_flags(_OF_CELLS, prog="nbaccel launch", description="Run SCRIPT on every device, as torchrun does.")
    parser.usage = "nbaccel launch [flags] SCRIPT [arguments of the script]"
    parser.epilog = f"{FILE_NAME} of the folder is followed; flags win over it. What stands behind SCRIPT is SCRIPT's."
    parser.allow_abbrev = False
    for action in parser._actions:
        action.help = _DIFFERENT.get(action.dest, action.help)
    # fmt: off
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--nnodes", metavar="N", type=whole("machines are 1 or more", 1),
                        help="machines; -n is the ranks on each; default 1")
    parser.add_argument("--node-rank", metavar="R", type=whole("nodes are numbered from 0", 0),
                        help="which of them this is, 0-based")
    parser.add_argument("--master-addr", metavar="IP", help="address of node 0")
    parser.add_argument("--master-port", metavar="PORT", type=whole("a port lies in 1..65535", 1, 65535),
                        help="port of node 0; default 29500")
    parser.add_argument("--dry-run", action="store_true", help="print the command that would run, and end")
    parser.add_argument("-h", "--help", action="store_true", help="print this, and end")
    # fmt: on
    add_arguments(parser)
    return parser


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[Idle], list[str]]:
    """Split `words` into nbaccel's flags, those of Accelerate without effect, and the script with its own arguments.

    A flag whose value is optional (`--resume`) takes one by `=` only: the next word may be the script.

    Raises:
        UsageError: A flag of Accelerate's that is refused.
    """
    mine, idle, rest = [], [], list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        if is_elsewhere(rest[0].partition("=")[0]):
            takes, found = take(rest)
            idle += found
        else:
            action = parser._option_string_actions.get(spelled(rest[0].partition("=")[0]))
            takes = 2 if action is not None and action.nargs is None and "=" not in rest[0] else 1
            mine += [spelled(rest[0]) if action is not None else rest[0], *rest[1:takes]]
        del rest[:takes]
    return mine, idle, rest[1:] if rest[:1] == ["--"] else rest


def _unknown(parser: argparse.ArgumentParser, word: str, rest: Sequence[str]) -> str:
    flag = spelled(word.partition("=")[0])
    if flag in flags_parser()._option_string_actions:
        return f"{flag} is for the cells of a notebook; a script has no use for it."
    return what_is_unknown(parser, word, *rest[:1])


def _program(words: Sequence[str], asked: argparse.Namespace) -> Program:
    """Return the program to run.

    Raises:
        UsageError: There is nothing that could run.
    """
    if asked.module and asked.no_python:
        raise UsageError("-m runs a module of Python, and --no_python what is none: leave one of them out.")
    if not words:
        raise UsageError(
            f"a {'module' if asked.module else 'script'} is missing: nbaccel launch -n 2 train.py. {_HELP}"
        )
    name, *arguments = words
    if asked.no_python and shutil.which(name) is None:
        raise UsageError(f"there is no program {name} that could be run; a script of Python needs no --no_python.")
    if not (asked.module or asked.no_python):
        if name.endswith(".ipynb"):
            raise UsageError(f"{name} is a notebook: jupyter nbconvert --to script {name} makes a script of it.")
        if not Path(name).is_file():
            raise UsageError(
                f"there is no script {name} in {Path.cwd()}; a value of --resume is written --resume=PATH, and a "
                "module needs -m."
            )
    return Program(name, tuple(arguments), asked.module, asked.no_python)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices of flags and files.

    Args:
        options: Those that a cell can make too; its `num_processes` are the ranks of this machine.
        own: Those of them that the command itself makes.
        others: Everything else, by the destinations of the parser.
    """

    options: RunOptions
    own: RunOptions
    nodes: Nodes
    others: argparse.Namespace


def _choices(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> _Choices:
    """Return the choices: flags, over the file that they name, over nbaccel.toml, over the file of `accelerate config`.

    Raises:
        UsageError, LaunchRefused: A file that cannot be used, or choices that contradict each other.
    """
    file = _of_file(parser, asked)
    both = argparse.Namespace(
        **{name: getattr(file, name) if mine is None or mine is False else mine for name, mine in vars(asked).items()}
    )
    nodes = _nodes(both)
    configuration = Configuration()
    if idle := [key for key in chosen(configuration.parser, configuration.options) if key not in _OF_CELLS]:
        say(f"{FILE_NAME} sets {', '.join(idle)} too, which a script cannot follow.")
    own = _options(asked, share=1 if both.nnodes else nodes.count)
    weaker = [configuration.options, _options(file, share=nodes.count)]
    if asked.config_file is not None:
        weaker.reverse()
    return _Choices(own.over(weaker[0]).over(weaker[1]), own, nodes, both)


def _of_file(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> argparse.Namespace:
    """Return the choices of Accelerate's configuration file as flags, and print that it was read.

    Settings that the flags contradict are left out: the distribution of the run, and its devices.

    Raises:
        UsageError: The file cannot be used.
    """
    path = default_path() if asked.config_file is None else Path(asked.config_file)
    if path is None or (asked.config_file is None and asked.cpu):
        return parser.parse_args([])
    try:
        config = AccelerateConfig.read(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    beaten = {"cpu"} if asked.multi_gpu or asked.gpu_ids or asked.devices else set()
    if asked.multi_gpu or asked.cpu:
        beaten |= {*MODES, "gpu_ids"} if asked.cpu else {*MODES}
    if "use_fsdp" in beaten:
        beaten |= {name for name in config.flags if name.startswith("fsdp_")}
    flags = {name: value for name, value in config.flags.items() if name not in beaten}
    say(f"{path} is followed where no flag says otherwise: {_listed(flags)}.")
    if config.unknown:
        say(f"{path}: Accelerate knows no key {', '.join(config.unknown)}; left out.")
    words: list[str] = []
    idle: list[Idle] = []
    try:
        for name, value in flags.items():
            flag = spelled(f"--{name}")
            action = parser._option_string_actions.get(flag)
            if action is None:
                idle += take([f"--{name}={value}"])[1]
            else:
                words.append(flag if action.nargs == 0 else f"{flag}={value}")
        found = parser.parse_args(words)
    except UsageError as error:
        way_out = " A flag beats the file, --multi_gpu for one." if {*MODES} & flags.keys() else ""
        raise UsageError(f"{path}: {in_our_words(str(error), _HELP)}{way_out}") from None
    for line in Idle.lines(idle, f"{path}: "):
        say(line)
    return found


def _listed(flags: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in flags.items()) or "it chooses nothing"


def _nodes(asked: argparse.Namespace) -> Nodes:
    """Return the machines of the launch.

    Raises:
        UsageError, LaunchRefused: An incomplete or contradictory description.
    """
    count = asked.nnodes or asked.num_machines or 1
    if asked.nnodes is None and asked.num_machines is None and (step := SlurmStep.from_env()) is not None:
        count = asked.nnodes = step.nodes
        _follow_slurm(asked, step)
    backend = None if asked.rdzv_backend == "static" else asked.rdzv_backend
    if count == 1:
        alone = ("main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf")
        reason = "the ranks of one machine meet at a free port of its loopback interface"
        for line in Idle.lines(
            Idle(f"--{name}", reason) for name in alone if getattr(asked, name) not in (None, "static")
        ):
            say(line)
        return Nodes(1, asked.node_rank, asked.master_addr, asked.master_port)
    if asked.main_process_port == 0:
        raise UsageError("--main_process_port 0 is any free port, which the other machines cannot know: name one.")
    return Nodes(
        count,
        asked.node_rank,
        asked.master_addr or asked.main_process_ip,
        asked.master_port or asked.main_process_port,
        backend,
        asked.rdzv_conf,
    )


@frozen
class SlurmStep:
    """The step of Slurm that `srun` has started this process in.

    Args:
        job: Number of the job.
        nodes, node: Number of machines, and the number of this one, 0-based.
        first_host: The name of node 0.
        tasks: Number of processes on each machine, as Slurm writes it: "1(x2)".
    """

    job: int
    nodes: int
    node: int
    first_host: str
    tasks: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SlurmStep | None:
        """Return the step that the environment describes; None for a process that `srun` has not started.

        Args:
            environ: The variables; by default those of this process.

        Example:
            >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}
            >>> SlurmStep.from_env({**step, "SLURM_STEP_NODELIST": "gpu[08-09,11]"}).first_host
            'gpu08'
        """
        env = os.environ if environ is None else environ
        try:
            names = "SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"
            job, nodes, node = (int(env[name]) for name in names)
            hosts = env["SLURM_STEP_NODELIST"]
        except (KeyError, ValueError):
            return None
        found = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)
        first = "" if found is None else found[1] + (found[2] or "")
        return cls(job, nodes, node, first, env.get("SLURM_STEP_TASKS_PER_NODE", "1"))


def _follow_slurm(asked: argparse.Namespace, step: SlurmStep) -> None:
    """Take from Slurm what the command leaves open of its machines.

    Raises:
        LaunchRefused: It has started several commands on a machine.
    """
    if step.tasks.partition("(")[0] != "1":
        raise LaunchRefused(
            f"srun has started {step.tasks} commands on each machine, and each starts the ranks of its machine: srun "
            "--ntasks-per-node=1 nbaccel launch."
        )
    if step.nodes > 1:
        asked.node_rank = step.node if asked.node_rank is None else asked.node_rank
        asked.master_addr = asked.master_addr or asked.main_process_ip or step.first_host
        asked.master_port = asked.master_port or asked.main_process_port or _FIRST_PORT + step.job % _PORTS


def _options(asked: argparse.Namespace, share: int) -> RunOptions:
    """Return the options that a cell has too.

    Args:
        share: Number of machines that `num_processes` is for.

    Raises:
        UsageError: The machines cannot have equally many ranks, or two flags name two strategies.
    """
    options = RunOptions(**{field.name: getattr(asked, field.name, None) for field in fields(RunOptions)})
    for name in PARTITIONING:
        if getattr(asked, f"use_{name}"):
            if options.strategy not in (None, name):
                raise UsageError(
                    f"--use_{name} and --strategy {options.strategy} contradict each other: leave one of them out."
                )
            options = replace(options, strategy=name)
    if asked.gpu_ids not in (None, "all"):
        options = replace(options, devices=asked.gpu_ids)
    total = options.world_size
    if total is not None and share > 1:
        if total % share:
            raise UsageError(
                f"--num_processes {total} are the ranks of all machines, and {share} of them (--num_machines) cannot "
                f"have equally many; -n {total} on each is --nnodes {share} -n {total}."
            )
        options = replace(options, num_processes=total // share)
    return options


def _elastic(choices: _Choices, program: Program) -> Elastic:
    """Return the launch by torch elastic.

    Raises:
        UsageError, LaunchRefused: In one sentence, why this cannot be launched.
    """
    options, others = choices.options, choices.others
    if options.cpu and others.multi_gpu:
        raise UsageError("--cpu and --multi_gpu contradict each other: leave one of them out.")
    plan = ScriptPlan.of(options, Survey.take(), others.num_cpu_threads_per_process)
    devices, settings = plan.devices, _compiling(others).over(plan.settings)
    environ = {"OMP_NUM_THREADS": str(plan.threads)} if others.num_cpu_threads_per_process else {}
    for strategy, variables, given in (
        ("fsdp", fsdp_environ, given_to_fsdp),
        ("deepspeed", deepspeed_environ, given_to_deepspeed),
    ):
        if settings.strategy == strategy:
            environ |= variables(others)
        else:
            for line in Idle.lines(Idle(flag, f"it goes with --use_{strategy}") for flag in given(others)):
                say(line)
    say(_described(devices, settings, plan.threads, choices.nodes))
    for line in before_a_run(devices.gpus):
        say(line)
    return Elastic(
        program,
        devices.num_processes,
        plan.threads,
        choices.nodes,
        settings.environ() | devices.environ() | environ,
        torchruns(others),
        given_flags(options, choices.own, settings.mixed_precision or "no"),
    )


def _compiling(asked: argparse.Namespace) -> RunSettings:
    """Return the settings for compiling; as in Accelerate, a launch that compiles sets all of them."""
    if asked.dynamo_backend is None:
        return RunSettings()
    return RunSettings(
        dynamo_backend=asked.dynamo_backend.lower(),
        dynamo_mode=asked.dynamo_mode,
        dynamo_use_fullgraph=bool(asked.dynamo_use_fullgraph),
        dynamo_use_dynamic=bool(asked.dynamo_use_dynamic),
        dynamo_use_regional_compilation=bool(asked.dynamo_use_regional_compilation),
    )


def _described(devices: Devices, settings: RunSettings, threads: int, nodes: Nodes) -> str:
    parts: Iterable[str] = [
        str(devices),
        f"node {nodes.rank} of {nodes.count}" if nodes.count > 1 else "",
        f"precision {settings.mixed_precision}" if settings.mixed_precision else "",
        f"accumulate {settings.gradient_accumulation_steps}" if settings.gradient_accumulation_steps else "",
        f"strategy {settings.strategy}" if settings.strategy not in (None, AUTO) else "",
        f"seed {settings.seed}" if settings.seed is not None else "",
        f"compiled by {settings.dynamo_backend}" if settings.dynamo_backend not in (None, "no") else "",
        f"{threads} CPU thread{'s' * (threads > 1)} each",
    ]
    return ", ".join(filter(None, parts))


def _plain_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=HELP_COLUMN, width=HELP_WIDTH)


def _some_flags(keys: Collection[str], **about: Any) -> argparse.ArgumentParser:
    """Return a parser of the settings whose long names, without dashes, are in `keys`.

    Args:
        **about: Further arguments of `ArgumentParser`.
    """
    make: Callable[..., argparse.ArgumentParser] = MagicArgumentParser  # it reports mistakes by UsageError
    parser = unabbreviated(make(formatter_class=_plain_formatter, **about))
    for flag in SETTINGS:
        if {name.removeprefix("--") for name in flag.args} & {*keys}:
            flag.add_to_parser(parser, None)
    return parser
