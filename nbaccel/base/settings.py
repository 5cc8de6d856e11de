"""RunSettings: the choices for a run, and their precedence. Built in the kernel, read again in ranks.

A field that is None was not chosen. `over` combines choices: explicit code over cell flag over panel over configuration
file over automatic. Ranks find the kernel's choice in their environment, under the names that programs written for
Accelerate read too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from nbaccel.base.values import frozen

__all__ = [
    "BATCH_CHOICES",
    "CHECKPOINT_DIR",
    "EACH",
    "FIRST",
    "FSDP",
    "OOM_CHOICES",
    "PARTITIONING",
    "PRECISIONS",
    "SHRINK",
    "SPLIT",
    "START_METHODS",
    "STATES",
    "STOP",
    "STRATEGIES",
    "STRATEGY_ENTRY_POINTS",
    "WHOLE",
    "RunSettings",
    "installed_strategies",
    "may_change_loops",
    "wrong_precision",
]

PRECISIONS = ("no", "fp16", "bf16")

START_METHODS = ("auto", "fork", "zygote", "inline")

FSDP = "fsdp"

STRATEGY_ENTRY_POINTS = "nbaccel_strategies"
"""The group of entry points in which other packages register strategies of their own, by name."""

PARTITIONING = (FSDP, "deepspeed")
"""The strategies by which a rank does not hold all of a training; the table of features says where they are."""

STRATEGIES = ("auto", "single", "ddp", *PARTITIONING)
"""The project's own ways to distribute a model over the ranks; other packages may install more."""

OOM_CHOICES = SHRINK, STOP = ("shrink", "stop")
"""Reaction when a rank dies of memory: the run starts again with smaller batches, or ends."""

BATCH_CHOICES = SPLIT, EACH = ("split", "each")
WHOLE = "whole"
"""Batches of ranks in a loop that was not prepared: a part of each batch, or their own batches. All of each batch,
`WHOLE`, is no choice of a person's: a run that failed on its parts starts again so."""

FIRST, STATES = "first", "states"
"""How a run fails on parts of batches: on its first ones, or by states that each rank has made of its own."""

CHECKPOINT_DIR = "nbaccel_checkpoints"
"""Default folder in the working directory, whose files Kaggle keeps; made only when something is saved."""

_FP8 = "fp8"

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})


