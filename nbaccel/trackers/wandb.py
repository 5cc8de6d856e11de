"""Weights & Biases, and the libraries with its interface: runs of a service, or of a folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nbaccel.tracking import GeneralTracker

__all__ = ["SwanLab", "Trackio", "WeightsAndBiases"]


class WeightsAndBiases(GeneralTracker):
    """A run of the project ``project_name``; ``init_kwargs={"wandb": {…}}`` goes to `wandb.init`.

    Its files go where wandb puts them: WANDB_DIR, the current folder, or ``init_kwargs={"wandb": {"dir": …}}``.
    Its rows are numbered by wandb unless the program gives a step: wandb drops rows whose step is not above the
    one before.
    """

    name = "wandb"
    package = "wandb"
    numbers_steps = True

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._options = {"project": project_name, **options}
        self._run: Any = None

    def start(self) -> None:
        self._run = self._library().init(**self._options)

    @property
    def tracker(self) -> Any:
        """The run, a `wandb.Run`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._run.log(dict(values), step=step, **options)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _library(self) -> Any:
        return import_module(str(self.package))


class Trackio(WeightsAndBiases):
    """A run of the project ``project_name`` on this machine; ``init_kwargs={"trackio": {…}}`` goes to `trackio.init`.

    `trackio show` shows it.
    """

    name = "trackio"
    package = pip_name = "trackio"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._library().config.update(dict(values), allow_val_change=True)


class SwanLab(WeightsAndBiases):
    """A run of the project ``project_name``; ``init_kwargs={"swanlab": {…}}`` goes to `swanlab.init`."""

    name = "swanlab"
    package = pip_name = "swanlab"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._library().config.update(dict(values), allow_val_change=True)
