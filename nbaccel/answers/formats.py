"""Formats: how answers are written while a map runs, and joined when it is over. Used in ranks and in the kernel.

`out` chooses: none for memory, "answers.jsonl" for lines of JSON, "answers.parquet" for a folder of Parquet files.
A worker turns each answer into bytes at once, so that an answer which cannot be written is an error of that item.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from nbaccel.answers.answer_list import Answers, Failed, LinesOnDisk, read_line
from nbaccel.answers.records import AnswerIndex, AnswerRecord
from nbaccel.values import frozen

__all__ = ["Format", "InMemoryFormat", "JsonLinesFormat", "ParquetFormat", "format_of"]

_ROWS = 100_000
_BUFFER_BYTES = 1 << 20


class Format(Protocol):
    """A form in which answers become bytes, and bytes become the result."""

    def pack(self, index: int, answer: Any) -> bytes:
        """Return the bytes of an answer.

        Raises:
            TypeError: this format cannot hold it.
        """

    def pack_error(self, index: int, error: str) -> bytes: ...

    def join(self, records: AnswerIndex, target: Path) -> None:
        """Write all answers in their order to `target`, which does not exist."""

    def read(self, source: Path) -> Answers:
        """Return the answers that `join` has written."""


class JsonLinesFormat:
    """A line for each item: ``{"index": 7, "answer": ...}`` or ``{"index": 7, "error": "..."}``."""

    def pack(self, index: int, answer: Any) -> bytes:
        try:
            return json.dumps({"index": index, "answer": answer}, ensure_ascii=False, default=_plain).encode()
        except UnicodeEncodeError:  # half of a pair that only JSON's escapes can write
            return json.dumps({"index": index, "answer": answer}, default=_plain).encode()

    def pack_error(self, index: int, error: str) -> bytes:
        return json.dumps({"index": index, "error": error}).encode()

    def join(self, records: AnswerIndex, target: Path) -> None:
        with open(target, "xb", buffering=_BUFFER_BYTES) as file:
            for record in records.records():
                file.write(record.payload + b"\n")

    def read(self, source: Path) -> Answers:
        return Answers(LinesOnDisk(source, read_line), source)


class ParquetFormat:
    """A folder of Parquet files with the columns index, answer (or one for each key, where answers are dicts), error.

    Raises:
        ModuleNotFoundError: there is no pyarrow.
    """

    def __init__(self) -> None:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "answers in Parquet files need pyarrow: pip install pyarrow. Or take a name that ends with .jsonl"
            ) from None
        self._parquet = pyarrow.parquet
        self._table = pyarrow.Table

    def pack(self, index: int, answer: Any) -> bytes:
        return JsonLinesFormat().pack(index, answer)

    def pack_error(self, index: int, error: str) -> bytes:
        return JsonLinesFormat().pack_error(index, error)

    def join(self, records: AnswerIndex, target: Path) -> None:
        target.mkdir()
        rows = (json.loads(record.payload) for record in records.records())
        for number, some in enumerate(iter(lambda: list(islice(rows, _ROWS)), [])):
            columns = [_columns(row) for row in some]
            names = dict.fromkeys(name for row in columns for name in row)
            table = self._table.from_pylist([{name: row.get(name) for name in names} for row in columns])
            self._parquet.write_table(table, target / f"part-{number:05}.parquet")

    def read(self, source: Path) -> Answers:
        return Answers(list(self._rows(source)), source)

    def _rows(self, source: Path) -> Iterator[Any]:
        for path in sorted(source.glob("part-*.parquet")):
            for row in self._parquet.read_table(path).to_pylist():
                index, error = row.pop("index"), row.pop("error", None)
                if error is not None:
                    yield Failed(index, error)
                else:
                    yield row["answer"] if list(row) == ["answer"] else row


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line's object as a row: a dict's keys are columns of their own."""
    answer = row.get("answer")
    if isinstance(answer, dict) and answer and not {"index", "error"} & answer.keys():
        return {"index": row["index"], **answer, "error": None}
    return {"index": row["index"], "answer": answer, "error": row.get("error")}


@frozen
class InMemoryFormat:
    """Answers of any class, for the program that asked; in a private folder until they are joined."""

    def pack(self, index: int, answer: Any) -> bytes:
        return pickle.dumps(answer, 5)

    def pack_error(self, index: int, error: str) -> bytes:
        return error.encode("utf-8", "surrogatepass")

    def join(self, records: AnswerIndex, target: Path) -> None:
        with open(target, "xb", buffering=_BUFFER_BYTES) as file:
            for record in records.records():
                file.write(record.packed())

    def read(self, source: Path) -> Answers:
        index = AnswerIndex(0)
        index.read(source, grows=True)
        return Answers([self._value(record) for record in index.records()])

    def _value(self, record: AnswerRecord) -> Any:
        if record.is_failed:
            return Failed(record.item, record.payload.decode("utf-8", "surrogatepass"))
        return pickle.loads(record.payload)


def format_of(out: Path | None) -> Format:
    """Return the format that the name of `out` chooses.

    Raises:
        ValueError: it chooses none.
    """
    if out is None:
        return InMemoryFormat()
    if out.suffix in (".jsonl", ".ndjson"):
        return JsonLinesFormat()
    if out.suffix in (".parquet", ".pq"):
        return ParquetFormat()
    raise ValueError(f'out names a file of answers, "answers.jsonl" or "answers.parquet"; got {str(out)!r}')


def _plain(value: Any) -> Any:
    """Return a tensor, an array, a path, a set or bytes as JSON can hold it."""
    if hasattr(value, "tolist"):  # tensors, arrays, scalars of NumPy
        return value.tolist()
    if hasattr(value, "__fspath__"):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(
        f"an answer holds a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold: "
        "return text, numbers, lists and dicts, or leave out= away to keep answers in memory"
    )
