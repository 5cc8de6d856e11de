"""CallingThread: what belongs to the thread that runs a cell, and to no other. Used in the kernel, and in its forks.

A rank is forked by a thread that was made for it (`ForkStart`), and a child has only that thread. So the values of the
notebook's own thread would be missing in it, without a word: the precision of `decimal` and what NumPy does about
divisions by zero are context variables; MLflow has its active run, and SQLAlchemy a scoped session, in a
`threading.local`. In ranks of a clean process `Arithmetic` sets the first two; the others cannot be sent.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.launching.ipc.thread_flags import OF_A_THREAD, read_flags, set_flags

__all__ = ["CallingThread"]

_KEY = "thread.local."
"""Begin of the keys under which a thread state has its values of `threading.local`, until Python 3.12."""


@dataclass(frozen=True, slots=True)
class CallingThread:
    """The values of one thread.

    Args:
        context: The context variables of the thread.
        torch_flags: Torch's switches of one thread.
        local_values: Values of each `threading.local`, by a key; none from Python 3.13 on, whose threads do not show
            them.
    """

    context: contextvars.Context
    torch_flags: Mapping[str, Any]
    local_values: dict[str, Any]

    @classmethod
    def capture(cls) -> CallingThread:
        """Return the values of the thread that calls it."""
        here = _values_of_this_thread() if sys.version_info < (3, 13) else {}
        not_ours = {_key(each) for each in _of_the_kernel()}
        values = {key: value for key, value in here.items() if str(key).startswith(_KEY) and key not in not_ours}
        return cls(contextvars.copy_context(), read_flags(OF_A_THREAD), values)

    def enter(self) -> None:
        """Give the thread that calls it these values, and the processes that it forks. It runs in `context` already.

        Of a rank's frames this leaves none, see `ForkStart.start`.
        """
        if self.local_values:
            _values_of_this_thread().update(self.local_values)
        set_flags(OF_A_THREAD, self.torch_flags)

    @staticmethod
    @contextlib.contextmanager
    def kept_local_values() -> Iterator[None]:
        """Keep this thread's values of `threading.local` alive in ranks, in which only the forking thread exists.

        CPython drops the values of the other threads in a forked child. Their destructors would run in every rank, and
        close, tell a server, or delete what the kernel still uses; and each freed object is a page to be copied.
        """
        kept: list[Any] = [_values_of_this_thread()]
        # From Python 3.13 on, values live as long as a watchdog of the thread, to which each `local` has a weak
        # reference.
        probe = threading.local()
        probe.here = True
        held = (part for part in gc.get_referents(probe) if isinstance(part, (set, dict)))
        kept += [reference() for part in held for reference in part if isinstance(reference, weakref.ref)]
        try:
            yield
        finally:
            del kept


_thread_dict = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))
"""Made once: each makes a class."""


def _values_of_this_thread() -> dict[Any, Any]:
    found: dict[Any, Any] = ctypes.cast(_thread_dict(), ctypes.py_object).value
    return found


def _key(local: Any) -> str:
    return f"{_KEY}{id(local):#x}"


def _of_the_kernel() -> Iterator[Any]:
    """Yield the `threading.local` of the kernel's event loop, which runs in the kernel alone."""
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    if (local := getattr(policy, "_local", None)) is not None:
        yield local
