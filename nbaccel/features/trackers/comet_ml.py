"""Comet tracker: stores a run as an experiment of its service, or of its offline folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

from nbaccel.base.tracking import GeneralTracker

__all__ = ["Comet"]


class Comet(GeneralTracker):
    """A tracker that keeps an experiment of Comet.

    A number becomes a metric, a mapping of numbers several metrics; anything else is kept as text. The experiment is
    `writer`, as in Accelerate.

    Args:
        project_name: The project of the experiment.
        logging_dir: Not used.
        **options: Options of `comet_ml.start`, given as ``init_kwargs={"comet_ml": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="comet_ml")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "comet_ml"
    package = pip_name = "comet_ml"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.run_name = project_name
        self._options = {"project_name": project_name, **options}
        self.writer: Any = None

    def start(self) -> None:
        import comet_ml

        self.writer = comet_ml.start(**self._options)

    @property
    def tracker(self) -> Any:
        """The experiment of `comet_ml`."""
        return self.writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.writer.log_parameters(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Number):
                self.writer.log_metric(name, value, step=step, **options)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(dict(value), step=step, **options)
            else:
                self.writer.log_other(name, value, **options)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.end()
