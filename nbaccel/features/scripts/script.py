"""A rank of `nbaccel launch`: runs a script or a module as the interpreter would, except for the interpreter's own end.

    python -m nbaccel.features.scripts.script train.py --epochs 3
    python -m nbaccel.features.scripts.script -m package.train --epochs 3

The end is left out because torch does not survive it (2.13). Threads of its gloo backend release the last collective's
tensors some time after it, and need the interpreter's lock for that. If the interpreter is ending meanwhile, it ends
the thread inside a C++ destructor, and the process aborts: "terminate called without an active exception", exit status
-6, after all work is done; this also happens under torchrun. The steps that a program may rely on are done: threads are
joined, `atexit` handlers run, streams are flushed. Ranks of notebooks end in the same way, see `rank/lifetime`.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import random
import runpy
import sys
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from nbaccel.base.events import reports
from nbaccel.base.failures import Failure, classify
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.features.flag_effects.effect_table import ProgramKind
from nbaccel.features.scripts.script_watch import WatchedRank
from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.rank.lifetime import end_as_the_interpreter

__all__ = ["FLAGS", "main"]

FLAGS = "--nbaccel-flags"
"""The word before the flags of the launch, as `effect_table.as_json` writes them."""

_EXPORTED = "ExportedCell("

_INTERRUPTED = 130  # as a shell reports SIGINT
_CAUSE_FIRST_S = 3.0
"""Seconds that a rank stays after it has lost a peer.

Torch's agent checks ten times a second, blames the first rank that it finds gone, and then ends the others: it has to
find the lost peer.
"""


def main(words: Sequence[str]) -> NoReturn:
    """Run the program in `words`, and end with its exit status.

    Args:
        words: The program with its arguments; before it, maybe, `FLAGS` and the flags of the launch.
    """
    status = 0
    if words[0] == FLAGS:
        _watch_flags(words[1], words[2])
        words = words[2:]
    _seed()
    watched = WatchedRank.from_env()
    if watched is not None:
        reports.lead_to(watched)
    try:
        _run_module(*words[1:]) if words[0] == "-m" else _run_script(*words)
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:
        error = error.with_traceback(_behind_us(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        if classify(type(error).__name__, str(error)) is Failure.PEER_LOST:
            time.sleep(_CAUSE_FIRST_S)
        status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if watched is not None and not status:
        watched.finish()
    end_as_the_interpreter()
    os._exit(status & 0xFF)


def _watch_flags(flags: str, program: str) -> None:
    """Have the program told which flags of the launch have no effect above its loop."""
    from nbaccel.features.flag_effects.effect_table import flags_of_json
    from nbaccel.features.flag_effects.flag_watch import FlagWatch
    from nbaccel.launching.rank.separate_trainings import note_wrappers

    world, wrappers = World.from_env(), weakref.WeakSet[Any]()
    note_wrappers(wrappers)
    FlagWatch(world.rank, wrappers).watch(flags_of_json(flags), world.is_main_process, _kind_of(program))


def _kind_of(program: str) -> ProgramKind:
    """Return the kind of a program: one that a notebook has exported has the setup of cells, as a function has."""
    with contextlib.suppress(OSError), open(program, encoding="utf-8", errors="replace") as file:
        if _EXPORTED in file.read():
            return ProgramKind.FUNCTION
    return ProgramKind.SCRIPT


def _seed() -> None:
    """Seed the generators of this rank by the launch's seed and its number, of libraries once they are loaded."""
    seed = RunSettings.from_env().seed
    if seed is None:
        return
    seed += World.from_env().rank
    random.seed(seed)
    when_loaded(
        {
            "numpy.random": lambda module: module.seed(seed % 2**32),  # the largest that it takes
            "torch": lambda module: module.manual_seed(seed),
        }
    )


def _run_script(path: str, *arguments: str) -> None:
    """Run a script in the module `__main__` itself, for good: code that reads names there finds them to the end."""
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update(__name__="__main__", __file__=path, __builtins__=builtins)
    names.update(dict.fromkeys(("__spec__", "__package__", "__loader__", "__cached__", "__doc__")))
    exec(code, names)


def _run_module(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _status(code: object) -> int:
    """Return the exit status that ``sys.exit(code)`` means."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _behind_us(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    from nbaccel.features.scripts import script  # this copy's names become the program's

    script.main(sys.argv[1:])
