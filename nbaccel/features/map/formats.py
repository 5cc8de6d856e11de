"""Formats: how answers are written while a map runs, and joined when it is over. Used in ranks and in the kernel.

`out` chooses: none for memory, "answers.jsonl" for lines of JSON, "answers.parquet" for a folder of Parquet files.
A worker turns each answer into bytes at once, so that an answer which cannot be written is an error of that item.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from nbaccel.base.quantities import amount
from nbaccel.base.values import frozen
from nbaccel.features.map.answer_list import Answers, Failed, LinesOnDisk, read_line
from nbaccel.features.map.records import LONGEST_ANSWER, AnswerIndex, AnswerRecord

__all__ = ["Format", "InMemoryFormat", "JsonLinesFormat", "ParquetFormat", "format_of"]

_ROWS = 100_000
_BUFFER_BYTES = 1 << 20
_AS_JSON = {b"nbaccel": b"json"}
"""Metadata of a column whose texts are JSON."""


class Format(Protocol):
    """A form in which answers become bytes, and bytes become the result."""

    def pack(self, index: int, answer: Any) -> bytes:
        """Return the bytes of an answer.

        Args:
            index: The number of the item.
            answer: What the function returned for it.

        Raises:
            TypeError: This format cannot hold it.
            ValueError: It is too large.
        """

    def pack_error(self, index: int, error: str) -> bytes:
        """Return the bytes of an item that failed.

        Args:
            index: The number of the item.
            error: The text of its error.
        """

    def join(self, records: AnswerIndex, target: Path) -> None:
        """Write all answers in their order.

        Args:
            records: The answers.
            target: A path that does not exist.
        """

    def read(self, source: Path) -> Answers:
        """Return the answers that `join` has written.

        Args:
            source: The path.
        """


class JsonLinesFormat:
    """A line for each item: ``{"index": 7, "answer": ...}`` or ``{"index": 7, "error": "..."}``."""

    def pack(self, index: int, answer: Any) -> bytes:
        _check_keys(answer)
        line = {"index": index, "answer": answer}
        try:
            return _fitting(json.dumps(line, ensure_ascii=False, default=_plain).encode())
        except UnicodeEncodeError:  # half of a pair that only JSON's escapes can write
            return _fitting(json.dumps(line, default=_plain).encode())

    def pack_error(self, index: int, error: str) -> bytes:
        return json.dumps({"index": index, "error": error}).encode()

    def join(self, records: AnswerIndex, target: Path) -> None:
        with open(target, "xb", buffering=_BUFFER_BYTES) as file:
            for record in records.records():
                file.write(record.payload + b"\n")

    def read(self, source: Path) -> Answers:
        return Answers(LinesOnDisk(source, read_line), source)


class ParquetFormat:
    """A folder of Parquet files of one schema: the columns index, answer and error.

    Where each answer is a dict, its keys are the columns instead of answer; a key that one of them lacks is None in it
    afterwards, also in a dict within an answer. Answers for which Parquet has no common type are in the column answer
    as JSON.

    Raises:
        ModuleNotFoundError: There is no pyarrow.
    """

    def __init__(self) -> None:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "answers in Parquet files need pyarrow: pip install pyarrow. Or take a name that ends with .jsonl"
            ) from None
        self._arrow = pyarrow
        self._parquet = pyarrow.parquet

    def pack(self, index: int, answer: Any) -> bytes:
        return JsonLinesFormat().pack(index, answer)

    def pack_error(self, index: int, error: str) -> bytes:
        return JsonLinesFormat().pack_error(index, error)

    def join(self, records: AnswerIndex, target: Path) -> None:
        arrow = self._arrow
        target.mkdir()
        lines = partial(_lines, records)
        ends = arrow.schema([("index", arrow.int64()), ("error", arrow.string())])
        if not records.done:  # a folder without a file is no table
            return self._write(target, [[]], ends.insert(1, arrow.field("answer", arrow.string())))
        rows_of = _dicts if all(_has_columns(line) for some in lines() for line in some) else _cells
        try:
            schemas = [arrow.Table.from_pylist(rows_of(some)).schema for some in lines()]
            schema = arrow.unify_schemas([ends, *schemas], promote_options="permissive")
            self._write(target, (rows_of(some) for some in lines()), schema)
        except (arrow.ArrowException, OverflowError, UnicodeError):  # numbers beside texts, an empty dict, 2**70
            answer = arrow.field("answer", arrow.string(), metadata=_AS_JSON)
            self._write(target, map(_texts, lines()), arrow.schema([ends.field("index"), answer, ends.field("error")]))

    def _write(self, target: Path, parts: Iterable[list[dict[str, Any]]], schema: Any) -> None:
        for number, rows in enumerate(parts):
            table = self._arrow.Table.from_pylist(rows, schema=schema)
            self._parquet.write_table(table, target / f"part-{number:05}.parquet")

    def read(self, source: Path) -> Answers:
        return Answers(list(self._rows(source)), source)

    def _rows(self, source: Path) -> Iterator[Any]:
        for path in sorted(source.glob("part-*.parquet")):
            table = self._parquet.read_table(path)
            is_cell = "answer" in table.column_names
            is_json = is_cell and table.schema.field("answer").metadata == _AS_JSON
            for row in table.to_pylist():
                index, error = row.pop("index"), row.pop("error")
                if error is not None:
                    yield Failed(index, error)
                elif is_cell:
                    yield json.loads(row["answer"]) if is_json else row["answer"]
                else:
                    yield row


def _lines(records: AnswerIndex) -> Iterator[list[dict[str, Any]]]:
    """Yield the objects of the lines of all answers, as many together as go into one file."""
    lines = (json.loads(record.payload) for record in records.records())
    return iter(lambda: list(islice(lines, _ROWS)), [])


def _has_columns(line: dict[str, Any]) -> bool:
    """Return whether the keys of an answer can be columns; an item that failed does not matter."""
    answer = line.get("answer")
    is_dict = isinstance(answer, dict) and bool(answer) and not {"index", "answer", "error"} & answer.keys()
    return "error" in line or is_dict


def _dicts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [{"index": line["index"], **(line.get("answer") or {}), "error": _error_of(line)} for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)  # Arrow takes those of the first row alone
    return [{name: row.get(name) for name in names} for row in rows]


def _cells(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": line["index"], "answer": line.get("answer"), "error": _error_of(line)} for line in lines]


def _texts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"answer": json.dumps(row["answer"])} for row in _cells(lines)]


def _error_of(line: dict[str, Any]) -> str | None:
    """Return the error of a line as text that UTF-8 can write; None if it has an answer."""
    error = line.get("error")
    return None if error is None else str(error).encode("utf-8", "backslashreplace").decode()


@frozen
class InMemoryFormat:
    """Answers of any class, for the program that asked; in a private folder until they are joined."""

    def pack(self, index: int, answer: Any) -> bytes:
        return _fitting(pickle.dumps(answer, 5))

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
        ValueError: It chooses none.
    """
    if out is None:
        return InMemoryFormat()
    if out.suffix in (".jsonl", ".ndjson"):
        return JsonLinesFormat()
    if out.suffix in (".parquet", ".pq"):
        return ParquetFormat()
    raise ValueError(f'out names a file of answers, "answers.jsonl" or "answers.parquet"; got {str(out)!r}')


