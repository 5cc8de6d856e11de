"""Describe where a rank was when it ended: its stack, its values, its last collectives. Runs in ranks.

After the user's code has ended, `scenes` turns the traceback of that end into a snapshot. Frames of the project are
left out, those of libraries have no values. The rank's peers are handled the same way: the kernel interrupts them, and
the traceback of the interrupt says where they were. Values are described in a few words (`described`). `CallLog`
records the last collectives while the run goes on.
"""

from __future__ import annotations

import linecache
import math
import re
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

from nbaccel.base.events import CollectiveEntered, Event, Sink
from nbaccel.base.notices import PACKAGE_DIR
from nbaccel.launching.ipc.reports import CollectiveCall, FrameSnapshot, ValueSummary
from nbaccel.launching.ipc.user_code import is_users
from nbaccel.namespace.wrappers import plain

__all__ = [
    "CallLog",
    "described",
    "is_data",
    "left_behind",
    "scenes",
]

_MOST_SCENES = 30
_MOST_VALUES = 40
_SOURCE = 200
_NO_DATA = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def scenes(trace: TracebackType | None, file: str = "", names: Mapping[str, Any] | None = None) -> list[FrameSnapshot]:
    """Return the stack below the place that caught the error, outermost first; of a very deep one the innermost frames.

    Args:
        names: Names that the top level of the cell `file` has bound; a frame of it is compiled in parts, and does not
            know all.
    """
    found: list[tuple[FrameType, int]] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(PACKAGE_DIR):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return [
        _scene(frame, line, (names or {}) if frame.f_code.co_filename == file and _is_top_level(frame) else {})
        for frame, line in found[-_MOST_SCENES:]
    ]


def left_behind(file: str, names: Mapping[str, Any]) -> list[FrameSnapshot]:
    """Return a scene for a rank that is done with the cell `file`: the names it has left; none if there are none."""
    return [FrameSnapshot(file, 0, "<module>", "", True, _values(names))] if names else []


def _scene(frame: FrameType, line: int, more: Mapping[str, Any]) -> FrameSnapshot:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()[:_SOURCE]
    theirs = is_users(code.co_filename)
    values = _values(dict(_names_in(frame)) | dict(more)) if theirs else []
    return FrameSnapshot(code.co_filename, line, code.co_name, source, theirs, values)


def _names_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the names that the frame's code mentions: its locals, and globals, which are the whole notebook."""
    namespace = frame.f_globals
    yield from ((name, namespace[name]) for name in frame.f_code.co_names if name in namespace)
    if not _is_top_level(frame):
        yield from frame.f_locals.items()


def _is_top_level(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _values(names: Mapping[str, Any]) -> list[ValueSummary]:
    """Describe the values that matter to a reader; for prepared objects the originals."""
    data = [(name, plain(value)) for name, value in names.items() if is_data(name, plain(value))]
    return [described(name, value) for name, value in data[:_MOST_VALUES]]


def is_data(name: str, value: Any) -> bool:
    """Return whether a value matters to a reader: it is no code, and belongs neither to IPython nor to the project."""
    is_ours = str(type(value).__module__).startswith("nbaccel.")
    return not (name.startswith("_") or issubclass(type(value), _NO_DATA) or is_ours)


_TEXT = 60
_FORM = 240
_ENTRIES = 8
_DEPTH = 2
_READ_ELEMENTS = 1 << 20  # 1 ms of reading
_MOST_PARAMETERS = 100_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SECRETS = frozenset({
    *("token", "tokens", "key", "keys", "apikey", "auth", "secret", "secrets"),
    *("password", "passwords", "passwd", "pwd", "credential", "credentials"),
})  # fmt: skip
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_LOOKS_SECRET = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|AKIA|xox[bp]-|glpat-)\w{8,}")
_MASKED = "<masked>"


def described(name: str, value: Any) -> ValueSummary:
    """Return a description of `value`, which the user calls `name`.

    It runs none of the user's code, no `repr` and no `len` of their classes, reads no device memory, and reads tensors
    on the host only if they are small. Strings under names such as `token` or `api_key` are masked.

    Example:
        >>> described("lr", 0.5)
        ValueSummary(name='lr', form='float', text='0.5', flaw='')
        >>> described("api_key", "abc")
        ValueSummary(name='api_key', form='str', text='<masked>', flaw='')
    """
    try:
        form = _form(value)[:_FORM]
    except Exception as error:  # a user's class may raise anything when it is read
        return ValueSummary(name, f"{type(value).__qualname__}, which cannot be looked at ({type(error).__name__})")
    try:
        return ValueSummary(name, form, _MASKED if _hides(name, value) else _text(value), _flaw(value))
    except Exception:  # reading takes some memory, and the rank may have run out of it
        return ValueSummary(name, form)


