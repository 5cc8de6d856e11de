"""Card numbers: finds the GPU that a program means when it names one by number. Runs in the kernel; runs no code.

"cuda:0" means the GPU of each rank if a rank sees only its own, and the first of all GPUs if it sees all of them; a GPU
chosen by the rank's number needs all of them visible. The program is read in its bytecode and in the values that it
reads, but not executed: numbers that it computes, or that a library holds, are not found. Values that cannot be read
are ignored: their classes may answer in any way, and a thread may change them meanwhile.
"""

from __future__ import annotations

import argparse
import dis
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from nbaccel.launch.rank.names import codes_of, home_of, names_read, with_their_own

__all__ = ["first_card_in", "says_first_card"]

_FIRST = "cuda:0"
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps by which transformers fills the visible GPUs, from the first on."""

_RANK_NAMES = frozenset(
    {"rank", "local_rank", "process_index", "local_process_index", "get_rank", "get_local_rank", "RANK", "LOCAL_RANK"}
)
_TAKE_A_CARD = frozenset({"cuda", "to", "set_device"})
_COUNT_CARDS = frozenset({"deepspeed", "lightning", "lightning_fabric", "pytorch_lightning"})
"""Packages that give each rank the GPU of its number, among all of the machine."""

_MOST_SETTINGS = 1000
"""Largest number of entries of a dictionary that is searched: a larger one holds data."""

_SILENT = frozenset({"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
"""Instructions between a call and its arguments that carry no value."""

_CONSTANT, _NAME, _END = "constant", "name", "end"
_Token = tuple[str, Any]


def says_first_card(parts: Sequence[types.CodeType], namespace: Mapping[str, Any], others: Collection[str] = ()) -> str:
    """Return the words by which the code, or what it reads of the notebook, names the first GPU that it sees.

    Return an empty text if it names none, or if it, or a library in it, chooses GPUs by the rank's number: then every
    rank has to see all of them.

    others: names that the cell mentions beside its code.

    >>> says_first_card([compile("model.to('cuda:0')", "", "exec")], {})
    '"cuda:0"'
    >>> says_first_card([compile("model.to('cuda')", "", "exec")], {})
    ''
    >>> says_first_card([compile("model.to('cuda:0').to(f'cuda:{local_rank}')", "", "exec")], {})
    ''
    """
    with suppress(Exception):
        names = with_their_own({*names_read(parts), *others}, namespace)
        values = {name: namespace[name] for name in names if name in namespace}
        words = [_Words(code) for code in (*parts, *(code for value in values.values() for code in codes_of(value)))]
        if _count_cards(values) or any(each.count_cards() for each in words):
            return ""
        said = (each.first_card() for each in words)
        return next(filter(None, said), "") or first_card_in(values)
    return ""


def first_card_in(values: Mapping[str, Any]) -> str:
    """Return the words for a value of the notebook that names the first GPU.

    Return an empty text if no value does, or if there is one of a library that counts GPUs, or one that names another
    GPU.

    >>> first_card_in({"settings": {"device": "cuda:0"}}), first_card_in({"device": "cuda"})
    ('settings', '')
    """
    with suppress(Exception):
        if _count_cards(values):
            return ""
        for name, value in values.items():
            if name == "device_map" and _fills_cards(value):
                return f"device_map={value!r}"
            if any(_is_first_card(leaf) for leaf in _leaves({name: value})):
                return name
    return ""


def _fills_cards(device_map: Any) -> bool:
    if type(device_map) is dict:
        return list(device_map) == [""] and type(device_map[""]) is int and device_map[""] == 0
    return type(device_map) is str and device_map in _MAPS


def _count_cards(values: Mapping[str, Any]) -> bool:
    is_of_a_library = any(home_of(value)[0] in _COUNT_CARDS for value in values.values())
    return is_of_a_library or any(map(_is_another_card, _leaves(values)))


class _Words:
    """The constants and names of one function, and of those inside it, in the order of the code."""

    def __init__(self, code: types.CodeType) -> None:
        self._tokens = list(_tokens(code))
        self._texts = set(_texts(code))
        self._names = {value for kind, value in self._tokens if kind == _NAME}

    def first_card(self) -> str:
        """Return the words that mean the first GPU; empty if there are none."""
        if _FIRST in self._texts:
            return f'"{_FIRST}"'
        for before, after in pairwise(self._tokens):
            if after != (_CONSTANT, 0) or type(after[1]) is not int:
                continue
            if before == (_CONSTANT, "cuda"):
                return 'torch.device("cuda", 0)'
            if before[0] == _NAME and before[1] in _TAKE_A_CARD:
                return f".{before[1]}(0)"
            if before == (_CONSTANT, "") and "device_map" in self._texts:
                return 'device_map={"": 0}'
        if "device_map" in self._texts and (filled := self._texts.intersection(_MAPS)):
            return f'device_map="{min(filled)}"'
        return ""

    def count_cards(self) -> bool:
        """Return whether the code distinguishes GPUs."""
        if "device_ids" in self._texts or any(name.partition(".")[0] in _COUNT_CARDS for name in self._names):
            return True
        if "device_map" in self._texts and (self._names | self._texts) & _RANK_NAMES:
            return True
        if any(text.endswith("cuda:") or "cuda:{" in text or "cuda:%" in text for text in self._texts):
            return True
        return any(map(_is_another_card, self._texts)) or any(map(self._counts, range(len(self._tokens))))

    def _counts(self, at: int) -> bool:
        """Return whether the token `at` takes a GPU whose number is computed, not written there."""
        kind, value = self._tokens[at]
        path = self._path(at + 1)
        if (kind, value) == (_CONSTANT, "cuda"):
            return bool(path) and at > 0 and self._tokens[at - 1] == (_NAME, "device")
        if kind != _NAME or value not in _TAKE_A_CARD or not path:
            return False
        return path[0] == "int" or bool(_RANK_NAMES.intersection(path))  # int(os.environ[...])

    def _path(self, at: int) -> list[str]:
        """Return the names from a token on, attribute by attribute."""
        path: list[str] = []
        for kind, value in self._tokens[at:]:
            if kind != _NAME:
                break
            path.append(value)
        return path


def _tokens(code: types.CodeType) -> Iterator[_Token]:
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
            yield _CONSTANT, value
        elif kind.startswith(("LOAD_", "IMPORT_")):
            names = value if isinstance(value, tuple) else (value,)
            yield from ((_NAME, name) for name in names if isinstance(name, str))  # LOAD_BUILD_CLASS has none
        elif kind not in _SILENT:
            yield _END, None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _tokens(constant)


def _texts(constant: Any) -> Iterator[str]:
    """Yield texts among the constants of code, and in tuples of them: names of keywords are such a tuple."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, types.CodeType):
        for each in constant.co_consts:
            yield from _texts(each)
    elif isinstance(constant, (tuple, frozenset)):
        for each in constant:
            yield from _texts(each)


def _leaves(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield values and settings: entries of dictionaries, attributes of namespaces and of the notebook's classes."""
    for value in values.values():
        yield value
        if type(value) is dict:
            yield from list(value.values()) if len(value) <= _MOST_SETTINGS else ()
        elif type(value) in (types.SimpleNamespace, argparse.Namespace) or home_of(value)[0] == "__main__":
            try:
                attributes = object.__getattribute__(value, "__dict__")
            except AttributeError:  # a class with slots
                continue
            yield from list(attributes.values()) if len(attributes) <= _MOST_SETTINGS else ()


def _is_first_card(value: Any) -> bool:
    return value == _FIRST if type(value) is str else _index(value) == 0


def _is_another_card(value: Any) -> bool:
    if type(value) is str:
        return value.startswith("cuda:") and value[5:].isdecimal() and value != _FIRST
    return bool(_index(value))


def _index(value: Any) -> int | None:
    """Return the number of a CUDA device; None for any other value, and for a device without a number."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.device or value.type != "cuda":
        return None
    index: int | None = value.index
    return index
