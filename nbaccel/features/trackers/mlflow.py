"""MLflow tracker: stores a run of an experiment, in a folder or on a server. Runs on rank 0."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

from nbaccel.base.tracking import GeneralTracker
from nbaccel.features.trackers.leftout import LeftOut

__all__ = ["MLflow"]

_PARAMS_PER_CALL = 100
_PARAM_LENGTH = 6000
"""Limits of an MLflow server: mlflow.utils.validation, MAX_PARAMS_TAGS_PER_BATCH and MAX_PARAM_VAL_LENGTH."""


class MLflow(GeneralTracker):
    """A tracker that keeps a run of MLflow, where MLFLOW_TRACKING_URI or `mlflow.set_tracking_uri` say.

    Only numbers are metrics; other values are left out, and one warning names them. The run is `active_run`, as in
    Accelerate.

    Args:
        project_name: The experiment of the run.
        logging_dir: Not used.
        **options: Options of `mlflow.start_run`, given as ``init_kwargs={"mlflow": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="mlflow")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "mlflow"
    package = "mlflow"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.experiment_name = project_name
        self._options = options
        self.active_run: Any = None
        self._left_out = LeftOut(self.name, "MLflow keeps numbers only", "mlflow's own log_text, log_figure")

    def start(self) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(self.experiment_name)
        self.active_run = mlflow.start_run(**self._options)

    @property
    def tracker(self) -> Any:
        """The `mlflow.ActiveRun`."""
        return self.active_run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        parameters = iter({name: str(value)[:_PARAM_LENGTH] for name, value in values.items()}.items())
        while some := dict(itertools.islice(parameters, _PARAMS_PER_CALL)):
            self._mlflow.log_params(some)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        kept = self._left_out.rest(values, lambda value: isinstance(value, Number))
        numbers = {name: float(value) for name, value in kept.items()}
        self._mlflow.log_metrics(numbers, step=step, **options)

    def log_figure(self, figure: Any, artifact_file: str, **options: Any) -> None:
        """Keep a figure of matplotlib or plotly as a file of the run.

        Args:
            figure: The figure.
            artifact_file: The name of the file.
            **options: Options of `mlflow.log_figure`.

        Example:
            >>> tracker = accelerator.get_tracker("mlflow")  # doctest: +SKIP
            >>> tracker.log_figure(figure, "confusion.png")  # doctest: +SKIP
        """
        self._mlflow.log_figure(figure=figure, artifact_file=artifact_file, **options)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file in the run.

        Args:
            local_path: The file.
            artifact_path: A folder of the run, by default its root.

        Example:
            >>> tracker = accelerator.get_tracker("mlflow")  # doctest: +SKIP
            >>> tracker.log_artifact("confusion.png")  # doctest: +SKIP
        """
        self._mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep all files of a folder in the run.

        Args:
            local_dir: The folder.
            artifact_path: A folder of the run, by default its root.

        Example:
            >>> tracker = accelerator.get_tracker("mlflow")  # doctest: +SKIP
            >>> tracker.log_artifacts("figures")  # doctest: +SKIP
        """
        self._mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def finish(self) -> None:
        if self.active_run is not None:
            self._mlflow.end_run()
