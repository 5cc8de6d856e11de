"""Let metrics stay local to their rank in a loop that does not know ranks. Runs in ranks; imports no library.

torchmetrics and ignite add up their counts over all ranks as soon as there is a process group. In a loop that does not
know ranks every rank runs the whole evaluation, so each sample would be counted once per rank. In a program that
prepares objects, or divides the data itself, these libraries work as usual in ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from nbaccel.launching.ipc.import_hooks import Action
from nbaccel.launching.libraries import OtherLibraries

__all__ = ["metrics"]


def metrics(ranks: OtherLibraries, library: str) -> Iterator[tuple[str, Action]]:
    """Let metrics of `library` stay local."""
    these = _MetricsOfRanks(ranks)
    yield {
        "torchmetrics": ("torchmetrics.metric", these.watch_torchmetrics),
        "ignite": ("ignite.distributed.comp_models", these.watch_ignite),
    }[library]


class _MetricsOfRanks:
    """Decides whether metrics are added up over the ranks, from task to task."""

    def __init__(self, ranks: OtherLibraries) -> None:
        self._ranks = ranks

    @property
    def are_alone(self) -> bool:
        """Return whether the running loop does not know ranks, and has not prepared anything meanwhile."""
        return self._ranks.watch is not None and self._ranks.watch.keeps(())

    def watch_torchmetrics(self, module: Any) -> None:
        real = module.Metric.sync

        @functools.wraps(real)
        def sync(metric: Any, *args: Any, **kwargs: Any) -> None:
            if not self.are_alone:
                real(metric, *args, **kwargs)

        module.Metric.sync = sync

    def watch_ignite(self, module: Any) -> None:
        """Patch ignite, whose functions look for a process group until they have found one."""
        kind = module.native._NativeDistModel
        real = kind.create_from_context

        @functools.wraps(real)
        def create_from_context() -> Any:
            return None if self.are_alone else real()

        kind.create_from_context = staticmethod(create_from_context)
