"""The debugger of one rank: pdb, whose commands a person types in the notebook. Runs in ranks.

In the debugged rank, `breakpoint()` stops and an error opens a post-mortem; in its peers, which run the same code,
`breakpoint()` does nothing, and they wait at the next collective. The runtime (`Ask`) passes questions to the notebook;
the kernel excludes the time of the answers from the run's limits.
"""

from __future__ import annotations

import bdb
import builtins
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from nbaccel.base.failures import Failure, classify
from nbaccel.launching.ipc.user_code import is_users

__all__ = [
    "Ask",
    "Debugging",
    "NoDebugging",
    "RunIsOver",
    "debugging",
]

Ask = Callable[[str], str]
"""Shows a prompt after everything that this rank has printed, and returns the input.

Raises:
    BdbQuit: The user interrupted instead of typing.
    RunIsOver: No answer comes any more.
"""

_LAUNCHING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BELOW_THE_USER = tuple(os.path.join(_LAUNCHING, folder, "") for folder in ("libraries", "rank"))

_Pdb = next(kind for kind in pdb.Pdb.__mro__ if kind.__module__ == "pdb")
"""Python's own class, even if IPython has replaced it, which a clean process of the zygote would not have."""


class RunIsOver(bdb.BdbQuit):
    """Raised when the run ends for another reason than that the user quit the debugger."""


class _RankPdb(_Pdb):  # type: ignore[misc, valid-type]  # a class that is found at run time
    """Shows the user's frames, not those of the kernel that this process is a copy of, nor those of the project."""

    def __init__(self) -> None:
        # With pdb's own handler of SIGINT a stop of the run would open the debugger again.
        super().__init__(nosigint=True)
        self._is_post_mortem = False

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, _ = super().get_stack(f, t)
        ours = [at for at, (frame, _) in enumerate(stack) if frame.f_code.co_filename.startswith(_BELOW_THE_USER)]
        stack = stack[ours[-1] + 1 :] if ours and ours[-1] + 1 < len(stack) else stack
        theirs = [at for at, (frame, _) in enumerate(stack) if is_users(frame.f_code.co_filename)]
        return stack, theirs[-1] if self._is_post_mortem and theirs else len(stack) - 1

    def canonic(self, filename: str) -> str:
        """Return the name of a cell unchanged: a cell is no file of the working directory."""
        return filename if filename.startswith("Cell In[") else super().canonic(filename)

    def examine(self, trace: TracebackType) -> None:
        """Inspect the values that an exception left, from the user's innermost frame."""
        self._is_post_mortem = True
        self.reset()
        self.interaction(None, trace)


class NoDebugging:
    """A rank in which nothing stops."""

    def post_mortem(self, error: BaseException) -> None:
        """Do nothing."""


class Debugging(NoDebugging):
    """The rank that is debugged.

    Args:
        begin: Called before a post-mortem.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def post_mortem(self, error: BaseException) -> None:
        """Let the user inspect the values that `error` left, unless it only says that another rank was lost."""
        if error.__traceback__ is None or classify(type(error).__name__, str(error)) is Failure.PEER_LOST:
            return
        self._begin()
        print(f"{type(error).__name__}: {error}")
        print("This is the debugger after the error, with the values that it left; q ends the run.")
        with suppress(bdb.BdbQuit):
            _RankPdb().examine(error.__traceback__)


@contextmanager
def debugging(debugged: int | None, rank: int, ask: Ask, say: Callable[[str], None]) -> Iterator[NoDebugging]:
    """Run the user's code inside this context.

    Args:
        debugged: The rank to debug; None for a run without a debugger, in which `breakpoint()` is refused.
        say: Tells the kernel at once that the user leaves the run from the debugger ("quit"), before `BdbQuit` goes on,
            and that an error is being inspected ("post_mortem").
    """
    if debugged is None:
        yield NoDebugging()
        return
    is_here = rank == debugged
    hooks: list[tuple[Any, str, Any]] = [
        (module, name, _stop if is_here else _pass)
        for module, name in ((sys, "breakpointhook"), (pdb, "set_trace"), (_ipython(), "set_trace"))
    ]
    if is_here:
        hooks.append((builtins, "input", _typed(ask)))
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in hooks]
    for owner, name, hook in hooks:
        setattr(owner, name, hook)
    try:
        yield Debugging(lambda: say("post_mortem")) if is_here else NoDebugging()
    except RunIsOver:
        raise
    except bdb.BdbQuit:
        say("quit")
        raise
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _ipython() -> Any:
    """Return the module of IPython's `set_trace`, or a substitute if no code can have imported it."""
    return sys.modules.get("IPython.core.debugger", SimpleNamespace())


def _typed(ask: Ask) -> Callable[[object], str]:
    def input(prompt: object = "", /) -> str:
        return ask(str(prompt))

    return input


def _stop(*args: Any, **kwargs: Any) -> None:
    """Replacement of `breakpoint`, which takes the arguments of its hook; pdb's header is printed."""
    if header := kwargs.get("header"):
        print(header)
    _RankPdb().set_trace(sys._getframe(1))


def _pass(*args: Any, **kwargs: Any) -> None:
    """Replacement of `breakpoint` in the peers; does nothing."""