def _form(value: Any, depth: int = 0) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and _is(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {tuple(value.shape)}" + (f" on {value.device}, {_size(value.nbytes)}" if not depth else "")
    if torch is not None and _is(value, torch.nn.Module):
        parameters = list(islice(torch.nn.Module.parameters(value), _MOST_PARAMETERS))
        count = sum(each.numel() for each in parameters)
        return f"{type(value).__qualname__} of {count} parameters, {_size(sum(each.nbytes for each in parameters))}"
    if numpy is not None and _is(value, numpy.ndarray):
        return f"array {value.dtype} {value.shape}" + (f", {_size(value.nbytes)}" if not depth else "")
    if type(value) in (list, tuple, dict, set, frozenset):
        return _container(value, depth)
    return type(value).__qualname__


def _container(value: Any, depth: int) -> str:
    kind = f"{type(value).__qualname__} of {len(value)}"
    if depth >= _DEPTH or isinstance(value, set | frozenset):
        return kind
    parts = [(name, child) for name, child in _first(value) if type(child) not in _PLAIN]
    inside = ", ".join(f"{name}: {_form(child, depth + 1)}" for name, child in parts)
    return f"{kind} {{{inside}}}" if inside else kind


def _first(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the first entries of a container with their names."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for at, (key, child) in enumerate(entries):
        if at == _ENTRIES:
            return
        yield (str(key)[:_TEXT] if type(key) in _PLAIN else type(key).__qualname__), child


def _text(value: Any, depth: int = 0) -> str:
    """Return a repr of plain data, and of one number in a tensor on the host."""
    torch = sys.modules.get("torch")
    if torch is not None and _is(value, torch.Tensor):
        is_one = value.numel() == 1 and value.device.type == "cpu" and not depth and _own(value) is value
        return f"{value.detach().item():.6g}" if is_one and not value.is_complex() else ""
    if type(value) in (str, bytes):
        shown = repr(value[:_TEXT]) + ("..." if len(value) > _TEXT else "")
        return _MASKED if _LOOKS_SECRET.search(shown) else shown
    if type(value) in _PLAIN:
        return repr(value)[:_TEXT]
    if type(value) in (list, tuple, dict) and depth < _DEPTH:
        parts = [
            (name, _MASKED if isinstance(value, dict) and _hides(name, child) else _text(child, depth + 1))
            for name, child in _first(value)
        ]
        if any(not text for _, text in parts):
            return ""
        inside = ", ".join(f"{name}: {text}" if isinstance(value, dict) else text for name, text in parts)
        return f"{inside[: 2 * _TEXT]}{', ...' if len(value) > _ENTRIES else ''}"
    return ""


def _flaw(value: Any) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if _is(value, float):
        return "" if math.isfinite(value) else ("NaN" if math.isnan(value) else "inf")
    if torch is not None and _is(value, torch.Tensor):
        return _flaw_of_tensor(value)
    if torch is not None and _is(value, torch.nn.Module):
        read = 0
        for name, parameter in torch.nn.Module.named_parameters(value):
            read += parameter.numel()
            if read > _READ_ELEMENTS:
                break
            if flaw := _flaw_of_tensor(parameter):
                return f"{flaw} in {name}"
    if numpy is not None and _is(value, numpy.ndarray) and value.dtype.kind == "f" and value.size < _READ_ELEMENTS:
        return _flaw_of_tensor(sys.modules["torch"].from_numpy(value)) if torch is not None else ""
    if type(value) in (list, tuple, dict):
        for name, child in _first(value):
            if type(child) not in (list, tuple, dict) and (flaw := _flaw(child)):
                return f"{flaw} in {name}"
    return ""


def _flaw_of_tensor(tensor: Any) -> str:
    is_safe = tensor.device.type == "cpu" and tensor.numel() <= _READ_ELEMENTS and not tensor.is_sparse
    if not is_safe or not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    numbers = _own(tensor).detach()
    if bool(numbers.isnan().any()):
        return "NaN"
    return "inf" if bool(numbers.isinf().any()) else ""


def _own(tensor: Any) -> Any:
    """Return this rank's rows of a sharded tensor, any other tensor as it is: the whole would wait for all ranks."""
    return getattr(tensor, "_local_tensor", tensor)


def _hides(name: str, value: Any) -> bool:
    """Return whether a value of this name may be a secret.

    Numbers are token ids or lengths; tensors are never shown.
    """
    is_number = type(value) in (bool, int, float, type(None))
    return not is_number and any(word.lower() in _SECRETS for word in _WORD.findall(name))


def _is(value: Any, kind: type) -> bool:
    """Return whether the true type of `value` is `kind`: the ``__class__`` of a proxy is code of the user's."""
    return issubclass(type(value), kind)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


_KEPT = 20


class CallLog:
    """The last 20 collectives.

    Each has the user's lines that called it. The log gets `CollectiveEntered` on its way to the `PeerWatch`. A call
    costs up to 3 us here (measured on a busy machine); the entries stay in the rank until its report.

    Args:
        then: Gets every event afterwards.
    """

    def __init__(self, then: Sink) -> None:
        self._then = then
        self._calls: deque[CollectiveCall] = deque(maxlen=_KEPT)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CollectiveEntered):
            self._calls.append(CollectiveCall(event.call, *_users_line()))
        self._then(event)

    def last(self) -> list[CollectiveCall]:
        """Return the collectives, oldest first."""
        return list(self._calls)


def _users_line() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
