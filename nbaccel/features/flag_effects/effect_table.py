"""Effects of the flags whose meaning depends on how a loop trains. Pure; runs in the kernel and in ranks.

`effect_of` decides for every flag and every kind of loop whether the flag has an effect, which, or why not and what to
do instead. All that is said of it comes from here: the refusal and the lines of a run, the report of `--check`, and the
table in docs/flags.md, which ``python -m nbaccel.features.flag_effects.effect_table`` prints.

A flag that gets an effect above another kind of loop changes one entry of the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import Enum

from nbaccel.base.events import LoopKind
from nbaccel.base.settings import EACH
from nbaccel.options.given_flags import FLAGS, GivenFlag

__all__ = [
    "FlagEffect",
    "FlagsFound",
    "ProgramKind",
    "as_json",
    "as_table",
    "effect_of",
    "flags_found",
    "flags_of_json",
]


class ProgramKind(Enum):
    """The kind of program that has a loop; it decides what can be done to one that prepares nothing."""

    CELL = "cell"
    FUNCTION = "function"
    SCRIPT = "script"


@dataclass(frozen=True, slots=True)
class FlagEffect:
    """The effect of one flag above one kind of loop.

    works: the flag has an effect.  text: the effect, or why there is none.  instead: what to do for it; empty where
    nothing is missing.
    """

    works: bool
    text: str
    instead: str = ""

    def __str__(self) -> str:
        return self.text if self.works else f"no effect: {self.text}{self.instead and f'. Instead: {self.instead}'}"


@dataclass(frozen=True, slots=True)
class FlagsFound:
    """Words on a run's flags above its loop.

    refusal: why the run must not begin; empty if it may.  lines: flags without an effect.
    """

    refusal: str = ""
    lines: tuple[str, ...] = ()


_PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
_BARE = f"hand the bare model to prepare, {_PREPARE}"
_OURS = "`from nbaccel import Accelerator`, in place of accelerate's"
_MODEL_CHECKPOINT = "Trainer(callbacks=[ModelCheckpoint(...)])"
_ON_GPUS = "which needs GPUs"
_SAVE = "only what nbaccel's Accelerator prepares is saved and restored by it"
_IN_A_CELL = "in a cell; a function and a script have to prepare"
_NOT_IN_A_SCRIPT = "a script has to prepare"


def _works(text: str, instead: str = "") -> FlagEffect:
    """Return an effect.  instead: what to do where a library has another value."""
    return FlagEffect(True, text, instead)


def _lacks(text: str, instead: str) -> FlagEffect:
    return FlagEffect(False, text, instead)


def _by_whom(
    prepared: str,
    why: str,
    trainer: str,
    lightning: str,
    fabric: str,
    accelerate: str = _OURS,
    ddp: str = _BARE,
) -> dict[LoopKind, FlagEffect]:
    """Return the row of a flag that holds for prepared loops alone.

    prepared: its effect there.  why: why it has none elsewhere.  The others: what to do instead.
    """
    row = {
        LoopKind.UNMODIFIED: _lacks(f"the loop prepares nothing, and {why}", _PREPARE),
        LoopKind.PREPARED: _works(prepared),
    }
    others = {
        LoopKind.TRAINER: trainer,
        LoopKind.LIGHTNING: lightning,
        LoopKind.FABRIC: fabric,
        LoopKind.ACCELERATE: accelerate,
    }
    row[LoopKind.DDP] = _lacks("the program shares its model out by itself", ddp)
    return row | {kind: _lacks("its own arguments decide", instead) for kind, instead in others.items()}


def _everywhere(text: str, **others: FlagEffect) -> dict[LoopKind, FlagEffect]:
    return {kind: others.get(kind.name.lower(), _works(text)) for kind in LoopKind}


_NOTHING = _lacks("no backward() has trained anything", "")

_INTERRUPTS = _works("interrupts all ranks, wherever they are, and brings back what there is; saves nothing")

_SAVES_OF = {
    "trainer": 'TrainingArguments(save_strategy="steps", save_steps=500)',
    "lightning": f"{_MODEL_CHECKPOINT}, with every_n_train_steps=500",
    "fabric": "fabric.save(path, state)",
}

_EFFECTS: Mapping[str, Mapping[LoopKind, FlagEffect]] = {
    "mixed_precision": {
        **_by_whom(
            "prepared models compute in it, with loss scaling for fp16",
            "computes in the precision that it is written in",
            "TrainingArguments(bf16=True)",
            'Trainer(precision="bf16-mixed")',
            'Fabric(precision="bf16-mixed")',
        ),
        LoopKind.UNMODIFIED: _works(f"its models compute in it, with loss scaling for fp16; {_NOT_IN_A_SCRIPT}"),
        LoopKind.TRAINER: _works(
            "the default of TrainingArguments that are made in the cell; bf16=True or fp16=True win",
            "TrainingArguments(bf16=True), made in this cell",
        ),
        LoopKind.ACCELERATE: _works("the default of its Accelerator, which reads the same variable"),
    },
    "accumulate": {
        **_by_whom(
            "",
            "takes a step for as many batches as it is written for",
            "TrainingArguments(gradient_accumulation_steps=4)",
            "Trainer(accumulate_grad_batches=4)",
            "fabric.no_backward_sync, and a step for every fourth batch",
        ),
        LoopKind.UNMODIFIED: _works(
            "K batches for each step of an optimizer, with the mean of their gradients; the last ones of an epoch are "
            f"divided by what they are; {_NOT_IN_A_SCRIPT}"
        ),
        LoopKind.PREPARED: _works(
            "K batches for each optimizer step, where `with accelerator.accumulate(model):` is around a batch",
            "`with accelerator.accumulate(model):` around each batch",
        ),
        LoopKind.ACCELERATE: _works("the default of its Accelerator, which reads the same variable"),
    },
    "strategy": _by_whom(
        "what is prepared is shared out so",
        "every rank holds the whole model",
        f"TrainingArguments(fsdp=True), {_ON_GPUS}",
        f'Trainer(strategy="fsdp"), {_ON_GPUS}',
        f'Fabric(strategy="fsdp"), {_ON_GPUS}',
    ),
    "batches": {
        LoopKind.UNMODIFIED: _works("split: each rank has a part of every batch; each: batches of its own"),
        LoopKind.PREPARED: _lacks(
            "a prepared loader gives each rank batches of its own",
            "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
        ),
        **{
            kind: _lacks("each rank has batches of its own there", "a smaller batch size")
            for kind in (LoopKind.TRAINER, LoopKind.LIGHTNING, LoopKind.FABRIC, LoopKind.ACCELERATE, LoopKind.DDP)
        },
    },
    "checkpoint_every": {
        **_by_whom("saves in the background, and at a stop", _SAVE, **_SAVES_OF),
        LoopKind.UNMODIFIED: _works(f"saves between two rounds of the loop, and at a stop, {_IN_A_CELL}"),
    },
    "checkpoint_dir": {
        **_by_whom(
            "where --checkpoint-every saves, and --resume looks",
            _SAVE,
            "TrainingArguments(output_dir=...)",
            "ModelCheckpoint(dirpath=...)",
            "fabric.save(path, state)",
        ),
        LoopKind.UNMODIFIED: _works(f"where --checkpoint-every saves, and --resume looks, {_IN_A_CELL}"),
    },
    "keep_checkpoints": {
        **_by_whom(
            "as many of those of --checkpoint-every stay",
            _SAVE,
            "TrainingArguments(save_total_limit=...)",
            "ModelCheckpoint(save_top_k=...)",
            "delete older files of fabric.save",
        ),
        LoopKind.UNMODIFIED: _works(f"as many of those of --checkpoint-every stay, {_IN_A_CELL}"),
    },
    "resume": {
        **_by_whom(
            "goes on from the checkpoint, within an epoch too",
            _SAVE,
            "trainer.train(resume_from_checkpoint=True)",
            'trainer.fit(model, ckpt_path="last")',
            "fabric.load(path, state)",
        ),
        LoopKind.UNMODIFIED: _works(
            f"runs the statements before the loop, and goes on within it from the checkpoint, {_IN_A_CELL}"
        ),
    },
    "time_limit": _everywhere(
        "ends all ranks before the same step, and brings back what there is; saves nothing",
        unmodified=_works("ends all ranks before the same step, with a last checkpoint where --checkpoint-every saves"),
        prepared=_works("ends all ranks before the same step, with a last checkpoint where --checkpoint-every saves"),
        fabric=_INTERRUPTS,
        accelerate=_INTERRUPTS,
        ddp=_INTERRUPTS,
        nothing=_works("ends the cell"),
    ),
    "oom": _everywhere(
        "shrink: says that these batches cannot be cut, and ends with the error",
        unmodified=_works("shrink: several ranks start again with every batch in smaller parts; one says how"),
        prepared=_works("shrink: starts again with every batch in smaller parts"),
        nothing=_works("shrink: starts again where smaller parts can help"),
    ),
    "seed": _everywhere(
        "seeds every rank before the cell",
        trainer=_works("seeds every rank before the cell; the Trainer seeds anew, by TrainingArguments(seed=...)"),
    ),
}
"""The effect of each flag, by the kind of loop; what is missing is `_NOTHING`."""

_COST_WORK = ("checkpoint_every", "resume")
"""Flags without which a run loses work: a cell that asks for them itself is refused where they have no effect."""

_NOT_SAVED = {
    name: _lacks(f"the loop prepares nothing, and {_SAVE}; a cell's loop would be saved", _PREPARE)
    for name in ("checkpoint_every", "checkpoint_dir", "keep_checkpoints", "resume")
}
_NOT_CHANGED = {
    name: _lacks("a script's loop that prepares nothing runs as it is written; a cell's would be changed", _PREPARE)
    for name in ("mixed_precision", "accumulate")
}
_LACKS_UNMODIFIED: Mapping[ProgramKind, Mapping[str, FlagEffect]] = {
    ProgramKind.CELL: {},
    ProgramKind.FUNCTION: _NOT_SAVED,
    ProgramKind.SCRIPT: {**_NOT_SAVED, **_NOT_CHANGED},
}
"""Flags that have an effect above an unmodified loop elsewhere, and what is said of them here."""


def effect_of(name: str, kind: LoopKind, program: ProgramKind = ProgramKind.CELL) -> FlagEffect:
    """Return the effect of a flag of `FLAGS` above one kind of loop.

    Args:
        program: Where the loop is written.

    >>> str(effect_of("resume", LoopKind.TRAINER)).partition(". Instead: ")[2]
    'trainer.train(resume_from_checkpoint=True)'
    """
    if kind is LoopKind.UNMODIFIED and name in _LACKS_UNMODIFIED[program]:
        return _LACKS_UNMODIFIED[program][name]
    return _EFFECTS[name].get(kind, _NOTHING)


def as_json(flags: Sequence[GivenFlag]) -> str:
    """Return flags as a word of a command, which `flags_of_json` reads."""
    return json.dumps([astuple(flag) for flag in flags])


def flags_of_json(text: str) -> tuple[GivenFlag, ...]:
    """Return the flags that `as_json` has written."""
    return tuple(GivenFlag(*values) for values in json.loads(text))


def flags_found(
    given: Sequence[GivenFlag],
    kind: LoopKind,
    in_force: Mapping[str, str] | None = None,
    program: ProgramKind = ProgramKind.CELL,
) -> FlagsFound:
    """Return what is to be said of flags once the kind of loop is known.

    Args:
        given: The flags that were chosen.
        kind: How the program trains.
        in_force: What a library has made of some of them, as text, by their names: another value than the chosen one
            has won over it.
        program: See `effect_of`.
    """
    lacking: list[tuple[GivenFlag, FlagEffect]] = []
    for flag in given:
        effect, has = effect_of(flag.name, kind, program), (in_force or {}).get(flag.name)
        if has is not None and has != flag.value:
            effect = _lacks(f"its own value wins, {has}", effect.instead)
        if not (effect.works or has == flag.value or _needs_no_word(flag, kind)):
            lacking.append((flag, effect))
    refused = [] if kind is LoopKind.NOTHING else [each for each in lacking if _is_refused(each[0])]
    if refused:
        return FlagsFound(refusal=" ".join(_sentences(refused, kind)))
    return FlagsFound(lines=tuple(_sentences(lacking, kind)))


def _needs_no_word(flag: GivenFlag, kind: LoopKind) -> bool:
    """Return whether a flag without an effect hides nothing.

    Settings of a notebook are there for other cells than one that trains nothing; and batches of its own are what each
    rank has in any case where nothing is split.
    """
    return not flag.is_own if kind is LoopKind.NOTHING else flag.name == "batches" and flag.value == EACH


def _is_refused(flag: GivenFlag) -> bool:
    return flag.is_own and flag.name in _COST_WORK


def _sentences(lacking: Sequence[tuple[GivenFlag, FlagEffect]], kind: LoopKind) -> list[str]:
    """Return a sentence for the flags with the same reason and the same way out."""
    together: dict[FlagEffect, list[str]] = {}
    for flag, effect in lacking:
        together.setdefault(effect, []).append(str(flag))
    above = "" if kind is LoopKind.NOTHING else f" above {kind}"
    return [
        f"{_and(flags)} {'has' if len(flags) == 1 else 'have'} no effect{above}: {effect.text}."
        + (effect.instead and f" Instead: {effect.instead}.")
        for effect, flags in together.items()
    ]


def _and(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def as_table() -> str:
    """Return the effects in Markdown: a table of which flag has one, and for each flag what it is."""
    rows = [["", *LoopKind], ["---"] * (len(LoopKind) + 1)]
    rows += [
        [f"`{flag}`", *("yes" if effect_of(name, kind).works else "no" for kind in LoopKind)]
        for name, flag in FLAGS.items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for name, flag in FLAGS.items():
        alike: dict[str, list[str]] = {}
        for kind in LoopKind:
            alike.setdefault(str(effect_of(name, kind)), []).append(kind)
        lines += ["", f"## `{flag}`", "", *(f"- {_and(kinds)}: {effect}." for effect, kinds in alike.items())]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(as_table())
