"""The flags of `%%accelerate`: what they accept, what they say when they do not, and which one wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError

from nbaccel.errors import LaunchRefused
from nbaccel.notebook.magics import AccelerateMagics
from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import command_line, configured, described, keys, parse
from nbaccel.options.run_options import RunOptions

PARSER = AccelerateMagics.accelerate.parser


def options(line: str) -> RunOptions:
    return parse(PARSER, line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RunOptions()),
        ("-n 2", RunOptions(num_processes=2)),
        ("--num-processes auto", RunOptions(num_processes="auto")),
        ("-p fp16 -a 4", RunOptions(mixed_precision="fp16", accumulate=4)),
        ("--mixed-precision=auto", RunOptions(mixed_precision="auto")),
        ("-o model,history -i data", RunOptions(out=("model", "history"), inputs=("data",))),
        ("--out model, history -n 2", RunOptions(out=("model", "history"), num_processes=2)),
        ("--out 'model, history'", RunOptions(out=("model", "history"))),
        ('--out "model , history"', RunOptions(out=("model", "history"))),
        ("-o model,model,", RunOptions(out=("model",))),
        ("--out none", RunOptions(out="named")),
        ("--out named", RunOptions(out="named")),
        ("--out cell", RunOptions(out="cell")),
        ("-r all", RunOptions(ranks="all")),
        ("-r 0,2-3", RunOptions(ranks="0,2-3")),
        ("-d 2,3 -t 1.5", RunOptions(devices="2,3", timeout=1.5)),
        ("--plot loss,'val acc'", RunOptions(plot=("loss", "val acc"))),
        ("--cpu --plain --debug", RunOptions(cpu=True, plain=True, debug=True)),
        ("--start zygote --seed 0", RunOptions(start="zygote", seed=0)),
        ("--oom stop", RunOptions(oom="stop")),
        ("--strict --batches each", RunOptions(strict=True, batches="each")),
        ("--pdb 1", RunOptions(pdb=1)),
        ("-n 2  # two of them", RunOptions(num_processes=2)),
    ],
)
def test_flags_are_read(line: str, expected: RunOptions) -> None:
    assert options(line) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--ot x", "there is no flag --ot; did you mean --out? %accelerate? lists every flag."),
        ("--stop", "'--stop' is a command: %accelerate stop, with one percent sign."),
        ("n 2", "'n' has no dash; did you mean -n 2?"),
        ("--quux=3", "there is no flag --quux. %accelerate? lists every flag."),
        ("-o model history", "'history' belongs to no flag; lists are written with commas"),
        ("-n 0", "a number of ranks is 1 or more, or auto; got '0'"),
        ("-n two", "a number of ranks is 1 or more, or auto; got 'two'"),
        ("-n -1", "-n/--num-processes: a number of ranks is 1 or more, or auto; got '-1'."),
        ("-p fp8", "-p/--mixed-precision: a precision is auto, no, fp16 or bf16; got 'fp8'."),
        ("-a 0", "batches per optimizer step are 1 or more; got '0'"),
        ("-o model.weight", "'model.weight' is not the name of a variable; write names with commas"),
        ("-o for", "'for' is not the name of a variable"),
        ("-o ''", "no name was given; write names with commas between them, such as model,history"),
        ("-r 3-1", "ranks are all, a number, or a list such as 0,2-3; got '3-1'"),
        ("-r first", "ranks are all, a number, or a list such as 0,2-3; got 'first'"),
        ("-t 0", "a time limit is a number of seconds above 0; got '0'"),
        ("-t soon", "a time limit is a number of seconds above 0; got 'soon'"),
        ("--seed 4294967295", "a seed lies in 0..4294867295; got '4294967295'"),
        ("--seed -1", "--seed: a seed lies in 0..4294867295; got '-1'."),
        ("--start spawn", "--start: a start is auto, fork, zygote or inline; got 'spawn'."),
        ("-o 'model", "a quote in this line is not closed"),
        ("-i a-b", "-i/--in: 'a-b' is not the name of a variable; write names with commas"),
        ("--cpu=1", "--cpu takes no value; got '1'."),
        ("--plot=,", "one curve is the least; got ','. Write names with commas between them, such as loss,acc"),
        ("--pdb first", "--pdb: a rank is a number, the first is 0; got 'first'."),
        ("--plain=no", "--plain takes no value; got 'no'."),
        ("--debug=on", "--debug takes no value; got 'on'."),
        ("--cpu yes", "'yes' belongs to no flag"),
        ("--oom ignore", "--oom: what follows is shrink or stop; got 'ignore'."),
        ("--s 3", "there is no flag --s; did you mean --seed?"),
        ("--checkpoint 10min", "there is no flag --checkpoint; did you mean --checkpoint-dir?"),
        ("--num_processes 2", "there is no flag --num_processes; did you mean --num-processes?"),
        ("2", "'2' belongs to no flag; for 2 ranks it is -n 2."),
        ("config", "'config' is a command: %accelerate config, with one percent sign."),
        ("\N{EN DASH}n 2", "begins with a dash that is no hyphen, as texts on the web do; write - or --."),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(line: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(line)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", [name for action in PARSER._actions for name in action.option_strings])
def test_a_flag_without_its_value_is_said(flag: str) -> None:
    action = PARSER._option_string_actions[flag]
    if action.nargs == 0:
        assert getattr(options(flag), action.dest) is True
        return
    if action.nargs == "?":
        assert getattr(options(flag), action.dest) == action.const
        return
    for line in (flag, f"{flag} --cpu"):
        with pytest.raises(UsageError, match=r"^(-\w/)?--[a-z-]+ needs a value\. %accelerate\? lists every flag\.$"):
            options(line)


def test_a_value_may_be_written_in_capitals() -> None:
    assert options("-p BF16 --start Fork") == RunOptions(mixed_precision="bf16", start="fork")
    assert options("--strategy FSDP") == RunOptions(strategy="fsdp")


@pytest.mark.parametrize(
    "line",
    [
        "-n auto -p no",
        "-t 90 --time-limit 11h30m",
        "--checkpoint-every 500steps --keep-checkpoints 2 --resume here",
        "--plot a,b",
        "--out cell",
        "--out none",
    ],
)
def test_what_is_described_is_read_as_the_same(line: str) -> None:
    chosen = options(line)
    assert configured(PARSER, described(PARSER, chosen).split(), RunOptions()) == chosen
    assert options(command_line(PARSER, chosen).removeprefix("%%accelerate")) == chosen


def test_the_command_line_chooses_the_same() -> None:
    line = "-n 2 -p fp16 -a 4 -o model,history -d GPU-5eA,1 --cpu -t 1.5 --seed 7"
    assert command_line(PARSER, options(line)) == f"%%accelerate {line}"
    assert command_line(PARSER, RunOptions(cpu=False)) == "%%accelerate"
    blanks = options("--resume 'my runs' --plot loss,'val acc'")
    assert options(command_line(PARSER, blanks).removeprefix("%%accelerate")) == blanks


def test_a_parser_without_a_magic_is_the_same() -> None:
    assert keys(flags_parser()) == keys(PARSER)


def test_a_stronger_choice_wins_and_silence_does_not() -> None:
    weaker = RunOptions(num_processes=2, mixed_precision="bf16", cpu=True)
    assert RunOptions(mixed_precision="auto").over(weaker) == RunOptions(
        num_processes=2, mixed_precision="auto", cpu=True
    )


def test_configuration_takes_the_long_flags_as_keys() -> None:
    config = configured(PARSER, ["num-processes=2", "mixed-precision=fp16", "cpu=false", "out=a,b"], RunOptions())
    assert config == RunOptions(num_processes=2, mixed_precision="fp16", cpu=False, out=("a", "b"))
    assert described(PARSER, config) == "num-processes=2 mixed-precision=fp16 out=a,b cpu=false"


def test_configuration_takes_the_short_flags_too() -> None:
    assert configured(PARSER, ["n=2", "p=fp16", "a=4"], RunOptions()) == RunOptions(2, "fp16", 4)


def test_an_empty_value_goes_back_to_the_default() -> None:
    assert configured(PARSER, ["seed=", "in="], RunOptions(seed=7, inputs=("x",), accumulate=2)) == RunOptions(
        accumulate=2
    )


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("precision=fp16", "there is no setting 'precision' (did you mean mixed-precision=…?); settings are KEY=VALUE"),
        ("frobnicate=1", "there is no setting 'frobnicate'; settings are KEY=VALUE with one of num-processes, "),
        ("--seed", "there is no setting '--seed' (did you mean seed=…?); settings are KEY=VALUE"),
        ("mixed-precision=fp8", "--mixed-precision: a precision is auto, no, fp16 or bf16; got 'fp8'."),
        ("seed", "'seed' needs a value: seed=…"),
        ("pdb=1", "--pdb means one cell and is none of the settings: write it behind %%accelerate; settings are "),
        ("cpu=maybe", "cpu is true or false; got 'maybe'."),
        ("num-processes=0", "a number of ranks is 1 or more"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        configured(PARSER, [setting], RunOptions())
    assert sentence in str(caught.value)


def test_help_has_one_line_and_a_default_for_every_flag() -> None:
    lines = str(AccelerateMagics.accelerate.__doc__).splitlines()
    for key in keys(PARSER):
        (line,) = [
            line for line in lines if line.startswith("  -") and re.search(rf"--{key}(?![\w-])", line.split("  ")[1])
        ]
        assert "default" in line


@pytest.mark.parametrize(("ranks", "shown"), [(None, None), ("all", None), ("1", {1}), ("0,2-3", {0, 2, 3})])
def test_ranks_are_expanded(ranks: Any, shown: Any) -> None:
    assert RunOptions(ranks=ranks).shown_ranks(4) == shown


def test_a_rank_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(
        LaunchRefused,
        match=r"--ranks 2 chooses .* this run has 2 ranks, 0-1: name some of these, or all\. For 2 ranks write -n 2\.",
    ):
        RunOptions(ranks="2").shown_ranks(2)
    with pytest.raises(LaunchRefused, match="this run has 1 rank, 0 alone"):
        RunOptions(ranks="1").shown_ranks(1)
    with pytest.raises(LaunchRefused, match=r"--pdb 2: this run has 2 ranks, 0-1; name one of these\."):
        RunOptions(pdb=2).shown_ranks(2)


def test_the_rank_that_is_debugged_is_shown() -> None:
    assert RunOptions(ranks="0", pdb=2).shown_ranks(4) == {0, 2}


def test_keep_alone_means_the_ranks_and_with_a_number_the_checkpoints() -> None:
    assert options("--keep -n 2") == RunOptions(keep=True, num_processes=2)
    assert options("-n 2 --keep 3") == RunOptions(keep_checkpoints=3, num_processes=2)
    assert options("--keep --keep 3") == RunOptions(keep=True, keep_checkpoints=3)


def test_a_strategy_of_another_package_is_a_choice_by_its_exact_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "theirs-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[nbaccel_strategies]\nTheirOwn = theirs:Strategy\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert options("--strategy TheirOwn") == RunOptions(strategy="TheirOwn")
    with pytest.raises(
        UsageError, match="a strategy is auto, single, ddp, fsdp, deepspeed or TheirOwn; got 'theirown'"
    ):
        options("--strategy theirown")