@frozen
class RunSettings:
    """Choices that hold for every rank of a run; None leaves a choice to the program.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; never "auto", which the kernel resolves before the launch.
        gradient_accumulation_steps: Batches per optimizer step.
        seed: The seed of the data order. The generators of rank r start at seed + r, see `seeds_alike`. None does not
            seed.
        cpu: Stay on the CPU although the machine has devices.
        debug: Check every collective, not only the first ones.
        independent: Each rank trains its own model on purpose.
        strict: A loop that prepares nothing is an error. Otherwise it is trained on all ranks as it is.
        batches: What is done with the batches of such a loop: one of `BATCH_CHOICES`, or `WHOLE`.
        raw_precision: "fp16" or "bf16": somebody chose it, so that a loop that prepares nothing computes in it too.
        split: The number of parts that each batch of a training loop is cut into, after a run that ran out of memory.
        checkpoint_every: The interval at which the training saves itself, "10min" or "500steps".
        checkpoint_dir: The folder of these checkpoints.
        keep: The number of these checkpoints that are kept.
        resume: The checkpoint to continue from: "" for the newest in `checkpoint_dir`, or the path of a checkpoint or
            of a folder of checkpoints.
        seeds_alike: The generators of all ranks start at `seed` itself, for a program that does not know ranks.
        dynamo_backend, dynamo_mode, dynamo_use_fullgraph, dynamo_use_dynamic, dynamo_use_regional_compilation: Options
            for compiling prepared models, as in `TorchDynamoPlugin`.
        strategy: One of `STRATEGIES`, or the name of an installed one. The rank that looks it up refuses an unknown
            name.
        project_dir: The folder of an Accelerator that names none, for trackers and for saves that it names itself.
        swept_values: A text of the values of this run of a sweep, which no other run of it has; None for any other run.
        dry_run: The folder in which the ranks of a dry run record what they see; None for any other run.

    Example:
        >>> both = RunSettings(mixed_precision="fp16").over(RunSettings(mixed_precision="no", seed=7))
        >>> both.mixed_precision, both.seed
        ('fp16', 7)
    """

    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    seed: int | None = None
    cpu: bool | None = None
    debug: bool | None = None
    independent: bool | None = None
    strict: bool | None = None
    batches: str | None = None
    split: int | None = None
    checkpoint_every: str | None = None
    checkpoint_dir: str | None = None
    keep: int | None = None
    resume: str | None = None
    seeds_alike: bool | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    dynamo_use_fullgraph: bool | None = None
    dynamo_use_dynamic: bool | None = None
    dynamo_use_regional_compilation: bool | None = None
    strategy: str | None = None
    project_dir: str | None = None
    swept_values: str | None = None
    dry_run: str | None = None
    raw_precision: str | None = None

    def __post_init__(self) -> None:
        if self.mixed_precision is not None and self.mixed_precision not in PRECISIONS:
            raise ValueError(wrong_precision(self.mixed_precision))
        if self.batches is not None and self.batches not in (*BATCH_CHOICES, WHOLE):
            raise ValueError(f"batches must be one of {', '.join(map(repr, BATCH_CHOICES))}, got {self.batches!r}")
        if self.strategy is not None and not (isinstance(self.strategy, str) and self.strategy.strip()):
            raise ValueError(
                f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, or the name of an installed one, "
                f"got {self.strategy!r}"
            )
        steps = self.gradient_accumulation_steps
        if steps is not None and steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {steps}")

    @property
    def changes_loops(self) -> bool:
        """Return whether a flag changes loops that prepare nothing."""
        return self.raw_precision is not None or (self.gradient_accumulation_steps or 1) > 1

    def over(self, weaker: RunSettings) -> RunSettings:
        """Return these choices, completed by those of `weaker`.

        Args:
            weaker: The choices that count where this object has None.
        """
        return RunSettings(
            **{
                field.name: mine if (mine := getattr(self, field.name)) is not None else getattr(weaker, field.name)
                for field in fields(self)
            }
        )

    def environ(self) -> dict[str, str]:
        """Return the environment variables that pass these choices to a rank. Accelerate reads those with its name."""
        variables = {
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": self.gradient_accumulation_steps,
            "ACCELERATE_USE_CPU": None if self.cpu is None else str(self.cpu).lower(),
            "ACCELERATE_DEBUG_MODE": None if self.debug is None else str(int(self.debug)),
            "NBACCEL_INDEPENDENT": None if self.independent is None else str(int(self.independent)),
            "NBACCEL_STRICT": None if self.strict is None else str(int(self.strict)),
            "NBACCEL_BATCHES": self.batches,
            "NBACCEL_SEED": self.seed,
            "NBACCEL_SEEDS_ALIKE": None if self.seeds_alike is None else str(int(self.seeds_alike)),
            "NBACCEL_RAW_PRECISION": self.raw_precision,
            "NBACCEL_SPLIT": self.split,
            "NBACCEL_STRATEGY": self.strategy,
            "NBACCEL_CHECKPOINT_EVERY": self.checkpoint_every,
            "NBACCEL_CHECKPOINT_DIR": self.checkpoint_dir,
            "NBACCEL_KEEP": self.keep,
            "NBACCEL_RESUME": self.resume,
            "NBACCEL_PROJECT_DIR": self.project_dir,
            "NBACCEL_SWEPT_VALUES": self.swept_values,
            "NBACCEL_DRY_RUN": self.dry_run,
            "ACCELERATE_DYNAMO_BACKEND": self.dynamo_backend,
            "ACCELERATE_DYNAMO_MODE": self.dynamo_mode,
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": self.dynamo_use_fullgraph,
            "ACCELERATE_DYNAMO_USE_DYNAMIC": self.dynamo_use_dynamic,
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": self.dynamo_use_regional_compilation,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> RunSettings:
        """Return the choices that a launcher left in the environment; no choice if there was no launcher.

        Args:
            environ: The variables; by default those of this process.
        """
        env = os.environ if environ is None else environ

        def flag(name: str) -> bool | None:
            return None if name not in env else env[name].strip().lower() in _TRUE

        def number(name: str) -> int | None:
            return int(env[name]) if env.get(name) else None

        return cls(
            mixed_precision=(env.get("ACCELERATE_MIXED_PRECISION") or "").lower() or None,
            gradient_accumulation_steps=number("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            seed=number("NBACCEL_SEED"),
            seeds_alike=flag("NBACCEL_SEEDS_ALIKE"),
            cpu=flag("ACCELERATE_USE_CPU"),
            debug=flag("ACCELERATE_DEBUG_MODE"),
            independent=flag("NBACCEL_INDEPENDENT"),
            strict=flag("NBACCEL_STRICT"),
            batches=env.get("NBACCEL_BATCHES") or None,
            raw_precision=env.get("NBACCEL_RAW_PRECISION") or None,
            split=number("NBACCEL_SPLIT"),
            # Accelerate's own launcher, and transformers, name such a strategy by a variable of its own.
            strategy=env.get("NBACCEL_STRATEGY")
            or next((name for name in PARTITIONING if flag(f"ACCELERATE_USE_{name.upper()}")), None),
            checkpoint_every=env.get("NBACCEL_CHECKPOINT_EVERY"),
            checkpoint_dir=env.get("NBACCEL_CHECKPOINT_DIR"),
            keep=number("NBACCEL_KEEP"),
            resume=env.get("NBACCEL_RESUME"),
            project_dir=env.get("NBACCEL_PROJECT_DIR") or None,
            swept_values=env.get("NBACCEL_SWEPT_VALUES"),
            dry_run=env.get("NBACCEL_DRY_RUN") or None,
            dynamo_backend=(env.get("ACCELERATE_DYNAMO_BACKEND") or "").lower() or None,
            dynamo_mode=env.get("ACCELERATE_DYNAMO_MODE") or None,
            dynamo_use_fullgraph=flag("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
            dynamo_use_dynamic=flag("ACCELERATE_DYNAMO_USE_DYNAMIC"),
            dynamo_use_regional_compilation=flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
        )


def may_change_loops() -> bool:
    """Return whether this process has a variable by which its settings may have `changes_loops`; asked in each rank."""
    return any(name in os.environ for name in ("NBACCEL_RAW_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"))


def installed_strategies() -> tuple[str, ...]:
    """Return the names of strategies that other packages have registered as entry points."""
    from importlib.metadata import entry_points  # as slow to import as this whole package, and seldom needed

    return tuple(sorted({point.name for point in entry_points(group=STRATEGY_ENTRY_POINTS)}.difference(STRATEGIES)))


def wrong_precision(name: object) -> str:
    """Return one sentence on a `mixed_precision` that does not exist."""
    instead = "; 8-bit training is not here, use 'bf16' (A100 and later) or 'fp16'" if name == _FP8 else ""
    return f"mixed_precision must be one of {', '.join(map(repr, PRECISIONS))}, got {name!r}{instead}"
