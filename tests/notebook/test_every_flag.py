"""Every flag and every command, given wrongly: one sentence each, and nothing is started. A new one needs rows here.

Which wrong texts a reader refuses, in more detail, is tested in `test_options`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError

from nbaccel.errors import FeatureMissing, LaunchRefused
from nbaccel.features import feature, named
from nbaccel.notebook.magics import AccelerateMagics
from nbaccel.notebook.validation import EXCLUSIONS
from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import COMMANDS

WRONG = {
    "--num-processes": [("-n 0", "a number of ranks is 1 or more, or auto; got '0'"), ("-n 2.5", "got '2.5'")],
    "--mixed-precision": [("-p fp8", "a precision is auto, no, fp16 or bf16; got 'fp8'")],
    "--accumulate": [("-a 0", "batches per optimizer step are 1 or more; got '0'"), ("-a two", "got 'two'")],
    "--out": [
        ("--out a.b", "'a.b' is not the name of a variable"),
        (
            "--out modle",
            "--out modle: neither the notebook nor the cell has a variable of that name (did you mean",
        ),
        ("--out none,model", "--out none: neither the notebook nor the cell has a variable of that name"),
    ],
    "--in": [
        ("--in 3", "'3' is not the name of a variable"),
        ("--in modle", "the notebook has not a variable"),
    ],
    "--ranks": [
        ("--ranks last", "ranks are all, a number, or a list such as 0,2-3; got 'last'"),
        (
            "-n 2 --ranks 2",
            "--ranks 2 chooses whose output is shown, and this run has 2 ranks, 0-1: name some of these",
        ),
        ("--ranks 2", "this run has 1 rank, 0 alone: name some of these, or all. For 2 ranks write -n 2."),
    ],
    "--devices": [
        (
            "--devices 7",
            "--devices 7: there is no GPU '7'; NVML sees no GPU here. Leave --devices out to run on",
        ),
        ("--devices 0 --cpu", "--cpu and --devices 0 contradict each other: leave one of them out."),
    ],
    "--cpu": [("--cpu=yes", "--cpu takes no value; got 'yes'.")],
    "--free-kernel": [
        ("--free-kernel=yes", "--free-kernel takes no value; got 'yes'."),
        ("--free-kernel --bg", "--free-kernel and --bg exclude each other: cells that run meanwhile would find"),
        ("--free-kernel --start inline", "--free-kernel and --start inline exclude each other: the notebook's own"),
    ],
    "--timeout": [
        ("--timeout 0", "a time limit is a number of seconds above 0; got '0'"),
        ("--timeout 5 --start inline", "--timeout can stop ranks only, and this cell would run in the notebook's own"),
    ],
    "--hang-timeout": [("--hang-timeout never", "a time limit is a number of seconds above 0; got 'never'")],
    "--start": [
        ("--start spawn", "a start is auto, fork, zygote or inline; got 'spawn'"),
        ("--start inline -n 2", "--start inline runs in the notebook's own process, so it cannot be 2 ranks"),
    ],
    "--plot": [("--plot=,", "one curve is the least; got ','")],
    "--plain": [("--plain=1", "--plain takes no value; got '1'.")],
    "--keep-runs": [
        ("--keep-runs .", "a file is its path, such as runs.jsonl; got '.'"),
        ("--keep-runs nowhere/runs.jsonl", "nowhere for the file; make it, or name another"),
    ],
    "--seed": [("--seed -1", "a seed lies in 0..4294867295; got '-1'")],
    "--debug": [("--debug=1", "--debug takes no value; got '1'.")],
    "--independent": [("--independent=1", "--independent takes no value; got '1'.")],
    "--strict": [("--strict=1", "--strict takes no value; got '1'.")],
    "--batches": [("--batches whole", "what ranks get is split or each; got 'whole'")],
    "--strategy": [("--strategy zero", "a strategy is auto, single, ddp, fsdp or deepspeed; got 'zero'")],
    "--oom": [("--oom ignore", "what follows is shrink or stop; got 'ignore'")],
    "--checkpoint-every": [("--checkpoint-every often", "an interval is steps or a time, as in 500, 500steps, 10min")],
    "--checkpoint-dir": [
        ("--checkpoint-dir a_file", "--checkpoint-dir a_file: that is a file, and checkpoints need a folder"),
    ],
    "--keep-checkpoints": [("--keep-checkpoints 0", "checkpoints to keep are 1 or more; got '0'")],
    "--resume": [("--resume a_fyle", "--resume a_fyle: there is neither a checkpoint nor a folder of some; did")],
    "--time-limit": [
        ("--time-limit soon", "a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got 'soon'")
    ],
    "--pdb": [
        ("--pdb first", "a rank is a number, the first is 0; got 'first'"),
        ("-n 2 --pdb 2", "--pdb 2: this run has 2 ranks, 0-1; name one of these."),
        ("--pdb 0 --start inline", "--pdb and --start inline exclude each other: in the notebook's own process"),
    ],
    "--keep": [("--keep=yes", "--keep takes no value; got 'yes'.")],
    "--only": [
        ("--only all", "all ranks take part in a cell without it; name some, such as 0,2-3"),
        ("--only first", "ranks are all, a number, or a list such as 0,2-3; got 'first'"),
        ("--only 0", "--only 0 names ranks that stay, and none do: %accelerate start, or leave it out."),
    ],
    "--sweep": [
        ("--sweep", "--sweep needs a value."),
        ("--sweep fold", "a sweep is written NAME=VALUES, such as fold=0-4 lr=1e-3,1e-4; got 'fold'"),
        ("--sweep fold=3-1", "fold=3-1: a range goes up"),
        ("--sweep fold=", "fold has an empty value"),
        ("--sweep fold=f(x)", "fold: a value is a Python literal, a word, or a range such as 0-4; got 'f(x)'"),
        ("--sweep accelerator=1", "each run has an accelerator of its own"),
        ("--sweep fold=0 fold=1", "--sweep has fold twice"),
        ("--sweep fold=0 --sweep lr=1", "--sweep stands twice in this line"),
        ("--sweep fold=0 zip", "'zip' belongs to no flag"),
        ("--sweep lr=1e-2 1e-3", "values of one name are written with commas: --sweep lr=1e-2,1e-3."),
        ("--sweep fold=0 --start inline", "--sweep and --start inline exclude each other: each run needs processes"),
        ("--sweep fold=0 --pdb 0", "--sweep and --pdb exclude each other: several runs go on at once"),
        ("--sweep fold=0 --bg", "--sweep and --bg exclude each other: a sweep is watched by the cell"),
        ("--sweep fold=0 --keep", "--sweep and --keep exclude each other: the ranks of each run end with it"),
        ("--sweep fold=0 --only 0", "--sweep and --only exclude each other: each run has ranks of its own"),
        ("--sweep fold=0 --free-kernel", "--sweep and --free-kernel exclude each other: runs begin and end"),
        ("--sweep fold=0 --resume", "--sweep and --resume exclude each other: one checkpoint belongs to one run"),
    ],
    "--slots": [
        ("--slots 0", "a number is 1 or more; got '0'"),
        ("--slots 2", "--slots 2 is about the runs of a sweep, and this cell has no --sweep; leave it out."),
    ],
    "--gpus-per-run": [
        ("--gpus-per-run two", "a number is 1 or more; got 'two'"),
        ("--gpus-per-run 2", "--gpus-per-run 2 is about the runs of a sweep, and this cell has no --sweep"),
        ("--sweep fold=0-1 --gpus-per-run 1 -n 2", "a run of a sweep has no more ranks than cards of its own"),
    ],
    "--bg": [
        ("--bg=yes", "--bg takes no value; got 'yes'."),
        ("--bg --pdb 0", "--pdb and --bg exclude each other: a debugger asks for commands in the cell that runs"),
        ("--bg --start inline", "--bg and --start inline exclude each other: the notebook's own process runs one"),
    ],
    "--check": [
        ("--check fast", "a check is quick or full; got 'fast'"),
        ("--check --start inline", "--check and --start inline exclude each other: a check needs processes"),
        ("--check --sweep fold=0", "--check and --sweep exclude each other: a check is of one run"),
        ("--check --bg", "--check and --bg exclude each other: a check takes half a minute"),
        ("--check --keep", "--check and --keep exclude each other: the ranks of a check end with it"),
        ("--check --only 0", "--check and --only exclude each other: a check has ranks of its own"),
        ("--check --pdb 0", "--check and --pdb exclude each other: a check ends loops early"),
    ],
    "--nodes": [
        ("--nodes", "--nodes needs a value."),
        ("--nodes=,", "--nodes names no host: write --nodes host1,host2, slurm or ray."),
        ("--nodes east,east", "--nodes names east twice: one agent serves all ranks of a machine, -n says how many."),
        ("--nodes a,b --keep", "--nodes and --keep exclude each other: ranks that stay are ranks of this machine"),
        ("--nodes a,b --only 0", "--nodes and --only exclude each other: it names ranks that stay"),
        ("--nodes a,b --sweep fold=0", "--nodes and --sweep exclude each other: the runs of a sweep are runs of this"),
        ("--nodes a,b --check", "--nodes and --check exclude each other: a check keeps the files of this machine"),
        ("--nodes a,b --speed 3min", "--nodes and --speed exclude each other: trials are of this machine"),
        ("--nodes a,b --start zygote", "--nodes and --start exclude each other: ranks of other machines have one way"),
        ("--nodes a,b --devices 0", "--nodes and --devices exclude each other: each node shows its ranks its own GPUs"),
        ("--nodes a,b --free-kernel", "--nodes and --free-kernel exclude each other: the notebook's models are on"),
    ],
    "--node-timeout": [
        ("--node-timeout soon", "a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got 'soon'"),
        ("--node-timeout 90s", "--node-timeout is about other machines, and this cell has no --nodes; leave it out."),
    ],
    "--speed": [
        ("--speed", "--speed needs a value."),
        ("--speed soon", "a time is hours, minutes or seconds, as in 11h30m, 10min, 90s; got 'soon'"),
        ("--speed 3min --check", "--speed and --check exclude each other: each shows a report of its own"),
        ("--speed 3min --start inline", "--speed and --start inline exclude each other: trials need processes"),
        ("--speed 3min --sweep fold=0", "--speed and --sweep exclude each other: trials are of one run"),
        ("--speed 3min --bg", "--speed and --bg exclude each other: cells that run meanwhile"),
        ("--speed 3min --keep", "--speed and --keep exclude each other: the ranks of a trial end with it"),
        ("--speed 3min --only 0", "--speed and --only exclude each other: trials have ranks of their own"),
        ("--speed 3min --pdb 0", "--speed and --pdb exclude each other: a trial is ended as soon as"),
    ],
}
"""Long flag to lines that use it wrongly, and what is said."""

WRONG_COMMANDS = {
    "config": [("config seed", "'seed' needs a value: seed=…; settings are KEY=VALUE"), ("config pdb=1", "one cell")],
    "doctor": [("doctor now", "%accelerate doctor takes nothing behind it; got 'now'.")],
    "memory": [("memory all", "%accelerate memory takes nothing behind it; got 'all'.")],
    "estimate": [
        ("estimate", "%accelerate estimate needs the name of a model: %accelerate estimate MODEL"),
        ("estimate modle", "the notebook has no variable modle"),
        ("estimate model", "estimate needs a torch.nn.Module, and this is a int"),
    ],
    "why": [("why not", "%accelerate why takes nothing behind it; got 'not'.")],
    "status": [("status all", "%accelerate status takes nothing behind it; got 'all'.")],
    "wait": [("wait 5", "%accelerate wait takes nothing behind it; got '5'.")],
    "attach": [("attach 5", "%accelerate attach takes nothing behind it; got '5'.")],
    "last": [("last 5", "%accelerate last takes nothing behind it; got '5'.")],
    "runs": [
        ("runs last", "%accelerate runs last: no curve of these runs is called 'last'; there is: none."),
        ("runs 3", "%accelerate runs 3: no run has number 3: there was no run yet."),
    ],
    "nodes": [
        ("nodes", "no nodes are connected: %accelerate nodes host1,host2, slurm or ray."),
        ("nodes east,east", "--nodes names east twice: one agent serves all ranks of a machine"),
    ],
    "export": [("export", "%accelerate export takes the file to write, and maybe --cell 5 or --check")],
    "stop": [
        ("stop now", "%accelerate stop takes nothing behind it; got 'now'."),
        ("stop", "nothing runs in the background, and no ranks stay."),
    ],
    "start": [
        ("start -n 0", "a number of ranks is 1 or more, or auto; got '0'"),
        ("start 2", "'2' belongs to no flag; for 2 ranks it is -n 2."),
        ("start --out model", "--out belongs to a cell, not to the start: write it behind %%accelerate."),
        ("start --pdb 0", "--pdb belongs to a cell"),
        ("start --bg", "--bg belongs to a cell"),
        ("start --start inline", "ranks that stay are processes of their own, and here one would run in the notebook"),
    ],
    "push": [
        ("push", "%accelerate push needs names of variables: no name was given"),
        ("push modle", "%accelerate push modle: the notebook has no variable of that name (did you mean model?); "),
        ("push model", "no ranks stay: %accelerate start makes some, and so does --keep in a cell."),
    ],
    "pull": [
        ("pull", "%accelerate pull needs names of variables: no name was given"),
        ("pull y --rank one", "--rank is the number of one rank: %accelerate pull NAMES --rank 1; got 'one'."),
        ("pull y", "no ranks stay: %accelerate start makes some, and so does --keep in a cell."),
    ],
    "restart": [
        ("restart -n 2", "%accelerate restart takes nothing behind it; got '-n 2'."),
        ("restart", "no ranks stay, and none did: %accelerate start makes some."),
    ],
}
"""Command to lines that use it wrongly, and what is said."""

PARSER = flags_parser()


def is_missing(name: str) -> bool:
    try:
        feature(name)
    except FeatureMissing:
        return True
    return False


NAMES = {f"--{name}" for name in named("--")} | {f"%accelerate {name}" for name in named("%accelerate ")}
MISSING = {name for name in NAMES - {"--strategy fsdp"} if is_missing(name)}
"""Flags and commands of features that this copy lacks, as in `make test-core`; of these is `test_missing_features`."""


def there(rows: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the rows of all flags or commands whose feature is there."""
    every = [row for of_one in rows.values() for row in of_one]
    return [row for row in every if not MISSING & {*row[0].split(), f"%accelerate {row[0].split()[0]}"}]


def long(action: argparse.Action) -> str:
    return action.option_strings[-1]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()


@pytest.fixture(autouse=True)
def a_person_can_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.notebook.validation._takes_input", lambda shell: True)


def test_every_flag_has_rows() -> None:
    assert list(WRONG) == [long(action) for action in PARSER._actions]


@pytest.mark.sample(24)
@pytest.mark.parametrize(("line", "sentence"), there(WRONG))
def test_a_wrong_value_is_one_sentence_and_starts_nothing(
    planned: Any, recorder: Any, line: str, sentence: str
) -> None:
    planned.run("model = 1")
    ran = planned.run(f"%%accelerate {line}\nmodel")
    assert isinstance(ran.error, UsageError | LaunchRefused), ran.error
    said = ran.stderr or ran.stdout
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert recorder.specs == []


@pytest.mark.parametrize(
    ("word", "names_back"), [("none", ()), ("named", ()), ("cell", None), ("Cell", None), ("model", ("model",))]
)
def test_a_word_says_what_a_cell_leaves_in_the_notebook(
    planned: Any, recorder: Any, word: str, names_back: tuple[str, ...] | None
) -> None:
    planned.run("model = 1")
    planned.run(f"%%accelerate --out {word}\nmodel")
    (spec,) = recorder.specs
    assert spec.task.leaves_all is (names_back is None)
    assert spec.task.out == (names_back or ())


