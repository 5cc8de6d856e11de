"""Let metrics of a raw loop count what their rank has seen, and no other. Runs in ranks; imports no library of metrics.

torchmetrics and ignite add their counts up over all ranks as soon as there is a process group. In a loop that knows no
ranks evaluations are whole in every rank, so that would count each sample as often as there are ranks. A program that
prepares, or gives ranks their share by itself, has what these libraries do in ranks.
"""

from __future__ import annotations

import functools
from typing import Any

from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.launch.spec import TaskWatch

__all__ = ["LoneMetrics"]


class LoneMetrics:
    """Whether metrics are added up over the ranks, from task to task. One per process."""

    def __init__(self) -> None:
        self._watch: TaskWatch | None = None

    def watch(self) -> None:
        """Meet the metrics of this process, from now on."""
        when_loaded({"torchmetrics.metric": self._of_torchmetrics, "ignite.distributed.comp_models": self._of_ignite})

    def begin(self, knows_ranks: bool, watch: TaskWatch | None) -> None:
        """A task begins.  knows_ranks: it speaks of them.  watch: who keeps the training of one that does not."""
        self._watch = None if knows_ranks else watch

    @property
    def are_alone(self) -> bool:
        """Whether a loop is run that knows no ranks, and has not prepared anything meanwhile."""
        return self._watch is not None and self._watch.keeps(())

    def _of_torchmetrics(self, module: Any) -> None:
        real = module.Metric.sync

        @functools.wraps(real)
        def sync(metric: Any, *args: Any, **kwargs: Any) -> None:
            if not self.are_alone:
                real(metric, *args, **kwargs)

        module.Metric.sync = sync

    def _of_ignite(self, module: Any) -> None:
        """Its functions look for a process group as long as they have found none."""
        kind = module.native._NativeDistModel
        real = kind.create_from_context

        @functools.wraps(real)
        def create_from_context() -> Any:
            return None if self.are_alone else real()

        kind.create_from_context = staticmethod(create_from_context)
