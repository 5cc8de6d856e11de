"""Let metrics stay local to their rank in a loop that does not know ranks. Runs in ranks; imports no library.

torchmetrics and ignite add up their counts over all ranks as soon as there is a process group. In a loop that does not
know ranks every rank runs the whole evaluation, so each sample would be counted once per rank. In a program that
prepares objects, or divides the data itself, these libraries work as usual in ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from nbaccel.launching.ipc.import_hooks import Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank

__all__ = ["metrics"]


def metrics(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Let metrics of `library` stay local."""
    these = _MetricsOfRanks(here)
    yield {
        "torchmetrics": ("torchmetrics.metric", these.watch_torchmetrics),
        "ignite": ("ignite.distributed.comp_models", these.watch_ignite),
    }[library]


class _MetricsOfRanks:
    """Decides whether metrics are added up over the ranks, from task to task."""

    def __init__(self, here: LibraryRank) -> None:
        self._here = here

    @property
    def are_alone(self) -> bool:
        """Return whether the running loop does not know ranks, and has not prepared anything meanwhile."""
        return self._here.watch is not None and self._here.watch.keeps(())

    def watch_torchmetrics(self, module: Any) -> list[Change]:
        def local(real: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(real)
            def sync(metric: Any, *args: Any, **kwargs: Any) -> None:
                if not self.are_alone:
                    real(metric, *args, **kwargs)

            return sync

        return [Replacement([module.Metric], "sync", local)]

    def watch_ignite(self, module: Any) -> list[Change]:
        """Patch ignite, whose functions look for a process group until they have found one."""

        def local(real: Callable[..., Any]) -> Any:
            @functools.wraps(real)
            def create_from_context() -> Any:
                return None if self.are_alone else real()

            return staticmethod(create_from_context)

        return [Replacement([module.native._NativeDistModel], "create_from_context", local)]
