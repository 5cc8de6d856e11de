"""The effect of each flag above each kind of loop: one function, and the page that shows what it says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from nbaccel.base.events import LoopKind
from nbaccel.features.flag_effects.effect_table import (
    ProgramKind,
    as_json,
    as_table,
    effect_of,
    flags_found,
    flags_of_json,
)
from nbaccel.options.flags import flags_parser
from nbaccel.options.given_flags import FLAGS, GivenFlag, given_flags
from nbaccel.options.run_options import RunOptions

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"

WITHOUT: dict[str, set[str]] = {
    "mixed_precision": {"LIGHTNING", "FABRIC", "DDP", "NOTHING"},
    "accumulate": {"TRAINER", "LIGHTNING", "FABRIC", "DDP", "NOTHING"},
    "strategy": {*LoopKind.__members__} - {"PREPARED"},
    "batches": {*LoopKind.__members__} - {"UNMODIFIED"},
    "checkpoint_every": {*LoopKind.__members__} - {"UNMODIFIED", "PREPARED"},
    "checkpoint_dir": {*LoopKind.__members__} - {"UNMODIFIED", "PREPARED"},
    "keep_checkpoints": {*LoopKind.__members__} - {"UNMODIFIED", "PREPARED"},
    "resume": {*LoopKind.__members__} - {"UNMODIFIED", "PREPARED"},
    "time_limit": set(),
    "oom": set(),
    "seed": set(),
}
"""Kinds of loops above which a flag has no effect today."""

CHOSEN = RunOptions(
    mixed_precision="bf16",
    accumulate=4,
    strategy="fsdp",
    batches="split",
    checkpoint_every="10min",
    checkpoint_dir="saves",
    keep_checkpoints=2,
    resume="",
    time_limit=3600.0,
    oom="shrink",
    seed=3,
)


def test_the_page_has_the_table_that_the_function_writes() -> None:
    assert as_table() in PAGE.read_text(encoding="utf-8"), (
        "python -m nbaccel.features.flag_effects.effect_table writes it"
    )


def test_flags_are_written_as_the_parser_has_them() -> None:
    written = {action.dest: action.option_strings for action in flags_parser()._actions}
    assert all(flag in written[name] for name, flag in FLAGS.items())


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_has_an_effect_or_a_reason_and_a_next_move_above_each_kind_of_loop(name: str) -> None:
    for kind in LoopKind:
        effect = effect_of(name, kind)
        assert effect.works == (kind.name not in WITHOUT[name]), kind
        assert effect.text
        assert effect.works or effect.instead or kind is LoopKind.NOTHING


@pytest.mark.parametrize(("name", "kind"), list(product(FLAGS, LoopKind)))
@pytest.mark.parametrize("is_own", [True, False])
def test_what_is_said_names_the_flag_the_loop_and_the_way_out_and_refuses_what_would_lose_work(
    name: str, kind: LoopKind, is_own: bool
) -> None:
    own = CHOSEN if is_own else RunOptions()
    [flag] = [given for given in given_flags(CHOSEN, own) if given.name == name]
    found, effect = flags_found([flag], kind), effect_of(name, kind)
    if effect.works or (kind is LoopKind.NOTHING and not is_own):
        assert (found.refusal, found.lines) == ("", ())
        return
    is_refused = is_own and name in ("checkpoint_every", "resume") and kind is not LoopKind.NOTHING
    assert bool(found.refusal) == is_refused
    [text] = [found.refusal] if is_refused else found.lines
    above = "" if kind is LoopKind.NOTHING else f" above {kind}"
    assert text.startswith(f"{FLAGS[name]} {flag.value}".strip() + " (of the settings)" * (not is_own))
    assert f" has no effect{above}: {effect.text}." in text
    assert effect.instead in text


def test_flags_with_one_reason_share_a_sentence() -> None:
    flags = [GivenFlag("checkpoint_every", "--checkpoint-every 10min", is_own=False), GivenFlag("resume", "--resume"),
             GivenFlag("checkpoint_dir", "--checkpoint-dir saves")]  # fmt: skip
    found = flags_found(flags, LoopKind.UNMODIFIED, program=ProgramKind.FUNCTION)
    assert found.refusal.startswith("--resume has no effect above an unmodified loop: the loop prepares nothing, and ")
    assert "a cell's loop would be saved. Instead: model, optimizer, loader = accelerator.prepare(" in found.refusal
    assert flags_found(flags, LoopKind.UNMODIFIED).refusal == ""
    [line] = flags_found([*flags[:1], *flags[2:]], LoopKind.UNMODIFIED, program=ProgramKind.FUNCTION).lines
    assert line.startswith("--checkpoint-every 10min (of the settings) and --checkpoint-dir saves have no effect")


def test_a_scripts_loop_that_prepares_nothing_is_run_as_it_is_written() -> None:
    flags = given_flags(CHOSEN, CHOSEN)
    found = flags_found(flags, LoopKind.UNMODIFIED, program=ProgramKind.SCRIPT)
    assert found.refusal.startswith("--checkpoint-every 10min and --resume have no effect above an unmodified loop: ")
    others = [flag for flag in flags if flag.name not in ("checkpoint_every", "resume")]
    lines = flags_found(others, LoopKind.UNMODIFIED, program=ProgramKind.SCRIPT).lines
    assert any(
        line.startswith("-p bf16 and -a 4 have no effect above an unmodified loop: a script's") for line in lines
    )
    assert flags_found(others, LoopKind.PREPARED, program=ProgramKind.SCRIPT) == flags_found(others, LoopKind.PREPARED)
    assert flags_of_json(as_json(flags)) == flags


def test_values_that_every_loop_has_anyway_are_no_flags() -> None:
    usual = RunOptions(mixed_precision="no", accumulate=1, strategy="ddp")
    assert given_flags(usual, usual) == ()
    auto = RunOptions(mixed_precision="auto")
    assert given_flags(auto, auto, "no") == ()
    [flag] = given_flags(auto, auto, "fp16")
    assert (str(flag), flag.value) == ("-p auto", "fp16")
    each = given_flags(RunOptions(batches="each"), RunOptions(batches="each"))
    assert flags_found(each, LoopKind.PREPARED).lines == ()


def test_a_value_of_the_library_wins_or_is_the_one_that_was_asked_for() -> None:
    flags = [GivenFlag("mixed_precision", "-p bf16", "bf16"), GivenFlag("strategy", "--strategy fsdp", "fsdp")]
    [line] = flags_found(flags, LoopKind.TRAINER, {"mixed_precision": "fp16", "strategy": "fsdp"}).lines
    assert line == (
        "-p bf16 has no effect above transformers' Trainer: its own value wins, fp16. "
        "Instead: TrainingArguments(bf16=True), made in this cell."
    )
    assert flags_found(flags, LoopKind.TRAINER, {"mixed_precision": "bf16", "strategy": "fsdp"}).lines == ()


def test_arguments_of_a_function_are_named_by_their_names() -> None:
    chosen = RunOptions(accumulate=4, mixed_precision="bf16")
    words = {"accumulate": "gradient_accumulation_steps"}
    assert [str(flag) for flag in given_flags(chosen, chosen, words=words)] == [
        "mixed_precision='bf16'",
        "gradient_accumulation_steps=4",
    ]
