"""One call of the function of a map: the items that it gets, and the records of what it returns. Runs in ranks.

The function gets copies of its items, so a repeated call sees them as they were. An answer that cannot be written
is an error of its item; the other answers of the call stay.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from nbaccel.base.failures import Recovery, recovery_of
from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.quantities import plural
from nbaccel.features.map.formats import Format, InMemoryFormat
from nbaccel.features.map.records import AnswerRecord
from nbaccel.train.distributed.nested import is_container, map_children

__all__ = ["CallAnswers", "ItemCall", "own_copy"]

_PLAIN = (str, int, float, bytes)
_NO_LISTS = (str, bytes, Mapping, Set, tuple)
"""Results that are no list of answers though they can be read as one. A set has no order. Of a tuple it is not clear
whether it has the answers or, as in ``return scores, labels``, a part of each; so it is with a table (`columns`)."""

_GETS_A_LIST = "map calls the function with a list of items, and it returns a list of as many answers"
"""Said where the error of a function speaks of a list: most often the function is one for a single item."""

_DEEPEST = 32


class CallAnswers(NamedTuple):
    """The result of one call.

    Args:
        records: The records of the answers that can be written.
        refused: The items whose answers cannot, each with the error.
    """

    records: list[AnswerRecord]
    refused: list[tuple[int, Exception]]


class ItemCall:
    """The function of a map, and the format that its answers are written in.

    Args:
        call: Takes a list of items, and returns as many answers.
    """

    def __init__(self, call: Callable[[list[Any]], Any], form: Format) -> None:
        self._call = call
        self._format = form

    def __call__(self, indices: Sequence[int], items: Sequence[Any], round: int) -> CallAnswers:
        """Call the function with copies of items.

        Args:
            indices: Their numbers.
            round: The round of the records.

        Raises:
            TypeError: It did not return one answer for each item.
            What it raises; a RuntimeError where it leaves by ``sys.exit``, which is no end of the map.
        """
        answers = self._answers([own_copy(item) for item in items])
        returned = CallAnswers([], [])
        for index, answer in zip(indices, answers, strict=True):
            try:
                returned.records.append(AnswerRecord(index, self._format.pack(index, answer), round=round))
            except Exception as error:
                if is_shortage(error) or recovery_of(error) is Recovery.RESTART:
                    raise
                returned.refused.append((index, error))
        return returned

    def _answers(self, chunk: list[Any]) -> list[Any]:
        count = len(chunk)
        try:
            answers = self._call(chunk)
        except Exception as error:
            if not _has_text(error):
                raise RuntimeError(f"the function has raised a {type(error).__name__}, whose text fails") from None
            if isinstance(error, AttributeError | TypeError) and "list" in str(error):
                error.add_note(_GETS_A_LIST)
            raise
        except SystemExit as error:
            raise RuntimeError(f"the function has called sys.exit({error})") from error
        if inspect.iscoroutine(answers):
            answers.close()
            raise TypeError(
                f"the function is async, and map calls plain ones: let it return asyncio.run({answers.__name__}(items))"
            )
        if isinstance(answers, _NO_LISTS) or hasattr(answers, "columns") or not hasattr(answers, "__iter__"):
            raise TypeError(
                f"the function returns a list of answers, one for each of {plural(count, 'item')}; "
                f"it returned a {type(answers).__qualname__}"
            )
        answers = list(answers)
        if len(answers) != count:
            raise TypeError(
                f"the function returned {plural(len(answers), 'answer')} for {plural(count, 'item')}: it gets a list "
                "of items, and returns a list with an answer for each"
            )
        if isinstance(self._format, InMemoryFormat):
            answers = [one if isinstance(one, _PLAIN) else _on_host(one) for one in answers]
        return answers


def _has_text(error: Exception) -> bool:
    """Return whether the class of an error, which may be the program's own, can write it."""
    try:
        str(error)
    except Exception:
        return False
    return True


def own_copy(item: Any) -> Any:
    """Return a copy of lists, dicts, sets, and of arrays and tensors on the host, at any depth; others as they are.

    Example:
        >>> item = {"ids": [1, 2]}
        >>> own_copy(item)["ids"].append(3)
        >>> item
        {'ids': [1, 2]}
    """
    return _copied(item, 0)


def _copied(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or depth > _DEEPEST:
        return value
    if kind is list:
        return [each if type(each) in _PLAIN else _copied(each, depth + 1) for each in value]
    if kind is dict:
        return {key: each if type(each) in _PLAIN else _copied(each, depth + 1) for key, each in value.items()}
    if kind is tuple:
        return tuple([_copied(each, depth + 1) for each in value])
    if issubclass(kind, dict | list | set | bytearray):
        return copy.copy(value)
    if kind is Tensor:
        return value.clone() if value.device.type == "cpu" and not value.requires_grad else value
    is_array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"
    return value.copy() if is_array and value.dtype != object else value


def _on_host(answer: Any) -> Any:
    """Return an answer whose tensors are on the host, each in memory of its own: one of a batch holds the batch."""
    if isinstance(answer, Tensor):
        return answer.detach().cpu().clone()
    return map_children(_on_host, answer) if is_container(answer) else answer
