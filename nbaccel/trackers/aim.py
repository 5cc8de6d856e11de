"""Aim: a run in a repository of its own, which is a folder. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nbaccel.tracking import GeneralTracker

__all__ = ["Aim"]


class Aim(GeneralTracker):
    """A run called ``project_name`` in the repository ``logging_dir``; ``init_kwargs={"aim": {…}}`` goes to `aim.Run`.

    `aim up --repo FOLDER` shows it.
    """

    name = "aim"
    requires_logging_directory = True
    package = pip_name = "aim"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str], **options: Any) -> None:
        self._project_name = project_name
        self._options = {"repo": os.fspath(logging_dir), **options}
        self._run: Any = None

    def start(self) -> None:
        import aim

        self._run = aim.Run(**self._options)
        self._run.name = self._project_name

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._run["hparams"] = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step, **options)

    def finish(self) -> None:
        if self._run is not None:
            self._run.close()
