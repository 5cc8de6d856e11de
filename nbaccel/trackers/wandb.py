"""Weights & Biases: a run of its service, or of its offline folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nbaccel.tracking import GeneralTracker

__all__ = ["WeightsAndBiases"]


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
        import wandb

        self._run = wandb.init(**self._options)

    @property
    def tracker(self) -> Any:
        """The `wandb.Run`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._run.log(dict(values), step=step, **options)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
