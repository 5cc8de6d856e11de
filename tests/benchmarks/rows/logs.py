"""A call of `log` with three numbers, in processor time: raw is a line of JSON written at once.

Accelerate has no tracker for files: its own here writes raw's line. Fabric's writes CSV, a hundred rows at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, installed
from benchmarks.loops import NBACCEL
from benchmarks.party import Bout

__all__ = ["rows"]

_CALLS = 1000
_TARGET = 1.76
"""6 us where raw took 3.4, and a tracker of Accelerate's 7.6."""
_VALUES = {"loss": 0.5, "accuracy": 0.25, "lr": 0.001}


def _bout(log: Callable[[Mapping[str, float], int], object], read: Callable[[], Iterable[Any]], folder: Any) -> Bout:
    """read: the losses that are in the file, also where the calls are written later than they are made."""

    def turn() -> None:
        for step in range(_CALLS):
            log(_VALUES, step)

    return Bout(turn, lambda: torch.tensor([float(loss) for loss in read()]), folder.cleanup)


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nbaccel-bench-")


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def _raw() -> Bout:
    folder = _folder()
    path = Path(folder.name, "log.jsonl")
    file = path.open("a", buffering=1)
    return _bout(
        lambda values, step: file.write(json.dumps({"step": step, **values}) + "\n"), lambda: _losses(path), folder
    )


def _accelerate() -> Bout:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    folder = _folder()
    path = Path(folder.name, "log.jsonl")

    class JsonLines(GeneralTracker):  # type: ignore[misc]
        name = "jsonl"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self._file = path.open("a", buffering=1)

        @property
        def tracker(self) -> Any:
            return self._file

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Mapping[str, float], step: int | None = None, **options: Any) -> None:
            self._file.write(json.dumps({"step": step, **values}) + "\n")

    accelerator = Accelerator(cpu=True, log_with=JsonLines())
    accelerator.init_trackers("bench")
    return _bout(accelerator.log, lambda: _losses(path), folder)


def _fabric() -> Bout:
    from lightning.fabric.loggers import CSVLogger

    folder = _folder()
    logger = CSVLogger(folder.name, flush_logs_every_n_steps=100)

    def read() -> list[str]:
        import csv

        logger.save()
        with Path(logger.log_dir, "metrics.csv").open() as file:
            return [row["loss"] for row in csv.DictReader(file)]

    return _bout(logger.log_metrics, read, folder)


def _nbaccel() -> Bout:
    from nbaccel import Accelerator

    folder = _folder()
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder.name)
    accelerator.init_trackers("bench")
    return _bout(accelerator.log, lambda: _losses(next(Path(folder.name).rglob("metrics.jsonl"))), folder)


def rows() -> Sequence[Row]:
    makes = {"raw": _raw, "Accelerate": _accelerate, "Fabric, CSV": _fabric, NBACCEL: _nbaccel}
    contenders = installed(makes, {"Accelerate": "accelerate", "Fabric, CSV": "lightning"})
    return [Row("log of 3 numbers", contenders, units=_CALLS, targets={NBACCEL: _TARGET})]
