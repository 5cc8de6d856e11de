"""Tasks that try a cell, record what they see, and leave nothing in the notebook. Made in the kernel, for ranks.

A `DryRunTask` runs the same code as `CellTask`, rewritten so that loops can be ended; see `nbaccel.features.check`.
What the cell would have brought back is reported by name, size and checksum. A `GradientTask` ends at the first step,
with the gradients of it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbaccel.features.check.dry_run.device_clock import wait_for_device
from nbaccel.features.check.dry_run.rank_records import RankRecords
from nbaccel.features.check.dry_run.rank_run import RankDryRun, go_offline
from nbaccel.features.source.fingerprint import checksum_of
from nbaccel.launching.ipc.import_hooks_meanwhile import when_loaded_meanwhile
from nbaccel.launching.ipc.spec import Results, load_named
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import RANDOM, RESULT, CellTask
from nbaccel.namespace.nbytes import size_of
from nbaccel.namespace.wrappers import plain

__all__ = ["DiscardedTask", "DryRunTask", "GradientTask"]

_COMPARED_BYTES = 1_000_000
"""Largest size of a value that ranks compare: a score, a list of losses, predictions."""

_SHOWN = 60
"""Characters of a value that a report shows."""


class DiscardedTask(CellTask):
    """Runs a cell as it is, without a connection to the internet, and brings nothing back.

    See `CellTask` for the other arguments; what subclasses measure, they write into `folder`.

    Args:
        folder: Exists, and is shared by the ranks.
    """

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        out: tuple[str, ...] | None = None,
        extra: tuple[str, ...] = (),
        *,
        folder: str,
        **options: Any,
    ) -> None:
        super().__init__(source, namespace, out, extra, **options)
        self.folder = folder

    def begin(self, rank: int) -> None:
        super().begin(rank)
        go_offline()

    def results(self, rank: int) -> Results:
        return Results()


class GradientTask(DiscardedTask):
    """Runs a cell until its first step, whose gradients are recorded.

    Args:
        make_probe: "module:function" that returns what watches the cell.
        turns, steps: See `nbaccel.features.check.dry_run.gradient_probe.GradientProbe`.
    """

    reference = "nbaccel.features.check.dry_run_task:GradientTask"

    def __init__(self, *cell: Any, make_probe: str, turns: int = 1, steps: int | None = None, **options: Any) -> None:
        super().__init__(*cell, **options)
        self.make_probe = make_probe
        self.turns = turns
        self.steps = steps
        self._rank = 0

    def _own_facts(self) -> Mapping[str, Any]:
        return {"folder": self.folder, "make_probe": self.make_probe, "turns": self.turns, "steps": self.steps}

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self._rank = rank

    def run(self) -> None:
        folder = Path(self.folder)
        write = RankRecords(folder, self._rank).write
        values = folder / f"gradients-{self._rank}.f32"
        with load_named(self.make_probe)(write, values, self.turns, self.steps):
            super().run()


class DryRunTask(DiscardedTask):
    """Tries a cell with a few batches of each loop.

    Args:
        make_parts: "module:function" that returns what cuts loaders and measures, see `RankDryRun`.
    """

    reference = "nbaccel.features.check.dry_run_task:DryRunTask"

    def __init__(self, *cell: Any, make_parts: str, **options: Any) -> None:
        super().__init__(*cell, **options)
        self.make_parts = make_parts
        self._rewritten: list[types.CodeType] = []
        self._dry_run: RankDryRun | None = None

    def _own_facts(self) -> Mapping[str, Any]:
        return {"folder": self.folder, "make_parts": self.make_parts}

    def named_objects(self) -> Sequence[str]:
        return [self.make_parts]

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self._dry_run = RankDryRun(Path(self.folder), rank, load_named(self.make_parts), when_loaded_meanwhile)

    def run(self) -> None:
        assert self._dry_run is not None, "`begin` comes before"
        self._rewritten = self._dry_run.rewritten(self.source.parsed(), self.source.name, self.source.compile_tree)
        with self._dry_run:
            super().run()
            wait_for_device()

    def _executed(self) -> list[types.CodeType]:
        return self._rewritten

    def results(self, rank: int) -> Results:
        """Return no values, but their sizes, and in every rank the checksums of small ones."""
        found = CellTask.results(self, rank)  # what the cell would bring back, of which values stay here
        values = {name: value for name, value in found.values.items() if name not in (RESULT, RANDOM)}
        for name in found.facts.get("changed", ()):  # in place: the content of these comes back
            values.setdefault(name, self.namespace.get(name))
        for name in self.leftovers():
            values.pop(name, None)
        seen: dict[str, tuple[str, str]] = {}
        for name in sorted({*self.out, *self.binds()} & self.namespace.keys()):
            with suppress(Exception):  # a class of the user's may raise anything
                value = plain(self.namespace[name])
                if _is_compared(value):
                    seen[name] = checksum_of([value]), _shown(value)
        sizes: dict[str, int] = {}
        for name, value in values.items():
            with suppress(Exception):  # as above
                sizes[name] = size_of(value)
        facts = {**found.facts, "left_bytes": sizes, "seen": seen}
        return replace(found, values={}, changes=[], places=None, parts={}, facts=facts)


def _is_compared(value: Any) -> bool:
    """Return whether `value` is a result that could be compared: numbers, texts, arrays and containers of these."""
    kinds = (bool, int, float, complex, str, list, tuple, dict)
    is_data = isinstance(value, kinds) or type(value).__name__ in ("ndarray", "Tensor", "DataFrame", "Series")
    return is_data and size_of(value) <= _COMPARED_BYTES


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
