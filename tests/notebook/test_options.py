"""The flags of `%%accelerate`: what they accept, what they say when they do not, and which one wins."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from nbaccel.errors import LaunchRefused
from nbaccel.notebook.magics import AccelerateMagics
from nbaccel.notebook.options import Options, configured, described, keys, parse

PARSER = AccelerateMagics.accelerate.parser


def options(line: str) -> Options:
    return parse(PARSER, line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Options()),
        ("-n 2", Options(num_processes=2)),
        ("--num-processes auto", Options(num_processes="auto")),
        ("-p fp16 -a 4", Options(mixed_precision="fp16", accumulate=4)),
        ("--mixed-precision=auto", Options(mixed_precision="auto")),
        ("-o model,history -i data", Options(out=("model", "history"), inputs=("data",))),
        ("--out model, history -n 2", Options(out=("model", "history"), num_processes=2)),
        ("--out 'model, history'", Options(out=("model", "history"))),
        ('--out "model , history"', Options(out=("model", "history"))),
        ("-o model,model,", Options(out=("model",))),
        ("-r all", Options(ranks="all")),
        ("-r 0,2-3", Options(ranks="0,2-3")),
        ("-d 2,3 -t 1.5", Options(devices="2,3", timeout=1.5)),
        ("--cpu --plain --debug", Options(cpu=True, plain=True, debug=True)),
        ("--start zygote --seed 0", Options(start="zygote", seed=0)),
        ("--oom stop", Options(oom="stop")),
        ("-n 2  # two of them", Options(num_processes=2)),
    ],
)
def test_flags_are_read(line: str, expected: Options) -> None:
    assert options(line) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--ot x", "there is no flag --ot; did you mean --out? %accelerate? lists every flag."),
        ("--frobnicate=3", "there is no flag --frobnicate. %accelerate? lists every flag."),
        ("-o model history", "'history' belongs to no flag; lists are written with commas"),
        ("-n 0", "a number of ranks is 1 or more, or auto; got '0'"),
        ("-n two", "a number of ranks is 1 or more, or auto; got 'two'"),
        ("-p fp8", "-p/--mixed-precision: invalid choice: 'fp8' (choose from"),
        ("-a 0", "batches per optimizer step are 1 or more; got '0'"),
        ("--oom grow", "--oom: invalid choice: 'grow' (choose from"),
        ("-o model.weight", "'model.weight' is not the name of a variable; write names with commas"),
        ("-o for", "'for' is not the name of a variable"),
        ("-o ''", "no name was given; write names with commas between them, such as model,history"),
        ("-r 3-1", "ranks are all, a number, or a list such as 0,2-3; got '3-1'"),
        ("-r first", "ranks are all, a number, or a list such as 0,2-3; got 'first'"),
        ("-t 0", "a time limit is a number of seconds above 0; got '0'"),
        ("-t soon", "a time limit is a number of seconds above 0; got 'soon'"),
        ("--seed 4294967295", "a seed lies in 0..4294867295; got '4294967295'"),
        ("--start spawn", "--start: invalid choice: 'spawn' (choose from"),
        ("-o 'model", "a quote in this line is not closed"),
        ("-n", "-n/--num-processes: expected one argument"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(line: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(line)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stronger_choice_wins_and_silence_does_not() -> None:
    weaker = Options(num_processes=2, mixed_precision="bf16", cpu=True)
    assert Options(mixed_precision="auto").over(weaker) == Options(num_processes=2, mixed_precision="auto", cpu=True)


def test_configuration_takes_the_long_flags_as_keys() -> None:
    config = configured(PARSER, ["num-processes=2", "mixed-precision=fp16", "cpu=false", "out=a,b"], Options())
    assert config == Options(num_processes=2, mixed_precision="fp16", cpu=False, out=("a", "b"))
    assert described(PARSER, config) == "num-processes=2 mixed-precision=fp16 out=a,b cpu=false"


def test_an_empty_value_goes_back_to_the_default() -> None:
    assert configured(PARSER, ["seed=", "in="], Options(seed=7, inputs=("x",), accumulate=2)) == Options(accumulate=2)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("precision=fp16", "there is no setting 'precision'; settings are KEY=VALUE with one of num-processes, "),
        ("seed", "'seed' needs a value: seed=…"),
        ("cpu=maybe", "cpu is true or false; got 'maybe'."),
        ("num-processes=0", "a number of ranks is 1 or more"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        configured(PARSER, [setting], Options())
    assert sentence in str(caught.value)


def test_help_has_one_line_and_a_default_for_every_flag() -> None:
    lines = str(AccelerateMagics.accelerate.__doc__).splitlines()
    for key in keys(PARSER):
        (line,) = [line for line in lines if line.startswith("  -") and f"--{key}" in line.split("  ")[1]]
        assert "default" in line


@pytest.mark.parametrize(("ranks", "shown"), [(None, None), ("all", None), ("1", {1}), ("0,2-3", {0, 2, 3})])
def test_ranks_are_expanded(ranks: Any, shown: Any) -> None:
    assert Options(ranks=ranks).shown_ranks(4) == shown


def test_a_rank_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(LaunchRefused, match=r"--ranks 2: this run has 2 ranks, 0-1; name some of these, or all\."):
        Options(ranks="2").shown_ranks(2)
    with pytest.raises(LaunchRefused, match="this run has 1 rank, 0 alone"):
        Options(ranks="1").shown_ranks(1)
