"""Tracking: the destination of a run's numbers. The interface between `train`, which passes them, and trackers.

A tracker is an object on `GeneralTracker`: one of the project's (`features/trackers`), of another package, or the
user's own. It knows neither torch nor a process group, and opens nothing. Used anywhere.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

from nbaccel.base.events import Event, Metric
from nbaccel.base.world import World

__all__ = [
    "BlankTracker",
    "GeneralTracker",
    "on_main_process",
    "without_none",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class GeneralTracker(ABC):
    """Base of all trackers: stores the values given to `Accelerator.log`. Runs on rank 0.

    A tracker is also a `Sink`: as an outlet of events it stores every `Metric`.

    Attributes:
        name: The name for `get_tracker`.
        requires_logging_directory: The tracker writes files, so the Accelerator needs a ``project_dir``.
        main_process_only: False for a tracker that gets the values of every rank.
        package: The package that must be installed for it.
        pip_name: The name of the package for pip, if there is no extra ``nbaccel[<name>]``.
        numbers_steps: The tracker counts its rows itself. It gets the step that the program gave, or None.

    Example:
        >>> class Kept(GeneralTracker):
        ...     name = "kept"
        ...     def __init__(self) -> None:
        ...         self.rows: list[Any] = []
        ...     @property
        ...     def tracker(self) -> list[Any]:
        ...         return self.rows
        ...     def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        ...         self.rows.append((step, dict(values)))
        >>> kept = Kept()
        >>> kept.start()
        >>> kept.store_init_configuration({"lr": 0.1})  # nothing, where a tracker does not override it
        >>> kept(Metric({"loss": 0.5}, step=3))
        >>> kept.tracker
        [(3, {'loss': 0.5})]
        >>> kept.finish()
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True
    package: ClassVar[str | None] = None
    pip_name: ClassVar[str | None] = None
    numbers_steps: ClassVar[bool] = False

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """Return the object that does the work: the run of wandb, the writer of TensorBoard."""

    def start(self) -> None:  # noqa: B027 - many trackers have nothing to open
        """Open the destination. `init_trackers` calls it, in the process that will log."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:  # noqa: B027 - or no place for it
        """Store the configuration of the run.

        Args:
            values: Hyperparameters by name.
        """

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Store a row of values.

        Args:
            values: Values by name. Tensors have been read: those of one element are numbers, others are on the CPU.
            step: The step of the row.
            **options: What the program gave for this tracker as ``log_kwargs``.
        """

    def finish(self) -> None:  # noqa: B027 - or nothing to close
        """Write the rest of the data, and close. `end_training` calls it, or the end of Python."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Metric):
            self.log(without_none(event.values), event.step)

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the package of the tracker is installed, without importing it."""
        return cls.package is None or find_spec(cls.package) is not None


class BlankTracker(GeneralTracker):
    """The tracker that `get_tracker` returns on ranks that do not track: every attribute is a call that does nothing.

    Example:
        >>> BlankTracker().tracker.log_artifact("model.safetensors").wait()
        BlankTracker()
    """

    name = "blank"

    @classmethod
    def in_place_of(cls, tracker: GeneralTracker) -> Self:
        """Return a blank tracker that is found by the name of `tracker`.

        Args:
            tracker: The tracker of another rank.
        """
        blank = cls()
        blank.name = tracker.name
        return blank

    @property
    def tracker(self) -> BlankTracker:
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols such as pickle and copy ask for these
        return BlankTracker()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return "BlankTracker()"


def on_main_process(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Return a method as one that runs on rank 0 and returns None elsewhere; a decorator for the program's own
    trackers.

    Args:
        function: A method of a tracker.

    Example:
        >>> class Printed:
        ...     @on_main_process
        ...     def log(self, values: dict[str, float]) -> None:
        ...         print(values)
        >>> Printed().log({"loss": 0.5})
        {'loss': 0.5}
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        return function(*args, **kwargs) if World.from_env().is_main_process else None

    return wrapped


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` as a tracker gets them: without those that are None.

    Args:
        values: What was logged, by name.

    Example:
        >>> without_none({"loss": 0.5, "ema_decay": None})
        {'loss': 0.5}
    """
    return {name: value for name, value in values.items() if value is not None}
