"""`%accelerate wait|attach|stop`: back to a run in the background; `Background` does the work. Runs in the kernel."""

from __future__ import annotations

from IPython.core.error import UsageError

from nbaccel.notebook.cell_screen import CellScreen
from nbaccel.notebook.commands import Command, bare
from nbaccel.notebook.session import Session

__all__ = ["background_commands"]


def background_commands(session: Session) -> list[Command]:
    """The commands of one notebook."""

    def stop() -> None:
        if session.background.stop():
            return
        if not session.stay.is_on:
            raise UsageError("nothing runs in the background, and no ranks stay.")
        session.stay.stop()

    return [
        bare("wait", lambda: session.background.wait()),
        bare("attach", lambda: session.background.attach(lambda: CellScreen(session.shell.kernel))),
        bare("stop", stop),
    ]
