"""NotBroughtBack: what stayed in the ranks of a cell with `--out`, and the way to bring it. Runs in the kernel.

A cell that leaves all that it made or changed says nothing of this, and does not load it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nbaccel.base.quantities import listed
from nbaccel.namespace.parameters import parameters_of, parts_of
from nbaccel.namespace.wrappers import plain
from nbaccel.notebook.left_in_ranks import LeftInRanks, checksum_of, them

__all__ = ["NotBroughtBack"]


class NotBroughtBack:
    """The results of a cell that named some of its values.

    Args:
        left: All of them, compared with the notebook.
    """

    def __init__(self, left: LeftInRanks) -> None:
        self._left = left

    def lines(self, came: Collection[str]) -> Iterator[str]:
        """Yield the lines on what stayed in the ranks: trained objects first, each with the way to bring it back."""
        namespace = self._left.namespace
        stale = [
            name
            for name in self._left.trained
            if name not in came and name in namespace and checksum_of(namespace[name]) != self._left.sums[name]
        ]
        trained = [name for name in stale if name not in self._left.holders]
        if not trained and stale:  # their contents came under another name, as a new object
            yield f"{listed(stale)} still {'holds' if len(stale) == 1 else 'hold'} what was there before the cell"
        if trained:
            how = self._how_to_bring(trained)
            yield f"trained in the ranks, and in the notebook as before: {listed(trained)}; {how}"
        for name, number in self._left.sums.items():
            if name in came and name not in self._left.holders and checksum_of(namespace.get(name)) != number:
                kind = type(plain(namespace.get(name))).__name__
                inner = self._inner(name)
                yield f"{name} came without all that was trained, which a {kind} leaves out of its copies{inner}"
        asked = {*came, *stale}
        changed = [name for name in self._left.changed if name not in asked]
        made = [name for name in self._left.own.get("not_asked", ()) if name not in asked and name not in changed]
        bound = [name for name in (*changed, *made) if name in self._left.own.get("bound", ())]
        if not any(name in self._left.sums for name in came):  # otherwise their contents have come
            stays = [name for name in bound if not self._inner(name)]
            yield from (f"{name} cannot leave its process{self._inner(name)}" for name in bound if name not in stays)
            if stays:
                yield f"not brought back: {listed(stays)}; a lock, a thread, a file or a weak reference is in it"
        changed, made = ([name for name in names if name not in bound] for names in (changed, made))
        models = self._left.own.get("models", {})
        made.sort(key=lambda name: (name not in models, name.isupper()))  # models first, and constants last
        if names := [*changed, *made]:
            yield f"not brought back: {listed(names)}; add {them(names)} to --out"

    def kept(
        self, came: Collection[str], told: Mapping[str, tuple[str, int]]
    ) -> tuple[dict[str, tuple[str, int]], str]:
        """Return what stays in ranks that live on, by name as in `told`, trained objects first; and the line on it.

        Args:
            came: Names that have been brought back.
            told: What earlier cells have said.
        """
        sums, holders = self._left.own.get("kept", ({}, ()))
        old = [
            name
            for name, number in sums.items()
            if name in self._left.namespace and name not in came and checksum_of(self._left.namespace[name]) != number
        ]
        old.sort(key=lambda name: name in holders)
        made = [name for name in self._left.own.get("stays", ()) if name not in old]
        found = {name: (name if name in holders else f"{name} (trained)", sums[name]) for name in old}
        found = {name: entry for name, entry in found.items() if told.get(name) != entry}
        as_before = ", and the notebook has what was there before" if found else ""
        found |= {name: (name, 0) for name in made}
        if not found:
            return {}, ""
        words = listed([text for text, _ in found.values()])
        return found, (
            f"{words} {'stays' if len(found) == 1 else 'stay'} in the ranks{as_before}: "
            f"%accelerate pull {next(iter(found))} brings a copy"
        )

    def _how_to_bring(self, names: Sequence[str]) -> str:
        """Return advice: --out takes a model, not an object that holds one.

        A Trainer has locks and functions that cannot be sent.
        """
        advice: dict[str, None] = {}  # an ordered set
        to_add: dict[str, None] = {}
        for name in names:
            value = plain(self._left.namespace[name])
            if _is_model(value) or type(value).__module__ == "builtins":
                to_add[name] = None
            elif holder := self._model_of(value):
                to_add[holder] = None
            elif inner := self._inner(name):
                advice[inner.removeprefix(": ")] = None
            else:
                to_add[name] = None
        if to_add:
            advice[f"add {','.join(to_add)} to --out"] = None
        return "; ".join(advice)

    def _model_of(self, value: Any) -> str:
        """Return the notebook's name for the model that `value` holds, or for its part that does; "" without one."""
        inner, parts = _ids(value), set(map(id, parts_of(value)))
        found = [
            name
            for name, other in self._left.namespace.items()
            if not name.startswith("_") and plain(other) is not value and inner & _ids(plain(other))
        ]
        models = [name for name in found if _is_model(self._left.namespace[name])]
        return next(iter([*models, *(name for name in found if id(self._left.namespace[name]) in parts)]), "")

    def _inner(self, name: str) -> str:
        """Return the way to bring the model that the value of `name` has in the rank; "" if it has none."""
        part = self._left.own.get("models", {}).get(name)
        return f": {part} = {name}.{part} as the cell's last line, and --out {part}" if part else ""


def _ids(value: Any) -> set[int]:
    try:
        return set(map(id, parameters_of(value)))
    except Exception:  # as above
        return set()


def _is_model(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(plain(value)), torch.nn.Module)
