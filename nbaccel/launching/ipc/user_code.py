"""Tell whose code a frame is: the user's, a library's, or ours, and what of the notebook is known by name. Used in the
kernel and in ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any

from nbaccel.base.notices import is_users

__all__ = [
    "ASK",
    "DEFINED",
    "by_reference_of",
    "cell_name",
    "is_users",
    "new_main",
    "question_path",
    "reloader",
    "stack_path",
]

is_users("")  # the folders of libraries are looked up now: the handler of a signal may ask next


def reloader() -> Any:
    """Return the magics of IPython's ``%autoreload`` if it is on in this process, else None."""
    shell = _shell()
    magics = None if shell is None else shell.magics_manager.registry.get("AutoreloadMagics")
    return magics if magics is not None and magics._reloader.enabled else None


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def cell_name(filename: str) -> str | None:
    """Return "Cell In[5]" for the file name under which the kernel compiled cell 5, None for any other file."""
    shell = _shell()
    if shell is None or ("ipykernel_" not in filename and "<ipython-input-" not in filename):
        return None
    numbers = getattr(shell.compile, "_filename_map", None)
    if numbers is not None:
        return f"Cell In[{numbers[filename]}]" if filename in numbers else None
    # IPython 7 keeps no such map: the name is made from the cell's text, so it can be made again.
    raw, transformed = shell.history_manager.input_hist_raw, shell.history_manager.input_hist_parsed
    for number in range(len(raw) - 1, 0, -1):
        if shell.compile.get_code_name(raw[number], transformed[number], number) == filename:
            return f"Cell In[{number}]"
    return None


ASK = signal.SIGURG
"""Signal that asks a rank for its stacks.

Its default action is to be ignored: if a program has removed the handler, it ends nothing.
"""


def stack_path(store_path: str, rank: int) -> str:
    """Return the path to which a rank writes its stacks: beside the file in which the ranks meet."""
    return os.path.join(os.path.dirname(store_path), f"stacks-{rank}")


def question_path(store_path: str, rank: int) -> str:
    """Return the FIFO through which a rank is asked for its stacks."""
    return os.path.join(os.path.dirname(store_path), f"questions-{rank}")


def new_main() -> dict[str, Any]:
    """Return the names of a new and empty `__main__`, in a rank that is no copy of the notebook."""
    main = types.ModuleType("__main__")
    namespace = vars(main)
    sys.modules["__main__"] = main
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is not None and shell is not None:
        namespace["get_ipython"] = ipython.get_ipython
        shell.user_ns = namespace
        shell.user_module = main
    return namespace


DEFINED = (type, types.FunctionType)
"""Kinds of objects that go by name: both sides have the notebook's classes and functions."""


def by_reference_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return names by id: classes and functions of the notebook, and the classes of its objects that no name leads to.

    Without this a class of the notebook would come back as a copy, and `type(model) is Net` would be False. A proxy
    counts as an object of its own class: asking it for its ``__class__`` runs code, which may fail or take long.
    """
    by_reference: dict[int, str] = {}
    for name, value in list(namespace.items()):
        kind = type(value)
        if kind.__module__ == "__main__":
            by_reference.setdefault(id(kind), f"type:{name}")
    for name, value in list(namespace.items()):
        if issubclass(type(value), DEFINED) and value.__module__ == "__main__":
            by_reference[id(value)] = f"name:{name}"
    return by_reference
