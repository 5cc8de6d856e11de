"""Kind: the interface that reads, compares and writes the own state of an object.

An object consists of its own state and of other objects, its parts. The state of a list is the objects it holds and
their order; the contents of these objects are their own. Ranks and the kernel use it; the kinds are in `kinds` and
`arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PLAIN",
    "CannotWrite",
    "Change",
    "Entries",
    "IsSame",
    "Kind",
    "Stays",
    "Step",
    "Write",
]

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose objects have no parts, and that a pickle writes by themselves."""

Step = tuple[str, Any]
"""The step from an object to one of its parts: the kind of part, and which one."""

Write = Callable[[], None]
"""Writes a prepared change; it runs no code of the user's, so none of that can fail in it."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one object of the notebook.

    Args:
        token: Identifies the object (`Inventory.token`).
        content: The argument of its kind's `writing`.
    """

    token: tuple[Any, ...]
    content: Any

    def entries(self) -> dict[str, Any]:
        """Return the changed entries of a dictionary, or of an object's attributes, by key; empty for anything else."""
        return self.content.entries() if type(self.content) is Entries else {}

    def without(self, keys: Collection[str]) -> Change:
        """Return the same change without these entries, which stay as they were."""
        return Change(self.token, self.content.without(keys))


@dataclass(frozen=True, slots=True)
class Entries:
    """The change of a dictionary.

    Args:
        removed: Keys to remove first: those that are gone, and those that come after new ones now.
        keys, values: Entries to add then, in this order.
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
    """Raised if the notebook's object cannot take this state; the message says why."""


class IsSame(Exception):
    """Raised if the notebook's object has this state already."""


class Stays(Exception):
    """Raised if an object has changed, and cannot be changed in the notebook; the message says why."""


class Kind:
    """Reads objects of a type. This base class: they have no parts, and do not change.

    Attributes:
        cost: How many plain objects are read in the same time.
        is_data: `change` returns plain values and objects, so a file of data can hold it.
    """

    cost = 1
    is_data = False

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        """Return the objects that an object consists of, each with the step to it.

        Args:
            obj: An object of this kind.
        """
        return ()

    def mark(self, obj: Any) -> Any:
        """Return the data about the state of an object that `change` needs.

        It keeps the objects that are compared alive, so that their ids stay unique.

        Args:
            obj: An object of this kind.
        """
        return None

    def change(self, obj: Any, mark: Any) -> Any:
        """Return the data by which `writing` brings another object from one state to the present one; None if they are
        equal.

        Args:
            obj: An object of this kind.
            mark: What `mark` returned for it.

        Raises:
            Stays: It has changed, and stays in this process.
        """
        return None

    def doubt(self, obj: Any, mark: Any) -> str:
        """Return why it cannot be known whether an object without a change has changed; "" if it can.

        Args:
            obj: An object of this kind.
            mark: What `mark` returned for it.
        """
        return ""

    def digest(self, obj: Any, mark: Any) -> Any:
        """Return JSON that is the same in another process if an object had the same state there; None if nothing shows
        it.

        Parts that are objects count by their classes.

        Args:
            obj: An object of this kind.
            mark: What `mark` returned for it: the state that counts.
        """
        return None

    def keeps_memory(self, obj: Any, mark: Any) -> bool:
        """Return whether an object is a tensor whose memory is laid out as at `mark`, so that another may be a view of
        it.

        Args:
            obj: An object of this kind.
            mark: What `mark` returned for it.
        """
        return False

    def writing(self, obj: Any, change: Any) -> Write:
        """Prepare to write a change into an object. What is returned may be called again, and then writes the same.

        Args:
            obj: An object of this kind, in the receiving process.
            change: What `change` returned.

        Returns:
            A function that writes it, and cannot fail any more.

        Raises:
            CannotWrite: `obj` is not as it was when the change was found.
            IsSame: There is nothing to write.
        """
        raise CannotWrite("it has no state")
