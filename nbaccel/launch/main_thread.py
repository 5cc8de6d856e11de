"""The main thread of a forked child, as CPython knows it, for signals. Used before a fork, and in the child.

In a child, the thread that forked it is the main thread. CPython records its identity (``PyOS_AfterFork_Child``). But
from Python 3.13 on a signal wakes a thread state (``_PyEval_SignalReceived``), by a pointer in the runtime that is
written once, when the interpreter begins. If another thread forked the child, this is the state of a thread that does
not exist there. A loop in Python then receives no interrupt until it waits for something.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from dataclasses import dataclass

__all__ = ["MainThread"]

_WORD = ctypes.sizeof(ctypes.c_size_t)

_WORDS = 4096 // _WORD
"""Number of words of the runtime that are searched; it has some hundred times as many.

The pointer is word 83 in Python 3.13.
"""


@dataclass(frozen=True, slots=True)
class MainThread:
    """The main thread's place.  address: of two words, identity and pointer.  state: the value of the pointer."""

    address: int
    state: int

    @classmethod
    def find(cls) -> MainThread | None:
        """Find the place, before a fork. None before Python 3.13, and if the runtime has another layout."""
        if sys.version_info < (3, 13):
            return None
        try:
            begin, states = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")), _thread_states()
        except (ValueError, AttributeError):  # a Python that does not export them
            return None
        words = list((ctypes.c_size_t * _WORDS).from_address(begin))
        identity = threading.main_thread().ident
        found = [
            number
            for number, (word, after) in enumerate(itertools.pairwise(words))
            if word == identity and after in states
        ]
        return cls(begin + found[0] * _WORD, words[found[0] + 1]) if len(found) == 1 else None

    def become(self) -> None:
        """Make signals wake the calling thread; called in the child by its only thread."""
        words = (ctypes.c_size_t * 2).from_address(self.address)
        if list(words) == [threading.get_ident(), self.state]:  # CPython has set the identity
            words[1] = ctypes.PYFUNCTYPE(ctypes.c_size_t)(("PyThreadState_Get", ctypes.pythonapi))()


def _thread_states() -> set[int]:
    """Return the states of all threads of the main interpreter."""
    main = ctypes.PYFUNCTYPE(ctypes.c_size_t)(("PyInterpreterState_Main", ctypes.pythonapi))
    function = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)
    first, following = (
        function((name, ctypes.pythonapi)) for name in ("PyInterpreterState_ThreadHead", "PyThreadState_Next")
    )
    states: set[int] = set()
    state = first(main())
    while state:
        states.add(state)
        state = following(state)
    return states
