"""MLflow: a run of an experiment, in a folder or on a server. Runs on rank 0."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

from nbaccel.trackers.leftout import LeftOut
from nbaccel.tracking import GeneralTracker

__all__ = ["MLflow"]

_PARAMS_PER_CALL = 100
_PARAM_LENGTH = 6000
"""What an MLflow server takes: mlflow.utils.validation, MAX_PARAMS_TAGS_PER_BATCH and MAX_PARAM_VAL_LENGTH."""


class MLflow(GeneralTracker):
    """A run of the experiment ``project_name``; ``init_kwargs={"mlflow": {…}}`` goes to `mlflow.start_run`.

    It writes where MLFLOW_TRACKING_URI or `mlflow.set_tracking_uri` say. Only numbers are metrics there; other
    values are left out, and one warning names them.
    """

    name = "mlflow"
    package = "mlflow"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._project_name = project_name
        self._options = options
        self._run: Any = None
        self._left_out = LeftOut(self.name, "MLflow keeps numbers only", "mlflow's own log_text, log_figure")

    def start(self) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(self._project_name)
        self._run = mlflow.start_run(**self._options)

    @property
    def tracker(self) -> Any:
        """The `mlflow.ActiveRun`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        parameters = iter({name: str(value)[:_PARAM_LENGTH] for name, value in values.items()}.items())
        while some := dict(itertools.islice(parameters, _PARAMS_PER_CALL)):
            self._mlflow.log_params(some)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        kept = self._left_out.rest(values, lambda value: isinstance(value, Number))
        numbers = {name: float(value) for name, value in kept.items()}
        self._mlflow.log_metrics(numbers, step=step, **options)

    def finish(self) -> None:
        if self._run is not None:
            self._mlflow.end_run()
