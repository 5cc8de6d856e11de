"""Text trackers: store a run's numbers as JSON lines or CSV. Runs on rank 0; needs no package."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from nbaccel.base.tracking import GeneralTracker

__all__ = ["Csv", "JsonLines"]


class _TextFile(GeneralTracker):
    """A file in ``<logging_dir>/<project_name>/``; the configuration is beside it in ``config.json``."""

    requires_logging_directory = True
    file_name: str

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str]) -> None:
        self.path = Path(logging_dir, project_name, self.file_name)

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def tracker(self) -> Path:
        """The path of the file with the numbers."""
        return self.path

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=2, default=_plain)
        (self.path.parent / "config.json").write_text(text + "\n", encoding="utf-8")


class JsonLines(_TextFile):
    """One line per `log`: ``{"step": 3, "loss": 0.25}``.

    Every line is in the file when `log` returns; a later run of the same name appends to the file.
    """

    name = "jsonl"
    file_name = "metrics.jsonl"
    _file: TextIO | None = None

    def start(self) -> None:
        super().start()
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        assert self._file is not None, "start() comes first"
        self._file.write(_encode({"step": step, **values}) + "\n")

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()


class Csv(_TextFile):
    """One row per `log`, one column per name; a cell without a value is empty.

    A new name adds a column: the file is then written again, with the rows that are in it.
    """

    name = "csv"
    file_name = "metrics.csv"

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__(project_name, logging_dir)
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def start(self) -> None:
        super().start()
        self._columns = list(self._read()[0]) if self.path.exists() else []
        self._file = self.path.open("a", encoding="utf-8", newline="", buffering=1)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        assert self._file is not None, "start() comes first"
        row = {"step": step, **values}
        if not row.keys() <= set(self._columns):
            self._widen(row)
        csv.DictWriter(self._file, self._columns).writerow(row)

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or ()), list(reader)

    def _widen(self, row: Mapping[str, Any]) -> None:
        """Rewrite the file with the columns of `row` added, by one rename: a reader sees all rows at any time."""
        assert self._file is not None
        self._file.close()
        _, rows = self._read()
        self._columns += [name for name in row if name not in self._columns]
        anew = self.path.with_suffix(".csv.new")
        with anew.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        anew.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="", buffering=1)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold for a tensor, an array, a path, or anything else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# `json.dumps` makes an encoder in every call that has options.
_encode = json.JSONEncoder(default=_plain).encode