@pytest.mark.parametrize("action", [action for action in PARSER._actions if action.nargs is None], ids=long)
def test_a_flag_without_its_value_is_one_sentence(planned: Any, recorder: Any, action: argparse.Action) -> None:
    ran = planned.run(f"%%accelerate {long(action)}\n1")
    assert ran.stderr.startswith("UsageError: ")
    assert f"{long(action)} needs a value. %accelerate? lists every flag.\n" in ran.stderr
    assert recorder.specs == []


def test_every_command_has_rows_and_a_line_of_help(planned: Any) -> None:
    magics = planned.shell.magics_manager.registry["AccelerateMagics"]
    assert set(WRONG_COMMANDS) == set(COMMANDS) == set(magics._commands.names)
    help_ = str(AccelerateMagics.accelerate.__doc__)
    assert [name for name in COMMANDS if not re.search(rf"^  %accelerate {name}\b.{{10,}}", help_, re.M)] == []


@pytest.mark.parametrize(("line", "sentence"), there(WRONG_COMMANDS))
def test_a_wrong_command_is_one_sentence_and_starts_nothing(
    planned: Any, recorder: Any, line: str, sentence: str
) -> None:
    planned.run("model = 1")
    ran = planned.run(f"%accelerate {line}")
    assert isinstance(ran.error, UsageError | LaunchRefused), ran.error
    said = ran.stderr or ran.stdout
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert recorder.specs == []


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda exclusion: f"{exclusion.flag}-{exclusion.other}")
def test_an_exclusion_names_flags_that_there_are(exclusion: Any) -> None:
    for flag in (exclusion.flag, exclusion.other):
        assert flag.split()[0] in PARSER._option_string_actions
