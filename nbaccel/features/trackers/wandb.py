"""Trackers of Weights & Biases, and of libraries with its interface: runs of a service, or of a folder. Rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from nbaccel.base.tracking import GeneralTracker

__all__ = ["SwanLab", "Trackio", "WeightsAndBiases"]


class WeightsAndBiases(GeneralTracker):
    """A tracker that keeps a run of Weights & Biases.

    wandb numbers the rows unless the program gives a step, since it drops rows whose step is not above the one before.
    The files go to WANDB_DIR, else to the working directory, or where the option ``dir`` says. The run is `run`, as in
    Accelerate.

    Args:
        project_name: The project of the run.
        logging_dir: Not used.
        **options: Options of `wandb.init`, given as ``init_kwargs={"wandb": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="wandb")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "wandb"
    package = "wandb"
    numbers_steps = True

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self.run_name = project_name
        self._options = {"project": project_name, **options}
        self.run: Any = None

    def start(self) -> None:
        self.run = self._library().init(**self._options)

    @property
    def tracker(self) -> Any:
        """The run, a `wandb.Run`."""
        return self.run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.run.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep pictures.

        Args:
            values: Lists of pictures by name, each an array or a PIL image.
            step: The step of the pictures.
            **options: Options of ``wandb.Run.log``.

        Example:
            >>> tracker = accelerator.get_tracker("wandb")  # doctest: +SKIP
            >>> tracker.log_images({"digits": images}, step=0)  # doctest: +SKIP
        """
        kind = self._library().Image
        self.log({name: [kind(image) for image in images] for name, images in values.items()}, step, **options)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Keep a table: rows with the names of their columns, or a DataFrame.

        Args:
            table_name: The name of the table.
            columns: The names of the columns.
            data: The rows.
            dataframe: A DataFrame, instead of rows.
            step: The step of the table.
            **options: Options of ``wandb.Run.log``.

        Example:
            >>> tracker = accelerator.get_tracker("wandb")  # doctest: +SKIP
            >>> tracker.log_table("predictions", columns=["text", "label"], data=[["good", 1]])  # doctest: +SKIP
        """
        table = self._library().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **options)

    def _library(self) -> Any:
        return import_module(str(self.package))


class Trackio(WeightsAndBiases):
    """A tracker that keeps a run of trackio on this machine. `trackio show` shows it.

    Args:
        project_name: The project of the run.
        logging_dir: Not used.
        **options: Options of `trackio.init`, given as ``init_kwargs={"trackio": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="trackio")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "trackio"
    package = pip_name = "trackio"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._library().config.update(dict(values), allow_val_change=True)


class SwanLab(WeightsAndBiases):
    """A tracker that keeps a run of SwanLab.

    Args:
        project_name: The project of the run.
        logging_dir: Not used.
        **options: Options of `swanlab.init`, given as ``init_kwargs={"swanlab": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="swanlab")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "swanlab"
    package = pip_name = "swanlab"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._library().config.update(dict(values), allow_val_change=True)
