"""The commands on ranks that stay: `start`, `push`, `pull` and `restart` after `%accelerate`. Run in the kernel.

They read the arguments; the session's `stay` does the work.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection

from IPython.core.error import UsageError

from nbaccel.features.persistent.persistent_session import of_the_start
from nbaccel.notebook.commands import bare
from nbaccel.notebook.session import Session
from nbaccel.options.flags import read_names
from nbaccel.options.parsing import parse

__all__ = ["run_command"]

_RANK = "--rank"


def run_command(session: Session, parser: argparse.ArgumentParser, name: str, rest: str) -> None:
    """Run the command `name` with the rest of its line.

    Args:
        parser: The parser of the flags.
    """

    def start(rest: str) -> None:
        session.make_room()
        session.stay.start(parse(parser, rest).over(of_the_start(session.configured())))

    def push(rest: str) -> None:
        names = _names("push", rest)
        _refuse_unknown("push", names, session.shell.user_ns)
        session.make_room()
        session.stay.push(names)

    def pull(rest: str) -> None:
        words, rank = _split_rank(rest)
        names = _names("pull", words)
        session.make_room()
        session.stay.pull(names, rank)

    def restart() -> None:
        session.make_room()
        session.stay.restart()

    commands = {"start": start, "push": push, "pull": pull, "restart": bare("restart", restart).run}
    commands[name](rest)


def _names(command: str, text: str) -> tuple[str, ...]:
    try:
        return read_names(",".join(text.split()))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"%accelerate {command} needs names of variables: {error}.") from None


def _split_rank(text: str) -> tuple[str, int]:
    """Split the rank off: `y --rank 1` is y of rank 1, `y` is y of rank 0.

    Example:
        >>> _split_rank("y,z --rank 1"), _split_rank("y")
        (('y,z', 1), ('y', 0))
    """
    words = text.replace("=", " ").split()
    if _RANK not in words:
        return text, 0
    at = words.index(_RANK)
    number = "".join(words[at + 1 : at + 2])
    if not number.isdecimal():
        raise UsageError(f"{_RANK} is the number of one rank: %accelerate pull NAMES {_RANK} 1; got {number!r}.")
    return " ".join(words[:at] + words[at + 2 :]), int(number)


def _refuse_unknown(command: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=1)
            raise UsageError(
                f"%accelerate {command} {name}: the notebook has no variable of that name"
                f"{f' (did you mean {near[0]}?)' if near else ''}; nothing was sent."
            )
