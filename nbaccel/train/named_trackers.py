"""Trackers by their names: the project's own, and those that other packages declare. Runs in ranks and in scripts.

The table of features names our own; other packages add theirs as entry points of the group `nbaccel_trackers`, which
are asked for any other name.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points

from nbaccel.base.tracking import GeneralTracker
from nbaccel.features import feature, named

__all__ = ["ACCELERATES_TRACKERS", "LoggerType", "find_tracker", "tracker_names"]

_OURS, _GROUP = "log_with=", "nbaccel_trackers"

ACCELERATES_TRACKERS = {
    "AimTracker": "aim",
    "ClearMLTracker": "clearml",
    "CometMLTracker": "comet_ml",
    "DVCLiveTracker": "dvclive",
    "MLflowTracker": "mlflow",
    "SwanLabTracker": "swanlab",
    "TensorBoardTracker": "tensorboard",
    "TrackioTracker": "trackio",
    "WandBTracker": "wandb",
}
"""Accelerate's class names of trackers that exist here too, with nbaccel's names."""


def tracker_names() -> list[str]:
    """Return the names that `find_tracker` knows, of every installed package.

    Example:
        >>> "csv" in tracker_names()
        True
    """
    return sorted({*named(_OURS), *_of_others()})


def find_tracker(name: str) -> type[GeneralTracker]:
    """Return the class of the tracker called `name`.

    It is made with ``(project_name, logging_dir, **init_kwargs)``.

    Args:
        name: One of `tracker_names()`.

    Raises:
        ValueError: No tracker has that name.
        FeatureMissing: It is ours, and its folder is not there.

    Example:
        >>> find_tracker("csv").__name__
        'Csv'
    """
    if name in named(_OURS):
        kind: type[GeneralTracker] = feature(f"{_OURS}{name}")
        return kind
    if (entry := _of_others().get(name)) is None:
        raise ValueError(
            f"log_with must be one of {', '.join(map(repr, [LoggerType.ALL.value, *tracker_names()]))}, or an "
            f"object on nbaccel.tracking.GeneralTracker; got {name!r}."
        )
    kind = entry.load()
    return kind


def _of_others() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


class LoggerType(StrEnum):
    """Names for ``Accelerator(log_with=…)``; plain strings work as well.

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(log_with=[LoggerType.CSV, "jsonl"], project_dir="runs")
    """

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    CSV = "csv"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"
