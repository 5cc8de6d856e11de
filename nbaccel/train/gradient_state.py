"""GradientState: shows the state of an accelerator's accumulation to programs that read it. Runs in ranks.

It is a view without data of its own, and every accelerator has its own one. Accelerate has one for the whole
process, so that a second `Accelerator()` resets the first one's accumulation; here ``GradientState()`` shows the
Accelerator that was made last.
"""

from __future__ import annotations

from typing import Any

from nbaccel.train.accumulation import Accumulation
from nbaccel.train.talk.process_group import process_group

__all__ = ["GradientState"]


class GradientState:
    """Read-only view of an accumulation, as ``accelerator.gradient_state``. Reading it changes nothing.

    >>> from nbaccel import Accelerator
    >>> Accelerator(gradient_accumulation_steps=4).gradient_state.num_steps
    4
    """

    def __init__(self, accumulation: Accumulation | None = None) -> None:
        """Show `accumulation`, an accelerator's; None is that of the accelerator that was made last.

        Raises:
            RuntimeError: there is no accelerator yet.
        """
        if accumulation is None:
            newest = next(reversed(list(process_group.users)), None)
            if newest is None:
                raise RuntimeError("a GradientState belongs to an Accelerator, and none has been made in this process")
            accumulation = newest.gradient_state._accumulation
        self._accumulation = accumulation

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends a step."""
        return self._accumulation.window.sync

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self._accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """The choice of the plugin; see `GradientAccumulationPlugin`."""
        return self._accumulation.rules.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batch of a loader ends its step."""
        return self._accumulation.rules.sync_with_dataloader

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader of the innermost loop; None outside of such loops."""
        return self._accumulation.window.source

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the loader's last one."""
        return self._accumulation.window.is_last

    @property
    def remainder(self) -> int:
        """Samples of all ranks in the loader's last round that are no repetition; -1 outside of a loop."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @classmethod
    def _reset_state(cls) -> None:
        """Do nothing, since the view has no data of its own. Notebooks for Accelerate call this before a new start."""

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )
