"""Run: the result of a finished `launch`, or of a cell that ran in ranks.

Pure data and pictures of it; in the kernel. What draws is imported when a picture is asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbaccel.display.history import History
from nbaccel.display.run_view import RunView
from nbaccel.display.series import Line
from nbaccel.display.summary import RUNNING, RunFacts, RunState, line, text
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.launching.ipc.spec import Start
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.namespace.nbytes import size_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nbaccel.features.panel.figure import Bundle, Picture

__all__ = [
    "NO_ORIGIN",
    "Run",
    "RunOrigin",
    "record_of",
    "seen",
]

_MOST_BYTES, _MOST_BYTES_LATER = 1_000_000, 10_000
"""Largest size of a value that is kept of the latest runs in `nbaccel.runs`, and of those before."""


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The choices with which a run was started.

    Args:
        flags: As they were typed, "-n 2 --seed 1", or as the arguments of `launch`.
        choices: Every choice that is not the default by its name, also those of ``%accelerate config``, as a text.
        seed: The shared seed, also one that was drawn; None if nothing was seeded.
        began: When it began, in seconds since 1970; 0 if unknown.
        is_earlier: The run is of another kernel and was read from the file of ``--keep-runs``.
    """

    flags: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    began: float = 0.0
    is_earlier: bool = False


NO_ORIGIN = RunOrigin()


@dataclass(slots=True, repr=False)
class Run:
    """A finished run, as numbers, texts and pictures.

    `launch` returns one. `nbaccel.last_run` is the last run in this notebook, however it was started and however it
    ended: a ``%%accelerate`` cell (its value is that of its last expression), `launch` or `notebook_launcher`. It is
    None before the first run. The run stored there keeps nothing else alive: it holds plain data up to 1 MB of the
    values, without tensors (any other value is None), and the text of an error.

        run = nbaccel.last_run
        run                                  # as the last line of a cell: its panel
        run.figure("loss", "acc")            # as the last line of a cell: its curves
        run.curves["loss"].mean              # (2.31, 2.27, ...): the mean over ranks, at the steps in .step
        run.history.to_csv("curves.csv")
        print(run.text)

    Args:
        values: What the function returned, by rank; None for a rank that failed.
        history: The curves of all ranks, and in `history.rows` the values that rank 0 logged.
        error: The error of the run; None if there was none.
        start_method: How the ranks started.
        start_reason: Why they started so.
        log_path: The file with everything that the ranks printed. It exists as long as this process; empty for a run in
            this process.
        seconds: The wall time from the start of the first rank to the end of the last, with all attempts.
        restarts: A line for each time that memory ran out and the run was started again. `values` are of the last
            attempt.
        stopped: A line about the end at the time limit of the run's Accelerator; empty if it did not end so.
        checkpoint: The newest checkpoint that it wrote; empty if it wrote none.
        facts, state: The texts of the panel beside its numbers.
        config: The values that a sweep gave this run, by name; empty otherwise.
        origin: Its flags, its seed, and when it began.
        number: Its number in `nbaccel.runs`, from 1; 0 for a run that is not in there.
        goes_on_from: The number of the run whose checkpoint it resumed; 0 if it began anew, or that run is not known.
        runs: The runs of a sweep, in the order of its configurations; empty for a single run.

    Example:
        >>> from nbaccel.base.events import Metric
        >>> history = History(1)
        >>> for step in range(3):
        ...     history.feed(0, 0.1 * step, Metric({"acc": step / 4}, step))
        >>> run = Run([None], history, None, "fork", "", "", seconds=0.5)
        >>> run, run.curves["acc"].mean
        (<Run: done in 0.5 s, 3 steps, acc 0.5000>, (0.0, 0.25, 0.5))
    """

    values: list[Any]
    history: History
    error: BaseException | None
    start_method: str
    start_reason: str
    log_path: str
    seconds: float
    restarts: list[str] = field(default_factory=list)
    stopped: str = ""
    checkpoint: str = ""
    facts: RunFacts = field(default_factory=RunFacts)
    state: RunState | None = None
    config: dict[str, Any] = field(default_factory=dict)
    origin: RunOrigin = field(default_factory=RunOrigin)
    number: int = 0
    goes_on_from: int = 0
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.state is None:
            self.state = self._ended()

    @property
    def value(self) -> Any:
        """Return the value of rank 0; for a cell the value of its last expression."""
        return self.values[0]

    @property
    def curves(self) -> dict[str, Line]:
        """Return all curves of the last phase by name, as means over ranks; `history.curve` has those of one rank."""
        return {name: self.history.curve(name) for name in self.history.names}

    @property
    def text(self) -> str:
        """Return the run in words, with every number; the output of the ranks is in the file at `log_path`."""
        return text(self.history, self.facts, self.seconds, self._state)

    def figure(self, *names: str, size: tuple[float, float] | None = None) -> Figure:
        """Return a new `matplotlib.figure.Figure` of the run, on white: curves by rank and their mean, memory, speed.

        As the last line of a cell it is shown. `figure.savefig("run.pdf")` saves it.

        Args:
            *names: The curves to draw; by default the loss.
            size: Width and height in inches.

        Raises:
            KeyError: No curve has that name.
            FeatureMissing: This installation lacks what draws.

        Example:
            >>> nbaccel.last_run.figure("loss").savefig("loss.svg")  # doctest: +SKIP
        """
        figure: Figure = feature("Run.figure")(self.history, self.facts, names=names or None, size=size)
        return figure

    def plot(self, *names: str) -> Picture:
        """Return the picture that a cell keeps of its run. It is readable in all themes.

        Args:
            *names: The curves to draw; by default those of the cell.

        Raises:
            KeyError: No curve has that name.
            FeatureMissing: This installation lacks what draws.

        Example:
            >>> run = nbaccel.launch(train, 2)  # doctest: +SKIP
            >>> run.plot("loss", "accuracy")  # doctest: +SKIP
        """
        picture: Picture = feature("Run.plot")(self.history, self.facts, self.seconds, self._state, names or None)
        return picture

    def shown(self) -> Bundle:
        """Return the output of the run that a cell keeps, as data and metadata by MIME type: a picture, or a panel.

        Example:
            >>> IPython.display.display(nbaccel.last_run.shown(), raw=True)  # doctest: +SKIP
        """
        if self.history.has_curves:
            return self.plot().bundle()
        return {"text/plain": self.text, "text/html": self.panel}, {}

    def in_a_line(self) -> str:
        """Return how the run ended, with its last numbers, in one line.

        Example:
            >>> print(nbaccel.last_run.in_a_line())  # doctest: +SKIP
        """
        return line(self.history, self.facts, self.seconds, self._state)

    def light(self) -> Run:
        """Return the same run without anything that could keep a frame, a module or a tensor alive.

        Example:
            >>> runs = [run.light() for run in nbaccel.runs]  # doctest: +SKIP
        """
        return replace(
            self,
            values=[light_value(value) for value in self.values],
            error=_text_alone(self.error),
            config={name: light_value(value) for name, value in self.config.items()},
            runs=[run.light() for run in self.runs],
        )

    def thinned(self) -> Run:
        """Return the same run in some 250 kB at most: coarser curves, and only short values.

        Example:
            >>> small = nbaccel.last_run.thinned()  # doctest: +SKIP
        """
        return replace(
            self,
            values=[value if size_of(value) <= _MOST_BYTES_LATER else None for value in self.values],
            history=self.history.thinned(),
            config={name: value for name, value in self.config.items() if size_of(value) <= _MOST_BYTES_LATER},
            runs=[run.thinned() for run in self.runs],
        )

    def __repr__(self) -> str:
        title = "" if self.facts == RunFacts() else f"{self.facts.title}, "
        return f"<Run: {title}{self.in_a_line()}>"

    def _repr_html_(self) -> str | None:
        try:
            return self.panel
        except FeatureMissing:  # a notebook shows the line instead
            return None

    @property
    def panel(self) -> str:
        """Return the panel at the end of the run, as HTML with its style sheet."""
        html: str = feature("Run.panel")(self.history, self.facts).bundle(self.seconds, self._state)["text/html"]
        return html

    @property
    def ending(self) -> RunState:
        """Return how the run ended, in one word and in a sentence."""
        return self._state

    @property
    def _state(self) -> RunState:
        return self._ended() if self.state is None else self.state

    def _ended(self) -> RunState:
        """Return how the run ended, as far as it is known here."""
        history, error = self.history, self.error
        has_stopped = bool(self.stopped) or isinstance(error, KeyboardInterrupt | TimeoutError)
        word = "stopped" if has_stopped else "done" if error is None else "failed"
        why = f"{type(error).__name__}: {error}".partition("\n")[0] if word == "failed" else ""
        return RunState.ended(word, self.seconds, history.steps, why, history.attempts, history.kept_steps)


def record_of(
    ended: RankResults,
    start: Start,
    error: BaseException | None,
    log_path: str,
    checkpoint: str,
    restarts: Sequence[str] = (),
) -> Run:
    """Return the record of a run whose ranks have ended, without values yet.

    Args:
        ended: The end of the last attempt.
        error: That of the rank that failed, if one did.
    """
    ended.checkpoint = checkpoint
    size = len(ended.reports)
    return Run(
        [None] * size,
        _unseen(size),
        error,
        start.method,
        start.reason,
        log_path,
        ended.seconds,
        list(restarts),
        checkpoint=checkpoint,
        state=RUNNING,  # until it is `seen`
    )


@functools.cache
def _unseen(size: int) -> History:
    """Return the history of a run until it is `seen`: an empty one, which nothing feeds."""
    return History(size)


def seen(run: Run, shown: RunView) -> None:
    """Complete the record of a run that has just ended by what its view has gathered."""
    run.history, run.facts, run.seconds, run.state = shown.history, shown.facts, shown.elapsed_s, None


def light_value(value: Any) -> Any:
    """Return a copy of `value` if it is plain data of 1 MB at most, else None.

    Example:
        >>> light_value({"loss": [0.5, 0.25]}), light_value(object()), light_value([object()])
        ({'loss': [0.5, 0.25]}, None, None)
    """
    if size_of(value) > _MOST_BYTES:
        return None
    try:
        return _copied(value)
    except (_NotPlain, RecursionError):
        return None


class _NotPlain(Exception):
    """Raised for an object whose contents are unknown."""


def _copied(value: Any) -> Any:
    """Return a copy with new containers, since their owner may put a tensor into them later."""
    kind = type(value)
    if kind in (type(None), bool, int, float, complex, str, bytes):
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(_copied(part) for part in value)
    if kind is dict:
        return {_copied(key): _copied(part) for key, part in value.items()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or issubclass(kind, numpy.generic)) and not value.dtype.hasobject:
        return value.copy()
    raise _NotPlain


def _text_alone(error: BaseException | None) -> BaseException | None:
    """Return an exception of the same class, made of the text alone if possible, with the same text and no frame."""
    if error is None:
        return None
    words = str(error)
    try:
        same = type(error)(words)
        if str(same) == words:
            return same
    except Exception:  # its class takes other arguments
        pass
    return RuntimeError(f"{type(error).__name__}: {words}")
