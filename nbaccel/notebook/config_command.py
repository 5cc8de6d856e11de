"""`%accelerate config`: shows the notebook's choices, changes them, saves them. Runs in the kernel.

Without arguments it shows a form if there is a front end and ipywidgets, otherwise the same as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from nbaccel.notebook.choices import batch_size_of, overview
from nbaccel.notebook.parsing import SAVE
from nbaccel.notebook.session import Session
from nbaccel.world import World, is_notebook_kernel

if TYPE_CHECKING:  # it imports ipywidgets, which take a while and may be missing
    from nbaccel.notebook.form import Form

__all__ = ["ConfigCommand"]


class ConfigCommand:
    """The command of one notebook, and its form once it was shown."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._form: Form | None = None

    def run(self, words: Sequence[str]) -> None:
        """Carry out KEY=VALUE …, `--save`, or both; without words show the present choices.

        Raises:
            UsageError: one of them is wrong, and nothing was changed; the file cannot be read or written; or this
                is a rank.
        """
        if World.from_env().launch_id:
            raise UsageError(
                "choices are the notebook's, and what a rank chooses ends with it: use %accelerate config, or "
                "nbaccel.panel(), in a cell of its own, without %%accelerate."
            )
        if not words:
            return self._show()
        configuration = self._session.configuration
        configuration.change(word for word in words if word != SAVE)
        self._session.say(configuration.save() if SAVE in words else str(configuration))
        if self._form is not None:
            self._form.follow()

    def _show(self) -> None:
        """Display the form, or print the same as text."""
        session = self._session
        session.configured()  # prints the choices of the file, or raises if it is wrong
        batch_size = batch_size_of(session.shell.user_ns)
        missing = ""
        if is_notebook_kernel():
            try:
                return self._formed(batch_size).show()
            except ModuleNotFoundError as error:
                missing = f"\n({error.name} is not installed: with it, this is a form)"
        session.say(overview(session.configuration, session.survey(), batch_size) + missing)

    def _formed(self, batch_size: int) -> Form:
        from nbaccel.notebook.form import Form

        if self._form is None:
            self._form = Form(self._session.configuration, self._session.survey, batch_size)
        return self._form
