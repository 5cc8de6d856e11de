"""Watching: the observers of a run, and the loop that watches a run for them. Runs in the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from nbaccel.events import Listener
from nbaccel.launch.beside import Beside
from nbaccel.launch.crew import Crew
from nbaccel.launch.group import Ended, WorkerGroup
from nbaccel.launch.screen.excerpt import KEPT_BYTES
from nbaccel.launch.screen.router import OutputRouter, Screen
from nbaccel.launch.spec import LaunchSpec
from nbaccel.world import is_notebook_kernel

__all__ = ["Watching", "open_log"]


@dataclass(frozen=True, slots=True)
class Watching:
    """The observers of a run.

    shown_ranks: ranks whose output is shown; None for all.  notice: shows one line of the project to the user.
    listeners: receive the reports of the ranks.  beside: checked while the ranks work, by the thread that waits for
    them.
    """

    screen: Screen
    shown_ranks: Collection[int] | None = None
    notice: Callable[[str], None] | None = None
    listeners: Sequence[Listener] = ()
    beside: Sequence[Beside] = ()

    def say(self, line: str) -> None:
        """Show one line of the project."""
        if self.notice is None:
            self.screen.write("stderr", f"{line}\n")
        else:
            self.notice(line)

    def watch(
        self,
        crew: Crew,
        spec: LaunchSpec,
        log: BinaryIO,
        witness: Listener | None = None,
        begin: Callable[[Collection[int]], None] | None = None,
        outsiders: Collection[int] = (),
    ) -> Ended:
        """Watch one run of a `Crew`, from its beginning to its end.

        log: gets all output.  witness: gets each report before the listeners.  begin: see `WorkerGroup.run`.
        outsiders: ranks that take no part.
        """
        shown: Collection[int] | None = self.shown_ranks
        if outsiders:
            insiders = [rank for rank in range(spec.world_size) if rank not in outsiders]
            shown = [rank for rank in insiders if shown is None or rank in shown]
        heard = [*([] if witness is None else [witness]), *self.listeners]
        kept_bytes = KEPT_BYTES if is_notebook_kernel() else None
        router = OutputRouter(spec.world_size, self.screen, shown_ranks=shown, log=log, kept_bytes=kept_bytes)
        with closing(router):
            group = WorkerGroup(crew, spec, router, notice=self.say, listeners=heard, beside=self.beside)
            return group.run(begin)


def open_log(path: str) -> BinaryIO:
    """Open a new file that only its owner can read."""
    return open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600))
