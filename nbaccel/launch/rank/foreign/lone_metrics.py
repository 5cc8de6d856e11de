"""Keeps metrics of a raw loop local to their rank. Runs in ranks; imports no library of metrics.

torchmetrics and ignite add up their counts over all ranks as soon as there is a process group. In a loop that does not
know ranks every rank runs the whole evaluation, so each sample would be counted once per rank. In a program that
prepares objects, or divides the data itself, these libraries work as usual in ranks.
"""

from __future__ import annotations

import functools
from typing import Any

from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.launch.spec import TaskWatch

__all__ = ["LoneMetrics"]


class LoneMetrics:
    """Decides whether metrics are added up over the ranks, from task to task. One per process."""

    def __init__(self) -> None:
        self._watch: TaskWatch | None = None

    def watch(self) -> None:
        """Patch the metrics of this process, from now on."""
        when_loaded({"torchmetrics.metric": self._of_torchmetrics, "ignite.distributed.comp_models": self._of_ignite})

    def begin(self, knows_ranks: bool, watch: TaskWatch | None) -> None:
        """Begin a task.  knows_ranks: its code is for several ranks.  watch: keeps the training of others equal."""
        self._watch = None if knows_ranks else watch

    @property
    def are_alone(self) -> bool:
        """Return whether the running loop does not know ranks, and has not prepared anything meanwhile."""
        return self._watch is not None and self._watch.keeps(())

    def _of_torchmetrics(self, module: Any) -> None:
        real = module.Metric.sync

        @functools.wraps(real)
        def sync(metric: Any, *args: Any, **kwargs: Any) -> None:
            if not self.are_alone:
                real(metric, *args, **kwargs)

        module.Metric.sync = sync

    def _of_ignite(self, module: Any) -> None:
        """Patch ignite, whose functions look for a process group until they have found one."""
        kind = module.native._NativeDistModel
        real = kind.create_from_context

        @functools.wraps(real)
        def create_from_context() -> Any:
            return None if self.are_alone else real()

        kind.create_from_context = staticmethod(create_from_context)
