"""Aim tracker: stores a run in an Aim repository, which is a folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nbaccel.base.tracking import GeneralTracker

__all__ = ["Aim"]


class Aim(GeneralTracker):
    """A tracker that keeps a run in a repository of Aim. `aim up --repo FOLDER` shows it.

    The `aim.Run` is `writer`, as in Accelerate.

    Args:
        project_name: The name of the run.
        logging_dir: The repository.
        **options: Options of `aim.Run`, given as ``init_kwargs={"aim": {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="aim", project_dir="runs")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "aim"
    requires_logging_directory = True
    package = pip_name = "aim"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str], **options: Any) -> None:
        self.run_name = project_name
        self._options = {"repo": os.fspath(logging_dir), **options}
        self.writer: Any = None

    def start(self) -> None:
        import aim

        self.writer = aim.Run(**self._options)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.writer["hparams"] = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            self.writer.track(value, name=name, step=step, **options)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep pictures.

        Args:
            values: By name an array, a PIL image, or a tuple of one of them and its caption.
            step: The step of the pictures.
            kwargs: Options for `aim.Image` under "aim_image", for `aim.Run.track` under "track".

        Example:
            >>> tracker = accelerator.get_tracker("aim")  # doctest: +SKIP
            >>> tracker.log_images({"digits": images}, step=0)  # doctest: +SKIP
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            image = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(image, name=name, step=step, **options.get("track", {}))

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
