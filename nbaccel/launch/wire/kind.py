"""Kind: the interface by which the state that an object has by itself is read, compared and written.

An object consists of its own state and of other objects, its parts. Of a list, the state is which objects it holds in
which order; what those consist of is theirs. Ranks and the kernel use it; the kinds there are stand in `kinds` and
`arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["CannotWrite", "Change", "Entries", "Kind", "Step", "Write"]

Step = tuple[str, Any]
"""The way from an object to one of its parts: what kind of part, and which."""

Write = Callable[[], None]
"""Writes a change that has been prepared; it runs no code of the user's, so nothing of theirs can fail in it."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one object of the notebook.

    token: says which (`Inventory.token`).  content: what its kind's `writing` takes.
    """

    token: tuple[Any, ...]
    content: Any

    def entries(self) -> dict[str, Any]:
        """What has changed in a dictionary, or in the attributes of an object, by its key; empty for anything else."""
        return self.content.entries() if type(self.content) is Entries else {}

    def without(self, keys: Collection[str]) -> Change:
        """The same but for these entries, which stay as they were."""
        return Change(self.token, self.content.without(keys))


@dataclass(frozen=True, slots=True)
class Entries:
    """What has changed in a dictionary.

    removed: keys to take out first: those that are gone, and those that stand behind new ones by now.
    keys, values: to put in then, in this order.
    """

    removed: list[Any]
    keys: list[Any]
    values: list[Any]

    def entries(self) -> dict[str, Any]:
        return {str(key): value for key, value in zip(self.keys, self.values, strict=True)}

    def without(self, keys: Collection[str]) -> Entries:
        kept = [(key, value) for key, value in zip(self.keys, self.values, strict=True) if str(key) not in keys]
        removed = [key for key in self.removed if str(key) not in keys]
        return Entries(removed, [key for key, _ in kept], [value for _, value in kept])


class CannotWrite(Exception):
    """The notebook's object cannot take this state; the message says why."""


class Kind:
    """How objects of a type are looked at. This one: they have no parts, and do not change."""

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        """The objects it consists of, each with the way to it."""
        return ()

    def mark(self, obj: Any) -> Any:
        """What `change` needs to know of the state; it refers to what it compares, so no id is used twice."""
        return None

    def change(self, obj: Any, mark: Any) -> Any:
        """What `write` needs to bring another object from the state of `mark` to that of `obj`; None for nothing."""
        return None

    def keeps_memory(self, obj: Any, mark: Any) -> bool:
        """Whether it is a tensor whose memory is laid out as at `mark`, so that another may be a view of it."""
        return False

    def writing(self, obj: Any, change: Any) -> Write:
        """Prepare writing `change` into `obj`.

        Raises:
            CannotWrite: `obj` is not as it was when the change was found.
        """
        raise CannotWrite("it has no state")
