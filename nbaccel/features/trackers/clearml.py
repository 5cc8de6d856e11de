"""ClearML tracker: stores a run as a task of its server, or of its offline folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from nbaccel.base.tracking import GeneralTracker
from nbaccel.features.trackers.leftout import LeftOut

__all__ = ["ClearML"]

_SERIES = ("train", "eval", "test")
"""Prefixes of names, such as `eval_loss`, that become curves of one plot: that of `loss`."""


class ClearML(GeneralTracker):
    """A tracker that keeps a task of ClearML.

    A task that the program has made itself is used, and left open at the end. For other tasks the variables
    CLEARML_PROJECT and CLEARML_TASK give the names, if they are set. Only numbers are stored; other values are left
    out, and a warning names them. The task is `task`, as in Accelerate.

    Args:
        project_name: The project of the task.
        logging_dir: Not used.
        **options: Options of `clearml.Task.init`, given as ``init_kwargs={"clearml": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="clearml")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "clearml"
    package = pip_name = "clearml"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        named = {
            "project_name": os.environ.get("CLEARML_PROJECT", project_name),
            "task_name": os.environ.get("CLEARML_TASK", project_name),
        }
        self._options = {**named, **options}
        self.task: Any = None
        self._is_ours = False
        self._left_out = LeftOut(self.name, "ClearML keeps numbers only", "its logger's report_text, report_image")

    def start(self) -> None:
        from clearml import Task

        self.task = Task.current_task()
        self._is_ours = self.task is None
        if self._is_ours:
            self.task = Task.init(**self._options)

    @property
    def tracker(self) -> Any:
        """The `clearml.Task`."""
        return self.task

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.task.connect_configuration(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        logger = self.task.get_logger()
        for name, value in self._left_out.rest(values, lambda value: isinstance(value, Number)).items():
            if step is None:
                logger.report_single_value(name=name, value=value, **options)
            else:
                logger.report_scalar(**_place(name), value=value, iteration=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep pictures.

        Args:
            values: By name an array or a PIL image.
            step: The step of the pictures.
            **options: Options of `clearml.Logger.report_image`.

        Example:
            >>> tracker = accelerator.get_tracker("clearml")  # doctest: +SKIP
            >>> tracker.log_images({"digits": images}, step=0)  # doctest: +SKIP
        """
        logger = self.task.get_logger()
        for name, image in values.items():
            logger.report_image(**_place(name), iteration=step, image=image, **options)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Keep a table: a DataFrame, or rows and the names of the columns.

        Args:
            table_name: The name of the table.
            columns: The names of the columns; without them the first row names them.
            data: The rows.
            dataframe: A DataFrame, instead of rows.
            step: The step of the table.
            **options: Options of `clearml.Logger.report_table`.

        Raises:
            ValueError: Neither rows nor a DataFrame were given.

        Example:
            >>> tracker = accelerator.get_tracker("clearml")  # doctest: +SKIP
            >>> tracker.log_table("predictions", columns=["text", "label"], data=[["good", 1]])  # doctest: +SKIP
        """
        if dataframe is None and data is None:
            raise ValueError("log_table() needs data=, a list of rows, or dataframe=")
        table = dataframe if dataframe is not None else [*([list(columns)] if columns else []), *(data or ())]
        self.task.get_logger().report_table(**_place(table_name), table_plot=table, iteration=step, **options)

    def finish(self) -> None:
        if self._is_ours:
            self.task.close()


def _place(name: str) -> dict[str, str]:
    """Return the plot and the series for the value called `name`.

    Example:
        >>> _place("eval_loss")
        {'title': 'loss', 'series': 'eval'}
    """
    beginning, _, rest = name.partition("_")
    title, series = (rest, beginning) if beginning in _SERIES and rest else (name, _SERIES[0])
    return {"title": title, "series": series}
