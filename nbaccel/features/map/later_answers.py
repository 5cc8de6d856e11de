"""LaterAnswers: the answers of a map that runs in the background, for whoever reads them later. In the kernel.

It reads like the `Answers` that it becomes: its length, an item, a loop over it wait for the end of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nbaccel.base.notices import briefly
from nbaccel.base.short_tracebacks import without_our_frames
from nbaccel.features.map import Answers, Failed

__all__ = ["FinishedMap", "LaterAnswers", "RunningMap"]


class RunningMap(Protocol):
    """A map that is awaited; a `BackgroundRun`, or a `FinishedMap`."""

    @property
    def is_over(self) -> bool: ...

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, once it is over."""

    def wait(self) -> bool:
        """Wait until it is over; return False if an interrupt ended the wait."""

    def stop(self) -> None: ...

    def conclude(self) -> Any:
        """Return the answers of a map that is over, or raise its error."""


class FinishedMap:
    """A map that was over before anything was started.

    Args:
        words: How it ended.
    """

    is_over = True
    error = None

    def __init__(self, answers: Answers, words: str) -> None:
        self._answers = answers
        self._words = words

    def wait(self) -> bool:
        return True

    def stop(self) -> None:
        """Do nothing."""

    def conclude(self) -> Answers:
        return self._answers

    def __str__(self) -> str:
        return self._words


class LaterAnswers(Answers):
    """The answers of ``nbaccel.map(..., background=True)``: whatever reads them waits for the end of the map.

    An interrupt ends the waiting, and not the map. Where the map has failed, or was stopped, reading raises its error.
    Its text (`str`, or the name alone in a cell) says how the map goes, without waiting.

    Args:
        path: The file or folder that will hold the answers; None for answers in memory.
    """

    def __init__(self, run: RunningMap, path: Path | None) -> None:
        super().__init__(_Awaited(self.wait), path)
        self._run = run

    @property
    def is_over(self) -> bool:
        """True once the map has ended, in any way."""
        return self._run.is_over

    @without_our_frames
    def wait(self) -> Answers:
        """Wait until the map is over; return its answers.

        Raises:
            The error that ended the map, as `nbaccel.map` raises it.
            KeyboardInterrupt: The map was stopped, or the waiting was interrupted; the text says which.
        """
        if not self._run.wait():
            raise briefly(
                KeyboardInterrupt(f"the waiting was interrupted; {self._run}. wait() waits again, stop() ends the map.")
            )
        answers: Answers = self._run.conclude()
        return answers

    def stop(self) -> None:
        """Ask the map to end when the calls under way have returned; a second call ends it now. Does not wait."""
        if not self.is_over:
            self._run.stop()

    @property
    def failed(self) -> list[Failed]:
        return self.wait().failed

    def __str__(self) -> str:
        return str(self._run)

    def __repr__(self) -> str:
        # An error comes where the answers are used, not where their name is shown.
        return repr(self.wait()) if self.is_over and self._run.error is None else f"<{self._run}>"

    def __reduce__(self) -> Any:
        return _same, (self.wait(),)


class _Awaited(Sequence[Any]):
    """The values of answers that have to be awaited."""

    def __init__(self, wait: Callable[[], Answers]) -> None:
        self._wait = wait

    def __len__(self) -> int:
        return len(self._wait())

    def __getitem__(self, number: Any) -> Any:
        return self._wait()[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wait())


def _same(answers: Answers) -> Answers:
    return answers
