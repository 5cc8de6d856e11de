"""An IPython shell for the zygote, as a fork would have inherited one. Runs in a process that starts ranks."""

from __future__ import annotations

__all__ = ["new_shell"]


def new_shell() -> None:
    """Give a process of the zygote an IPython shell, as a fork would have inherited one. Called in the zygote."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class RankShell(InteractiveShell):
        """A kernel's shell for a process without a kernel."""

        def enable_gui(self, gui: str | None = None) -> None:
            """Do nothing: there is no event loop to join; `%matplotlib inline` calls this all the same."""

    if InteractiveShell.initialized():
        return
    config = Config()
    config.HistoryManager.enabled = False  # sqlite and its thread do not survive a fork
    RankShell.instance(config=config)