def _fitting(answer: bytes) -> bytes:
    """Return an answer.

    Raises:
        ValueError: It is longer than a record may be.
    """
    if len(answer) > LONGEST_ANSWER:
        raise ValueError(
            f"an answer of {amount(len(answer))}; the limit is {amount(LONGEST_ANSWER)}: save it, and return its path"
        )
    return answer


def _check_keys(value: Any) -> None:
    """Refuse dicts whose keys JSON cannot hold, or not keep apart.

    Raises:
        TypeError: There is one.
    """
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            _check_other_keys(value)
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        if isinstance(each, dict | list | tuple):
            _check_keys(each)


def _check_other_keys(value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise TypeError(
                f"an answer holds a dict with a key of {type(key).__module__}.{type(key).__qualname__}, which JSON "
                "cannot hold: use texts or plain numbers as keys, or leave out= away to keep answers in memory"
            )
    texts = [*json.loads(json.dumps(dict.fromkeys(value)), object_pairs_hook=lambda pairs: [key for key, _ in pairs])]
    if len(texts) > len(set(texts)):
        ((twice, _),) = Counter(texts).most_common(1)
        raise TypeError(
            f'an answer holds a dict with several keys that are "{twice}" in JSON, where all keys are texts: '
            "use texts, or leave out= away to keep answers in memory"
        )


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
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        _check_keys(fields)
        return fields
    raise TypeError(
        f"an answer holds a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold: "
        "return text, numbers, lists and dicts, or leave out= away to keep answers in memory"
    )
