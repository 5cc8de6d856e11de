"""DVCLive tracker: stores metrics in files that DVC compares. Runs on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nbaccel.base.tracking import GeneralTracker
from nbaccel.features.trackers.leftout import LeftOut

__all__ = ["DVCLive"]


class DVCLive(GeneralTracker):
    """A tracker that keeps an experiment of DVC, in the folder `dvclive`.

    Values that are no metrics are left out, and a warning names them. The `dvclive.Live` is `live`, as in Accelerate.

    Args:
        project_name: Not used.
        logging_dir: Not used.
        live: A `dvclive.Live` of the program, given as ``init_kwargs={"dvclive": {"live": …}}``.
        **options: Options of `dvclive.Live`, such as ``dir`` for another folder, given as ``init_kwargs={"dvclive":
            {…}}``.

    Example:
        >>> accelerator = Accelerator(log_with="dvclive")  # doctest: +SKIP
        >>> accelerator.init_trackers("digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> accelerator.log({"accuracy": 0.9})  # doctest: +SKIP
    """

    name = "dvclive"
    package = pip_name = "dvclive"

    def __init__(
        self,
        project_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        live: Any = None,
        **options: Any,
    ) -> None:
        self.live = live
        self._options = options
        self._left_out = LeftOut(self.name, "DVCLive keeps numbers and texts only", "its own log_image, log_plot")

    def start(self) -> None:
        import dvclive

        if self.live is None:
            self.live = dvclive.Live(**self._options)

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.live.log_params(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for name, value in self._left_out.rest(values, Metric.could_log).items():
            self.live.log_metric(name, value, **options)
        self.live.next_step()

    def finish(self) -> None:
        if self.live is not None:
            self.live.end()
