"""The main thread of a forked child, as CPython knows it, for signals. Used before a fork, and in the child.

A child that some other thread has forked has that one for its main thread. CPython records its identity
(``PyOS_AfterFork_Child``). But from Python 3.13 on a signal wakes a thread state (``_PyEval_SignalReceived``), by a
pointer in the runtime that is written once, when the interpreter begins: in such a child it is the state of a thread
that is not there. A loop in Python hears no interrupt then, until it waits for something.
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
"""How many words of the runtime are looked at, which has some hundred times as many; it is number 83 in Python 3.13."""


@dataclass(frozen=True, slots=True)
class MainThread:
    """Where the runtime has it.  address: of two words, the identity and the pointer.  state: what the pointer is."""

    address: int
    state: int

    @classmethod
    def find(cls) -> MainThread | None:
        """Before a fork. None before Python 3.13, and where the runtime is laid out in another way."""
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
        """In the child, by the thread that is there: have signals wake it."""
        words = (ctypes.c_size_t * 2).from_address(self.address)
        if list(words) == [threading.get_ident(), self.state]:  # the identity is CPython's work
            words[1] = ctypes.PYFUNCTYPE(ctypes.c_size_t)(("PyThreadState_Get", ctypes.pythonapi))()


def _thread_states() -> set[int]:
    """The states of all threads of the main interpreter."""
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
