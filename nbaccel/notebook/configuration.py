"""Configuration: the choices of a notebook for all its cells. Runs in the kernel, and in `nbaccel config`.

They begin with those of nbaccel.toml, if the folder has one; the form and `%accelerate config` change them, and `save`
writes them back. A cell's own flags override them, which is `Options.over`.
"""

from __future__ import annotations

from collections.abc import Iterable

from IPython.core.error import UsageError

from nbaccel.configfile import ConfigFile
from nbaccel.notebook.flags import flags_parser
from nbaccel.notebook.options import Options
from nbaccel.notebook.parsing import chosen, configured, described, keys, text_of

__all__ = ["Configuration"]


class Configuration:
    """The choices of one notebook.

    file: stores the choices; read when they are first asked for, in the notebook's working directory at that time.
    """

    def __init__(self, file: ConfigFile = ConfigFile()) -> None:  # noqa: B008  # a value
        self.parser = flags_parser()
        self._file = file
        self._options: Options | None = None
        self._news = ""

    @property
    def options(self) -> Options:
        """Return the present choices.

        Raises:
            UsageError: the file exists and is wrong.
        """
        if self._options is None:
            self._options = self._read()
            self._news = f"{self._file.path}: {self}" if self._options != Options() else ""
        return self._options

    def _read(self) -> Options:
        try:
            values = self._file.read()
        except ValueError as error:
            raise UsageError(str(error)) from None
        try:
            return configured(self.parser, [f"{key}={text_of(value)}" for key, value in values.items()], Options())
        except UsageError as error:
            raise UsageError(f"{self._file.path}: {error}") from None

    def news(self) -> str:
        """Return a line on the choices of the file, once after reading it; otherwise, and without a file, ""."""
        news, self._news = self._news, ""
        return news

    def change(self, settings: Iterable[str]) -> None:
        """Choose by KEY=VALUE; `KEY=` returns to the default. Nothing changes if one of them is wrong.

        Raises:
            UsageError: an unknown key or a wrong value, or a wrong file.
        """
        self._options = configured(self.parser, settings, self.options)

    def reset(self) -> None:
        """Drop all choices; the file stays as it is until the next `save`."""
        self._options = Options()

    def save(self) -> str:
        """Write the choices into the file, replacing its contents; return one line on that.

        Raises:
            UsageError: the file cannot be written.
        """
        values = chosen(self.parser, self.options)
        try:
            self._file.write({key: list(value) if isinstance(value, tuple) else value for key, value in values.items()})
        except ValueError as error:
            raise UsageError(str(error)) from None
        return f"saved to {self._file.path.absolute()}: {self}"

    def __str__(self) -> str:
        """Return the choices as arguments of `%accelerate config`."""
        return described(self.parser, self.options) or "nothing is set"

    @property
    def keys(self) -> list[str]:
        return keys(self.parser)
