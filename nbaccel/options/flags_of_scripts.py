"""A parser of some of the flags, for a command of the terminal. Runs there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from IPython.core.magic_arguments import MagicArgumentParser

from nbaccel.options.flags import HELP_COLUMN, HELP_WIDTH, SETTINGS, unabbreviated

__all__ = ["some_flags"]


def _plain_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=HELP_COLUMN, width=HELP_WIDTH)


def some_flags(keys: Collection[str], **about: Any) -> argparse.ArgumentParser:
    """Return a parser of the settings whose long names, without dashes, are in `keys`.

    Args:
        **about: Further arguments of `ArgumentParser`.
    """
    make: Callable[..., argparse.ArgumentParser] = MagicArgumentParser  # it reports mistakes by UsageError
    parser = unabbreviated(make(formatter_class=_plain_formatter, **about))
    for flag in SETTINGS:
        if {name.removeprefix("--") for name in flag.args} & {*keys}:
            flag.add_to_parser(parser, None)
    return parser
