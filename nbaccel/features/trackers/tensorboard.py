"""TensorBoard tracker: stores numbers, texts and images in event files. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

from nbaccel.base.tracking import GeneralTracker
from nbaccel.features.trackers.leftout import LeftOut

__all__ = ["TensorBoard"]


class TensorBoard(GeneralTracker):
    """A tracker that writes event files in ``<logging_dir>/<project_name>/``.

    A number becomes a scalar, a string a text, a mapping of numbers several scalars of one chart, a tensor or an array
    a histogram. Other values are left out, and a warning names them. The `SummaryWriter` is `writer`, as in Accelerate.

    Args:
        project_name: The name of the folder.
        logging_dir: The folder in which it lies.
        **options: Options of `torch.utils.tensorboard.SummaryWriter`, given as ``init_kwargs={"tensorboard": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str], **options: Any) -> None:
        self.run_name = project_name
        self.folder = os.path.join(logging_dir, project_name)
        self._options = options
        self.writer: Any = None
        self._left_out = LeftOut(self.name, "TensorBoard keeps numbers, texts and arrays only", "its own log_images")

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder, **self._options)

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        # "." keeps the hyperparameters in this run; without it they would be a run of their own.
        self.writer.add_hparams({name: _hparam(value) for name, value in values.items()}, {}, run_name=".")
        self.writer.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in self._left_out.rest(values, _is_kept).items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step, **options)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, value, step, **options)
            elif isinstance(value, Number):
                self.writer.add_scalar(name, value, step, **options)
            else:
                self.writer.add_histogram(name, value, step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep pictures.

        Args:
            values: Arrays by name, of shape ``(N, 3, H, W)``, or as the option ``dataformats="NHWC"`` says.
            step: The step of the pictures.
            **options: Options of ``SummaryWriter.add_images``.

        Example:
            >>> tracker = accelerator.get_tracker("tensorboard")  # doctest: +SKIP
            >>> tracker.log_images({"digits": images}, step=0)  # doctest: +SKIP
        """
        for name, images in values.items():
            self.writer.add_images(name, images, step, **options)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _is_kept(value: Any) -> bool:
    return isinstance(value, str | Mapping | Number) or hasattr(value, "__array__")


def _hparam(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
