"""Finished runs of sweeps, kept in a folder so that the same call finds them again. Runs in the kernel.

A run is found by a key: a hash of its source, its values, its seed and its settings. Its folder holds what it printed,
its checkpoints and the files of its trackers; when it has ended well, also its value and its curves. These are JSON and
safetensors: reading them runs no code that their writer chose. A value of another kind is not kept, and such a run is
done again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from nbaccel.base.events import Loss, Metric
from nbaccel.base.settings import RunSettings
from nbaccel.display.history import History
from nbaccel.errors import LaunchRefused
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.launching.ipc.spec import load_named
from nbaccel.launching.run import Run

__all__ = [
    "FinishedRuns",
    "as_key",
    "as_one_of_a_sweep",
    "describe_configuration",
    "describe_value",
]

_RECORD, _TENSORS, _LOG, _FILES = "run.json", "value.safetensors", "output.log", "written-files.txt"
_LOSS = "loss"
_FORMAT = 1
_LONGEST_NAME = 80
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, set, frozenset, dict)
_NAMED_BY_REPR = {("torch", "dtype"), ("torch", "device")}


class _NotKept(Exception):
    """A value is of a kind that has no place in JSON or safetensors."""


class FinishedRuns:
    """The folder of the runs of sweeps; nothing is made before a run begins.

    Attributes:
        unkept: The values of each run that ended well and could not be kept, in words, with the reason.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self.unkept: list[tuple[str, str]] = []

    def folder_of(self, config: Mapping[str, Any], key: str) -> Path:
        """Return the folder of a run: its values in words, and a part of its key."""
        words = re.sub(r"[^\w.,=+-]+", "_", describe_configuration(config))[:_LONGEST_NAME].strip("_.") or "run"
        return self.folder / f"{words}-{key[:10]}"

    def begin(self, config: Mapping[str, Any], key: str) -> Path:
        """Make the folder of a run that begins, and return it.

        Raises:
            LaunchRefused: Nothing can be written there.
        """
        folder = self.folder_of(config, key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (_RECORD, _FILES):
                (folder / name).unlink(missing_ok=True)
            with open(folder / _LOG, "ab"):
                """It can be written."""
        except OSError as error:
            raise LaunchRefused(
                f"the runs of a sweep need a folder for what they print, and {self.folder} cannot be written "
                f"({error.strerror}): pass another folder= to nbaccel.sweep, or work in a folder that can be written."
            ) from error
        return folder

    @staticmethod
    def log_in(folder: Path) -> str:
        """Return the path of the file for all that the run prints."""
        return str(folder / _LOG)

    @staticmethod
    def files_in(folder: Path) -> str:
        """Return the path of the list of files that the run writes elsewhere."""
        return str(folder / _FILES)

    def find(self, config: Mapping[str, Any], key: str) -> tuple[Run, dict[str, Any]] | None:
        """Return the run with this key that has ended well, and what it has left; None if none can be read."""
        folder = self.folder_of(config, key)
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            if record["format"] != _FORMAT or record["key"] != key:
                return None
            tensors = _read_tensors(folder / _TENSORS) if record["has_tensors"] else {}
            value, left = _rebuilt(record["value"], tensors)
            history = _history_of(record["curves"], record["rows"])
        except Exception:  # there is none, or it was damaged in any way: then it is done again
            return None
        log, seconds = str(folder / _LOG), record["seconds"]
        found = Run([value], history, None, record["start_method"], "", log, seconds, checkpoint=record["checkpoint"])
        return found, left

    @staticmethod
    def add_traceback(log_path: str, error: BaseException) -> None:
        """Write the traceback of a run that failed behind all that it has printed."""
        shown: Callable[[], list[str] | None] | None = getattr(error, "_render_traceback_", None)
        lines = None if shown is None else shown()  # a class of the user's may return nothing
        lines = [f"{type(error).__name__}: {error}"] if lines is None else lines
        with suppress(OSError), open(log_path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(["", *lines, ""]))

    def keep(self, run: Run, left: Mapping[str, Any], key: str) -> None:
        """Keep a run that ended well; the record is complete or absent, whenever this process ends.

        A value that cannot be kept is no error: `unkept` has it, and the next sweep does the run again; the same goes
        for a run without a `key`.
        """
        if not key:
            self.unkept.append((describe_configuration(run.config), _why_no_key(run.config, run.origin.seed)))
            return
        folder = self.folder_of(run.config, key)
        try:
            tensors: dict[str, Any] = {}
            value = _taken_apart((run.value, dict(left)), tensors)
            if tensors:
                _write(folder / _TENSORS, _packed(tensors))
            history = run.history
            curves = {name: (history.curve(name).step, history.curve(name).mean) for name in history.names}
            record = {
                "format": _FORMAT,
                "key": key,
                "config": describe_configuration(run.config),
                "seed": run.origin.seed,
                "seconds": run.seconds,
                "start_method": run.start_method,
                "checkpoint": run.checkpoint,
                "value": value,
                "has_tensors": bool(tensors),
                "curves": curves,
                "rows": [row for row in history.rows if _is_plain(row)],
            }
            _write(folder / _RECORD, json.dumps(record).encode())
        except OSError as error:
            self.unkept.append((describe_configuration(run.config), f"{folder} could not be written: {error}"))
        except _NotKept as reason:
            self.unkept.append((describe_configuration(run.config), str(reason)))
        except Exception as error:  # of a package, or of a class of the user's: it costs this run alone
            self.unkept.append(
                (describe_configuration(run.config), f"its value cannot be kept ({type(error).__name__}: {error})")
            )


def _write(path: Path, data: bytes) -> None:
    """Write a file whose name appears when it is complete."""
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _read_tensors(path: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = load_named("safetensors.torch:load")(path.read_bytes())
    return tensors


_SCALARS = (bool, int, float, str, type(None))
_KINDS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _taken_apart(value: Any, tensors: dict[str, Any]) -> Any:
    """Return a value as JSON, and add its tensors and arrays to `tensors`, on the CPU.

    Raises:
        _NotKept: It holds an object of another kind.

    Example:
        >>> _taken_apart({"scores": (1, 2.5), "raw": b"a"}, {})
        {'dict': ['scores', {'tuple': [1, 2.5]}, 'raw', {'bytes': ['61']}]}
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        return {"bytes": [value.hex()]}
    if kind is dict:
        return {"dict": [_taken_apart(part, tensors) for item in value.items() for part in item]}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [_taken_apart(part, tensors) for part in value]}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    name = str(len(tensors))
    if torch is not None and kind is torch.Size:
        return {"Size": list(value)}
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized:
            what = "quantised" if value.is_quantized else "sparse"
            raise _NotKept(f"it holds a {what} tensor, which safetensors files cannot hold; a dense one is kept")
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": [name]}
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in "US":
        parts = [each if type(each) is str else each.hex() for each in value.ravel().tolist()]
        return {"texts": [value.dtype.str, list(value.shape), parts]}
    if numpy is not None and torch is not None and (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
        with suppress(TypeError):
            tensors[name] = torch.from_numpy(numpy.array(value))
            return {"ndarray" if kind is numpy.ndarray else "number": [name]}
        raise _NotKept(f"it holds an array of {value.dtype}, which safetensors files cannot hold")
    raise _NotKept(f"it holds an object of the class {kind.__name__}, which is neither data nor a tensor")


def _packed(tensors: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = load_named("safetensors.torch:save")(tensors)
    except KeyError as error:  # its table of types has no such entry
        raise _NotKept(f"it holds a tensor of {error}, which safetensors files cannot hold") from None
    return packed


def _rebuilt(structure: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `_taken_apart` got; it only ever builds what is named here."""
    if type(structure) in _SCALARS:
        return structure
    ((kind, parts),) = structure.items()
    if kind in _LEAVES:
        return _LEAVES[kind](parts, tensors)
    built = [_rebuilt(part, tensors) for part in parts]
    return dict(zip(built[::2], built[1::2], strict=True)) if kind == "dict" else _KINDS[kind](built)


def _texts_in(dtype: str, shape: list[int], parts: list[str]) -> Any:
    """Return an array of texts."""
    values = [bytes.fromhex(part) for part in parts] if dtype.strip("<>|=").startswith("S") else parts
    return load_named("numpy:array")(values, dtype).reshape(shape)


_LEAVES: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "tensor": lambda parts, tensors: tensors[parts[0]],
    "ndarray": lambda parts, tensors: tensors[parts[0]].numpy(),
    "number": lambda parts, tensors: tensors[parts[0]].numpy()[()],
    "bytes": lambda parts, tensors: bytes.fromhex(parts[0]),
    "Size": lambda parts, tensors: load_named("torch:Size")(parts),
    "texts": lambda parts, tensors: _texts_in(*parts),
}


def _is_plain(row: Mapping[str, Any]) -> bool:
    return all(type(value) in (int, float, str, bool) for value in row.values())


def _history_of(curves: Mapping[str, Any], rows: list[dict[str, Any]]) -> History:
    """Return a history of one rank with these rows, and with the curve of the loss if no row has it."""
    history = History(1)
    for row in rows:
        values = {name: value for name, value in row.items() if name != "step"}
        history.feed(0, 0.0, Metric(values, int(row["step"])))
    if _LOSS in curves and not any(_LOSS in row for row in rows):
        for step, mean in zip(*curves[_LOSS], strict=True):
            history.feed(0, 0.0, Loss(mean, int(step)))
    return history


# --- keys -----------------------------------------------------------------------------------------------------------


def describe_configuration(config: Mapping[str, Any]) -> str:
    """Return values in words.

    Example:
        >>> describe_configuration({"fold": 0, "lr": 1e-3, "opt": "adam", "net": {"width": 8}})
        'fold=0, lr=0.001, opt=adam, net={width=8}'
    """
    return ", ".join(f"{name}={describe_value(value)}" for name, value in config.items())


def describe_value(value: Any) -> str:
    """Return one value in words."""
    if isinstance(value, str):
        return _in_a_row(value)
    if type(value) is dict and all(type(name) is str for name in value):
        return f"{{{describe_configuration(value)}}}"
    if type(value) is float:
        return f"{value:g}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value.__name__
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_NAME // 2 else f"{type(value).__name__}(…)"


def _in_a_row(text: str) -> str:
    """Return a text on one line, without its middle if it is long.

    Example:
        >>> _in_a_row("a\\nb"), _in_a_row("data/" + 90 * "x" + "/fold-1.csv")
        ('a\\\\nb', 'data/xxxxxxxxxxxxxxx…xxxxxxxx/fold-1.csv')
    """
    text = text if text.isprintable() else repr(text)[1:-1]
    half = _LONGEST_NAME // 4
    return text if len(text) <= _LONGEST_NAME // 2 else f"{text[:half]}…{text[1 - half :]}"


def as_key(source: str, config: Mapping[str, Any], seed: int | None, settings: RunSettings, world_size: int) -> str:
    """Return the key of a run; empty if a value of `config` cannot be told from another of its kind, or without a seed.

    Args:
        source: The digest of what runs, see `SourceMark`.
    """
    values = {name: _mark_of(value) for name, value in config.items()}
    if None in values.values() or seed is None:
        return ""
    chosen = {
        name: getattr(settings, name)
        for name in (
            "mixed_precision",
            "raw_precision",
            "gradient_accumulation_steps",
            "cpu",
            "strategy",
            "independent",
            "batches",
        )
    }
    text = json.dumps([_FORMAT, source, values, seed, chosen, world_size], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def as_one_of_a_sweep(config: Mapping[str, Any]) -> str:
    """Return values in words that differ for different values; empty if one cannot be told from another of its kind.

    Example:
        >>> as_one_of_a_sweep({"lr": 0.1}) == as_one_of_a_sweep({"lr": 0.1 + 1e-12})
        False
    """
    marks = {name: _mark_of(value) for name, value in config.items()}
    digest = hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()
    return "" if None in marks.values() else f"{describe_configuration(config)} ({digest[:8]})"


def _why_no_key(config: Mapping[str, Any], seed: int | None) -> str:
    """Return why a run with these values has no key."""
    for name, value in config.items():
        if isinstance(value, types.FunctionType) and _mark_of(value) is None:
            return f"{name} is a function that holds an object, which no later sweep can compare"
        if _mark_of(value) is None:
            return f"{name} is an object of the class {type(value).__name__}, which no later sweep can compare"
    if seed is None:
        return "it has no seed, so that nobody knows its random numbers"
    return "the code that runs cannot be read"


def _mark_of(value: Any) -> str | None:
    """Return a text that is equal for equal values, in another process too; None if there is none."""
    try:
        return _text_of(value)
    except RecursionError:  # it contains itself
        return None


def _text_of(value: Any) -> str | None:
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in _CONTAINERS:
        parts = value.items() if type(value) is dict else value
        marks = [_text_of(part) for part in parts]
        if None in marks:
            return None
        in_order = sorted(map(str, marks)) if type(value) in (set, frozenset) else marks
        return f"{type(value).__name__}({in_order})"
    if isinstance(value, types.FunctionType) and not _holds_what_is_marked(value):
        return None
    if isinstance(value, types.FunctionType | type):
        return f"{value.__module__}.{value.__qualname__} {SourceMark.of(value, is_strict=True).digest}"
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | type | None):
        return f"{getattr(value.__self__, '__name__', value.__module__)} {value.__qualname__}"
    if type(value) is functools.partial:
        parts = _text_of((value.func, value.args, value.keywords))
        return None if parts is None else f"partial {parts}"
    if isinstance(value, PurePath) or (type(value).__module__, type(value).__name__) in _NAMED_BY_REPR:
        return repr(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return f"{value.dtype} {value.item()!r}"
    return None


def _holds_what_is_marked(function: types.FunctionType) -> bool:
    """Return whether all that a function holds, in its closure and its defaults, can be told from others."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    return all(each is function or isinstance(each, types.ModuleType) or _text_of(each) is not None for each in held)
