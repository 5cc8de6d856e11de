"""GradientState: where an accelerator's accumulation stands, for programs that read it. Runs in ranks.

A view: it holds nothing of its own, and every accelerator has its own one. In Accelerate there is one for the whole
process, so that a second `Accelerator()` resets the first one's accumulation.
"""

from __future__ import annotations

from typing import Any

from nbaccel.train.accumulation import Accumulation

__all__ = ["GradientState"]


class GradientState:
    """What ``accelerator.gradient_state`` is. Reading it moves nothing.

    >>> from nbaccel import Accelerator
    >>> Accelerator(gradient_accumulation_steps=4).gradient_state.num_steps
    4
    """

    def __init__(self, accumulation: Accumulation | None = None) -> None:
        if accumulation is None:
            raise TypeError(
                "a GradientState belongs to one accelerator here, since several do not share their accumulation: "
                "use accelerator.gradient_state"
            )
        self._accumulation = accumulation

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch in hand ends a step."""
        return self._accumulation.window.sync

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self._accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """What the plugin says; see `GradientAccumulationPlugin`."""
        return self._accumulation.rules.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends its step."""
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
        """Whether the batch in hand is the loader's last one."""
        return self._accumulation.window.is_last

    @property
    def remainder(self) -> int:
        """Samples of all ranks in the loader's last round that are no repetition; -1 outside of a loop."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )
