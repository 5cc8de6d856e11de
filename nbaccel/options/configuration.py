"""Choices of a notebook for all its cells, and those of a folder, nbaccel.toml. Runs in the kernel and in `nbaccel`.

A `Configuration` begins with the choices of nbaccel.toml, if the folder has one; the form and `%accelerate config`
change them, and `save` writes them back. A cell's own flags override them, which is `RunOptions.over`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from IPython.core.error import UsageError

from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import chosen, configured, described, keys, text_of
from nbaccel.options.run_options import RunOptions

__all__ = [
    "FILE_NAME",
    "ConfigFile",
    "Configuration",
    "Value",
]

FILE_NAME = "nbaccel.toml"

Value = bool | int | float | str | list[str]

_HEADING = """\
# Choices for the notebooks of this folder: the long flags of %%accelerate. A cell's own flags win over them, and so
# does %accelerate config.
"""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The file of one folder; by default of the working directory, as for a notebook.

    It holds a flat table, one line KEY = VALUE each, and knows no key: the code that knows the flags checks the meaning
    of a key and its value. Comments of a file that is written again are lost.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = ConfigFile(Path(folder, "nbaccel.toml"))
        ...     file.write({"num-processes": 2, "out": ["model", "history"]})
        ...     file.read()
        {'num-processes': 2, 'out': ['model', 'history']}
    """

    path: Path = Path(FILE_NAME)

    def read(self) -> dict[str, Value]:
        """Return the values by key; none if there is no file.

        Raises:
            ValueError: One sentence on why the file cannot be understood.
        """
        try:
            content = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}.") from error
        except ValueError as error:  # no TOML, or no text at all
            raise ValueError(f"{self.path} is not TOML: {error}; correct it, or delete the file.") from error
        for key, value in content.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{self.path}: {key} is {_named(value)}; every setting is one line, KEY = VALUE, with a number, "
                    "true or false, a text in quotes, or a list of texts."
                )
        return content

    def write(self, values: Mapping[str, Value]) -> None:
        """Replace the contents of the file by `values`; a reader meanwhile sees the old file or the new one.

        Raises:
            ValueError: One sentence on why the file cannot be written.
        """
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(_HEADING + "".join(lines), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise ValueError(f"{self.path.absolute()} cannot be written: {error.strerror}.") from error


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, bool | int | float | str)


def _named(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    return "a list of other things" if isinstance(value, list) else f"a {type(value).__name__}"


class Configuration:
    """The choices of one notebook.

    Args:
        file: Stores the choices; read when they are first asked for, in the notebook's working directory at that time.
    """

    def __init__(self, file: ConfigFile = ConfigFile()) -> None:  # a value
        self.parser = flags_parser()
        self._file = file
        self._options: RunOptions | None = None
        self._news = ""

    @property
    def options(self) -> RunOptions:
        """Return the present choices.

        Raises:
            UsageError: The file exists and is wrong.
        """
        if self._options is None:
            self._options = self._read()
            self._news = f"{self._file.path}: {self}" if self._options != RunOptions() else ""
        return self._options

    def _read(self) -> RunOptions:
        try:
            values = self._file.read()
        except ValueError as error:
            raise UsageError(str(error)) from None
        try:
            return configured(self.parser, [f"{key}={text_of(value)}" for key, value in values.items()], RunOptions())
        except UsageError as error:
            raise UsageError(f"{self._file.path}: {error}") from None

    def news(self) -> str:
        """Return a line on the choices of the file, once after reading it; otherwise, and without a file, ""."""
        news, self._news = self._news, ""
        return news

    def change(self, settings: Iterable[str]) -> None:
        """Choose by KEY=VALUE; `KEY=` returns to the default. Nothing changes if one of them is wrong.

        Raises:
            UsageError: An unknown key or a wrong value, or a wrong file.
        """
        self._options = configured(self.parser, settings, self.options)

    def reset(self) -> None:
        """Drop all choices; the file stays as it is until the next `save`."""
        self._options = RunOptions()

    def save(self) -> str:
        """Write the choices into the file, replacing its contents; return one line on that.

        Raises:
            UsageError: The file cannot be written.
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
