"""Prompting: passes questions of a rank's debugger to the person at the notebook. Runs in the kernel's main thread.

It uses the kernel's own `input`, so the person sees what the front end offers for it. The ranks wait meanwhile, and so
does the loop that watches them: the limits of the run do not count that time.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from nbaccel.launch.member import Member

__all__ = ["Prompting"]

_NEWS = (
    "rank {rank} is in the debugger, and the others wait for it: c goes on, q ends the run. Limits of time do not "
    "count this; a collective of the others gives up when its own timeout is over, by default 30 minutes."
)


class Prompting:
    """Asks for one run.  notice: shows one line of the project to the user."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._has_told = False

    def answer(self, member: Member, prompt: str, *, is_open: bool, press: Callable[[], None]) -> float:
        """Ask, and send the answer to the rank; return the seconds that it took.

        is_open: the run goes on; otherwise no question is asked, and the rank is told so.
        press: called when the user interrupts instead of answering.
        """
        began = time.monotonic()
        typed: str | None = None
        if is_open:
            try:
                typed = _typed(f"[rank {member.rank}] {prompt}")
            except (KeyboardInterrupt, EOFError):
                press()
        with contextlib.suppress(OSError):  # a rank that died meanwhile needs no answer
            member.channel.send({"op": "answer", "text": typed, "is_over": not is_open})
        return time.monotonic() - began

    def announce(self, member: Member) -> None:
        """Explain once what a debugger means for the run."""
        if not self._has_told:
            self._has_told = True
            self._notice(_NEWS.format(rank=member.rank))


def _typed(prompt: str) -> str:
    """Return the user's input. Meanwhile SIGINT raises again, because nothing else would end this wait."""
    previous = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
