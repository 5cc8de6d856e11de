"""The command `nbaccel`: `doctor`, `config`, `demo`, `estimate-memory` and `launch`. Runs in a terminal.

`doctor` reports on this machine, `config` shows and changes the choices of a folder's notebooks, `demo` executes a
notebook that trains, `estimate-memory` says what a training would take, and `launch` runs a script on every device of
one or several machines. The last three are features: the table has who adds their arguments and runs them. Each command
calls the same code as the notebook. May import every folder.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from nbaccel import __version__
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.output.terminal import failed

__all__ = ["main"]

_ADDED = {
    "estimate-memory": "what a training takes, by strategy and number of ranks",
    "demo": "run the quickstart notebook without a browser and say how it went",
}
"""Commands of features whose arguments argparse reads, with their help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["launch"]:  # argparse cannot leave the flags after a script to it
            status: int = feature("nbaccel launch")(words[1:])
        else:
            parsed = _parser(words[:1]).parse_args(words)
            status = parsed.command(parsed)
    except FeatureMissing as error:
        return failed(str(error))
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest what was probably meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"^unrecognized arguments: (?P<flag>\S+)|invalid choice: '(?P<command>[^']*)'", message)
        if wrong and wrong["flag"]:
            super().error(message + _meant(wrong["flag"], self._flags()))
        super().error(message + _meant(wrong["command"], self._commands()) if wrong else message)

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        tables = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        return {name: each for table in tables for name, each in table.items()}

    def _flags(self) -> list[str]:
        parsers = [self, *self._commands().values()]
        return [name for parser in parsers for action in parser._actions for name in action.option_strings]


def _meant(word: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), list(known), n=1)
    return f"; did you mean {alike[0]}?" if alike else ""


def _parser(asked: Sequence[str] = tuple(_ADDED)) -> argparse.ArgumentParser:
    """Return the parser, with the arguments of the commands of features that are `asked`."""
    parser = _Parser(prog="nbaccel", description="Train on every device of the machine from a notebook.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine offers, as plain text; touches no device")
    doctor.set_defaults(command=_doctor)

    config = commands.add_parser("config", help="what nbaccel.toml chooses for the notebooks of this folder")
    config.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="choose this too, and write the file")
    config.set_defaults(command=_config)

    for name, help_ in _ADDED.items():
        added = commands.add_parser(name, help=help_)
        if name in asked:
            feature(f"nbaccel {name}")(added)
    commands.add_parser("launch", help="run a script on every device, as torchrun does; nbaccel launch --help")
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from nbaccel.base.hardware import Survey
    from nbaccel.base.settings import RunSettings

    survey = Survey.take()
    print(feature("%accelerate doctor")(survey, RunSettings.from_env().checkpoint_dir))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    """Print the choices of the file, after writing the given ones into it."""
    from IPython.core.error import UsageError

    from nbaccel.options.configuration import FILE_NAME, Configuration

    configuration = Configuration()
    try:
        configuration.change(arguments.settings)
        print(configuration.save() if arguments.settings else f"{FILE_NAME}: {configuration}")
    except UsageError as error:
        return failed(str(error))
    return 0
