"""Commands: one object for each command that may follow `%accelerate`.

Runs in the kernel; the work is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

__all__ = ["Command", "Commands", "bare"]


@dataclass(frozen=True, slots=True)
class Command:
    """One word after `%accelerate`.  run: gets the rest of the line."""

    name: str
    run: Callable[[str], Any]


def bare(name: str, act: Callable[[], Any]) -> Command:
    """Return a command that takes no further words."""

    def run(rest: str) -> Any:
        if rest:
            raise UsageError(f"%accelerate {name} takes nothing behind it; got {rest!r}.")
        return act()

    return Command(name, run)


class Commands:
    """The commands of one notebook.

    >>> commands = Commands([bare("hello", lambda: print("hi"))], lambda: print("nothing said"))
    >>> commands.run("hello"); commands.run("")
    hi
    nothing said
    """

    def __init__(self, commands: Iterable[Command], otherwise: Callable[[], Any]) -> None:
        self._commands = {command.name: command for command in commands}
        self._otherwise = otherwise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._commands)

    def run(self, line: str) -> Any:
        """Run the line after `%accelerate`; return its result.

        Raises:
            UsageError: it begins with no command, or its command cannot be carried out.
        """
        word, _, rest = line.strip().partition(" ")
        if not word:
            return self._otherwise()
        if word in self._commands:
            return self._commands[word].run(rest.strip())
        raise UsageError(
            f"%accelerate {word} is no command: there is %accelerate alone, or with {_either(self.names)}. "
            "Flags belong to a cell that begins with %%accelerate, two percent signs, and runs in ranks."
        )


def _either(words: Sequence[str]) -> str:
    """Join words by commas and a final "or".

    >>> _either(["config", "doctor", "memory"])
    'config, doctor or memory'
    """
    return f"{', '.join(words[:-1])} or {words[-1]}"
