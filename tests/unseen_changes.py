"""Look for objects that change unseen: makes one of every class of a module, calls its methods, and compares.

Each class is tried in a process of its own, which ends after some seconds: a method may wait, or print, or end it.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from nbaccel.namespace.inventory import Inventory

_LIMIT_S = 4
_LEFT_OUT = (
    *("input", "exec", "serve", "join", "wait", "acquire", "get", "interact", "cmdloop", "run", "mainloop", "fork"),
    *("kill", "terminate", "exit", "quit", "close", "shutdown", "abort", "raise", "fileno", "breakpoint", "set_trace"),
)
"""Beginnings of methods that wait, or end something."""

_ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (1,), ("a",), (b"a",), ("a", "b"))
_LOOKS: tuple[Callable[[Any], Any], ...] = (
    *(pickle.dumps, repr, len, lambda one: dict(vars(one))),
    *(lambda one: one.getvalue(), lambda one: one.tell(), lambda one: one.qsize()),
)


def unseen(modules: list[str]) -> set[str]:
    """Return the classes of which a method changes an object, and nobody would say it."""
    return {found for name in modules for kind in _classes(name) for found in _tried(kind)}


def _classes(name: str) -> Iterator[type]:
    try:
        module = importlib.import_module(name)
    except Exception:  # of another platform
        return
    for kind in list(vars(module).values()):
        is_own = isinstance(kind, type) and str(kind.__module__).partition(".")[0] == name.partition(".")[0]
        if is_own and not kind.__name__.startswith("_") and not issubclass(kind, BaseException):
            yield kind


def _tried(kind: type) -> list[str]:
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of a test may use it
        signal.alarm(_LIMIT_S)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        with suppress(BaseException):
            os.write(writes, pickle.dumps([f"{kind.__module__}.{kind.__name__}"] if _changes_unseen(kind) else []))
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    found: list[str] = pickle.loads(data) if data else []
    return found


def _changes_unseen(kind: type) -> bool:
    for name in dir(kind):
        if name.startswith(("_", *_LEFT_OUT)) or not callable(getattr(kind, name, None)):
            continue
        for arguments in _ARGUMENTS:
            one = kind()
            _look(one)
            before = _look(one)
            if before != _look(one):
                break  # it answers differently each time
            inventory = Inventory(["one"], {"one": one})
            try:
                getattr(one, name)(*arguments)
            except Exception:
                continue
            is_seen = bool(list(inventory.changes()) or inventory.stayed or inventory.unlooked)
            if _look(one) != before and not is_seen:
                return True
            break
    return False


def _look(one: Any) -> list[Any]:
    found: list[Any] = []
    for look in _LOOKS:
        try:
            found.append(look(one))
        except BaseException:
            found.append(None)
    return found


if __name__ == "__main__":
    print(json.dumps(sorted(unseen(sys.argv[1:]))))
