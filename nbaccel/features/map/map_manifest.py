"""The manifest of a map: from what answers were computed, and how a call differs. Used in the kernel and ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.base.quantities import plural
from nbaccel.base.values import frozen
from nbaccel.errors import CannotContinue
from nbaccel.features.source.fingerprint import checksum_of
from nbaccel.features.source.source_mark import SourceMark

__all__ = ["MapManifest", "id_of", "key_text", "read_manifest"]

_VERSION = 2
_READ_TOO = (1, 2)
"""Versions of the manifest that are read. The first has the text of a function, and no mark of what that reads."""

_OF_JOINED = ("joined", "bytes", "failed")

_DEEPEST_KEY = 32


@frozen
class MapManifest:
    """The facts that must be the same for answers to belong to a call.

    Args:
        total: Number of items; None for a stream.
        items: Their checksum; empty for a stream, whose blocks have their own.
        function, setup: The marks of their sources.
        key: What the program says about weights and settings.
    """

    total: int | None
    items: str
    function: SourceMark
    setup: SourceMark
    key: str

    @property
    def as_json(self) -> dict[str, Any]:
        """The same facts for a file."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"version": _VERSION, **facts, "function": self.function.names, "setup": self.setup.names}

    def difference(self, known: Mapping[str, Any], by_any_code: bool = False) -> str:
        """Return in words what is different in the facts of a file; empty if nothing is.

        Args:
            by_any_code: The function and its setup may have changed.
        """
        if self.total != (total := known["total"]):
            here = "a stream" if self.total is None else plural(self.total, "item")
            there = "a stream" if total is None else plural(total, "item")
            return f"to other items ({there}, now {here})"
        if self.items != known["items"]:
            return f"to other items (as many, {plural(self.total or 0, 'item')}, with other contents or order)"
        if not by_any_code and (changed := self.difference_of_code(known)):
            return changed
        return f"with key={known['key']}, now key={self.key}" if self.key != known["key"] else ""

    def difference_of_code(self, known: Mapping[str, Any]) -> str:
        """Return in words what is different in the function or its setup; empty if nothing is."""
        for name, words in {"function": "of another function", "setup": "with another setup"}.items():
            mark: SourceMark = getattr(self, name)
            if changed := mark.difference(known[name]):
                if mark.is_another(known[name]):
                    return f"{words} ({changed})"
                return f"of other code: {changed}; put back, the same line goes on"
        return ""


def id_of(known: Mapping[str, Any]) -> str:
    """Return the name by which the processes of a map know it; of the version before, which had none, its facts."""
    return str(known.get("id") or checksum_of([known.get(name) for name in MapManifest.__dataclass_fields__]))


def read_manifest(path: Path, is_joined: bool = False) -> dict[str, Any]:
    """Return the facts in a file.

    Args:
        is_joined: It is about joined answers, of which there are more facts.

    Raises:
        CannotContinue: It is damaged, or of another version.
    """
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError, TypeError) as error:
        raise CannotContinue(
            f"{path.name} cannot be read ({type(error).__name__}: {error}); overwrite=True starts anew"
        ) from error
    if found.get("version") not in _READ_TOO:
        raise CannotContinue(
            f"{path.name} was written by another version of nbaccel.map: overwrite=True drops its answers and starts "
            "anew; another name for out keeps both"
        )
    names = (*MapManifest.__dataclass_fields__, *(_OF_JOINED if is_joined else ()))
    if missing := [name for name in names if name not in found]:
        raise CannotContinue(f'{path.name} is damaged, it has no "{missing[0]}": overwrite=True starts anew')
    return found


def key_text(key: Any) -> str:
    """Return `key` as text, equal for equal keys in all processes.

    Raises:
        TypeError: It is not plain.

    Example:
        >>> key_text("v1"), key_text({"b": 0.5, "a": [1, None]}), key_text((1, 2))
        ("'v1'", "{'a': [1, None], 'b': 0.5}", '(1, 2)')
    """
    return _text_of(key, 0)


def _text_of(key: Any, depth: int) -> str:
    if depth <= _DEEPEST_KEY:
        for kind in (bool, int, float, str):
            if isinstance(key, kind):
                return repr(kind(key)) if kind is not str else repr(str.__str__(key))
        if key is None:
            return "None"
        if type(key).__module__ == "numpy" and getattr(key, "shape", None) == ():
            return _text_of(key.item(), depth + 1)
        if isinstance(key, dict):
            pairs = sorted(f"{_text_of(name, depth + 1)}: {_text_of(each, depth + 1)}" for name, each in key.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(key, list | tuple):
            parts = [_text_of(each, depth + 1) for each in key]
            if isinstance(key, list):
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    raise TypeError(
        f"key is a text, a number, None, or a list, a tuple or a dict of these, got a {type(key).__qualname__}: "
        'name what the answers depend on, as in key="checkpoint 3"'
    )
