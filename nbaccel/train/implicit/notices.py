"""Notices: print once, before the first step, how an unmodified loop is changed. Runs in ranks; rank 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from nbaccel.train.implicit.handed import Split
from nbaccel.train.implicit.models import Model
from nbaccel.world import World

__all__ = ["Notices"]


class Notices:
    """Collects facts about a task's loop, and prints them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.begin(None)

    def begin(self, namespace: dict[str, Any] | None) -> None:
        """Begin a task.  namespace: the cell's names."""
        self._namespace = namespace or {}
        self._said: set[str] = set()
        self._models = ""
        self._has_batch_norm = False
        self._whole = ""

    def note_models(self, models: Sequence[Model]) -> None:
        """Note the models that are averaged from now on."""
        named = [f"{self._name_of(model)} ({_amount(model.parameters)})" for model in models]
        self._models = f"gradients of {' and '.join(named)} averaged"
        self._has_batch_norm = any(model.has_batch_norm for model in models)

    def note_split(self, split: Split) -> None:
        """Print the decision on a loader's batches."""
        ranks = self._world.world_size
        if not split.is_split:
            self._whole = split.why
            self._say(f"{split.name}: whole in each of {ranks} ranks, the same work: {split.why}. -n 1 does it once")
            return
        batches = "its batches" if split.batches is None else f"{split.batches:,} batches"
        text = f"{split.name}: {split.why or f'each of {batches} split over {ranks} ranks'}"
        for more in (split.remark, self._models):
            text += f"; {more}" if more else ""
        self._say(text)
        self._say("numbers that the loop makes of a batch are of a rank's part: divide by counts, not by len(dataset)")
        if self._has_batch_norm:
            self._say(
                "batch norm sees a part of each batch; torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) sees all"
            )

    def note_uneven(self, taken: Sequence[float]) -> None:
        said = ", ".join(f"rank {rank} {count:g}" for rank, count in enumerate(taken))
        self._say(f"the ranks have taken different numbers of steps ({said}); all have the weights of the longest now")

    def note_differing(self) -> None:
        self._say(
            "the ranks' weights differed at the end: something changes them that is drawn or decided in each rank; "
            "all have rank 0's now"
        )

    def note_parts_shown(self) -> None:
        """Print that a loss whose terms count differently keeps the value that it has here."""
        self._say("the loss has terms that count differently in parts of a batch: what is shown of it is rank 0's part")

    def note_buffers(self, names: str) -> None:
        """Print that a forward has left other values in a buffer than in other ranks."""
        self._say(
            f"{names}: a forward changes it by what its batch is, and it is the ranks' average now: right for a mean "
            "over samples, not for a count or a sum. --batches each or -n 1 where that matters"
        )

    def note_drawn(self) -> None:
        """Print that the loop draws from NumPy or Python's random while it has a part of a batch."""
        self._say(
            "what the loop draws from NumPy or random is the same in all ranks: right for decisions; noise for its "
            "samples is that of each other rank's samples, too. torch's numbers differ between ranks"
        )

    def note_lengths(self) -> None:
        """Print that sizes below the loss differ between ranks, beside those of the batch."""
        self._say(
            "sizes below the loss differ between ranks, by what their samples are, as where a model pads to the "
            "longest of its part (pad_packed_sequence without total_length): right where padding is masked or ignored. "
            "--batches each or -n 1 where that matters"
        )

    def note_compiled(self) -> None:
        """Print that parts of a batch went through a compiled model."""
        self._say(
            "a compiled model cannot be looked into: where it computes with its batch as a whole (a mean over it, "
            "samples beside each other), it has a part of it. --batches each gives ranks whole batches"
        )

    def note_no_loader(self) -> None:
        """Print that the loop trained without a loader."""
        self._say(
            f"no loader hands out batches: each of {self._world.world_size} ranks does all steps, the same work unless "
            "it draws its data at random. -n 1 does it once"
        )

    def note_same_work(self, is_stepped: bool) -> None:
        """Print, at the end of a task, that no batch was split.  is_stepped: an optimizer has stepped."""
        if not self._said:
            why = "" if is_stepped else ": it computes gradients, and trains nothing"
            self._say(
                f"each of {self._world.world_size} ranks has done all of this loop's work{why}. -n 1 does it once"
            )

    def explain(self) -> str:
        return self._whole

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            if self._world.is_main_process:
                sys.stdout.write(f"nbaccel: {text}\n")
                sys.stdout.flush()

    def _name_of(self, model: Model) -> str:
        root = None if model.root_of is None else model.root_of()
        if root is None:
            return model.name
        names = (name for name, value in self._namespace.items() if value is root and not name.startswith("_"))
        return next(names, model.name)


def _amount(count: int) -> str:
    """
    >>> _amount(1_234_000), _amount(12_300), _amount(500)
    ('1.2 M', '12.3 k', '500')
    """
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return str(count)
