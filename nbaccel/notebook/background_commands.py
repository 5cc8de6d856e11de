"""`%accelerate wait|attach|stop|last`: commands on a run in the background, or on the last run. Runs in the kernel.

`Background` and `Session` do the work.
"""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from nbaccel.notebook.cell_screen import CellScreen
from nbaccel.notebook.commands import Command, bare
from nbaccel.notebook.session import Session

__all__ = ["background_commands"]


def background_commands(session: Session) -> list[Command]:
    """Return the commands of one notebook."""

    def attach() -> Any:
        if session.background.current is None and session.launcher.last_run is not None:
            return session.say("no run goes on in the background: %accelerate last shows the one before")
        return session.background.attach(lambda: CellScreen(session.shell.kernel))

    def stop() -> None:
        if session.background.stop():
            return
        if not session.stay.is_on:
            raise UsageError("nothing runs in the background, and no ranks stay.")
        session.stay.stop()

    return [
        bare("wait", lambda: session.background.wait()),
        bare("attach", attach),
        bare("last", session.show_last),
        bare("stop", stop),
    ]
