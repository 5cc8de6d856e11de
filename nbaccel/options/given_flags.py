"""The flags of a run whose effect depends on how its loop trains, as they were chosen. Pure; runs in the kernel.

Which effect each has above which loop, and what is said where it has none, is a feature: `features/flag_effects`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbaccel.base.quantities import time_text
from nbaccel.base.settings import PARTITIONING, STRATEGIES
from nbaccel.options.run_options import AUTO, RunOptions

__all__ = ["FLAGS", "GivenFlag", "given_flags"]


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag that somebody chose for a run.

    name: of the field in `RunOptions`.  text: as it is written, "-p bf16".  value: as text.
    is_own: it was written for this very cell or call; else it comes from nbaccel.toml, the form or `%accelerate
    config`, or from the start of ranks that stay.
    """

    name: str
    text: str
    value: str = ""
    is_own: bool = True

    def __str__(self) -> str:
        return self.text if self.is_own else f"{self.text} (of the settings)"


FLAGS: Mapping[str, str] = {
    "mixed_precision": "-p",
    "accumulate": "-a",
    "strategy": "--strategy",
    "batches": "--batches",
    "checkpoint_every": "--checkpoint-every",
    "checkpoint_dir": "--checkpoint-dir",
    "keep_checkpoints": "--keep-checkpoints",
    "resume": "--resume",
    "time_limit": "--time-limit",
    "oom": "--oom",
    "seed": "--seed",
}
"""The flags whose effect depends on the kind of loop, by their names in `RunOptions`."""

_NEUTRAL: Mapping[str, Sequence[str]] = {
    "mixed_precision": ("no",),
    "accumulate": ("1",),
    "strategy": tuple(name for name in STRATEGIES if name not in PARTITIONING),
}
"""Values that ask for what every loop does anyway."""


def given_flags(
    options: RunOptions, own: RunOptions, precision: str = "no", words: Mapping[str, str] | None = None
) -> tuple[GivenFlag, ...]:
    """Return the flags that were chosen for a run, and ask for something that not every loop does anyway.

    Args:
        options: All choices.
        own: Those that were written for this cell or call.
        precision: That of the devices, which "auto" means.
        words: Names of arguments of a function, which stand in place of the flags; None for flags.
    """
    given = []
    for name, flag in FLAGS.items():
        value = getattr(options, name)
        if value is None:
            continue
        text = precision if name == "mixed_precision" and value == AUTO else str(value)
        if text in _NEUTRAL.get(name, ()):
            continue
        shown = time_text(value) if name == "time_limit" else str(value)
        written = f"{flag} {shown}".strip() if words is None else f"{words.get(name, name)}={value!r}"
        given.append(GivenFlag(name, written, text, getattr(own, name) is not None))
    return tuple(given)
