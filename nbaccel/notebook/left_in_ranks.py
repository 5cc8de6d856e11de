"""Find what the ranks of a cell trained, made or changed, and the notebook does not have. Runs in the kernel.

`LeftInRanks` judges by the results, not by the cell's text: a rank reports numbers for the parameters that its cell
mentions, which are compared with those of the notebook; and the containers and objects that its cell has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from nbaccel.base.quantities import listed
from nbaccel.namespace.parameters import checksum, parameters_of, parts_of
from nbaccel.namespace.wrappers import plain

__all__ = ["LeftInRanks"]


class LeftInRanks:
    """The results of a cell's ranks, compared with the notebook; made before anything comes back.

    Args:
        reports: The reports of the ranks; None for one that gave none.
        speaker: The rank whose values go back.
    """

    def __init__(self, reports: Sequence[Any], result_rank: int, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._all_facts = [{} if report is None else report.facts for report in reports]
        self._facts = [report.facts for report in reports if report is not None and report.status == "ok"]
        self._ranks = len(reports)
        self._own: Mapping[str, Any] = {} if reports[result_rank] is None else reports[result_rank].facts
        self._result_rank = result_rank
        self._sums: Mapping[str, int] = self._own.get("checksums", {})
        self._holders: Collection[str] = self._own.get("holders", ())
        self._changed = [name for name in dict.fromkeys(self._own.get("changed", ())) if name in namespace]

    @cached_property
    def trained(self) -> list[str]:
        """Return names whose parameters differ from the notebook's, compared when this is read first."""
        return [name for name, number in self._sums.items() if _checksum(self._namespace.get(name)) != number]

    @property
    def is_alike(self) -> bool:
        """Return whether every rank, also one that failed, has told its parameters' sums, and all have the same."""
        return all("checksums" in facts for facts in self._all_facts) and not self._apart_in(self._all_facts)

    @property
    def apart(self) -> list[str]:
        """Return names whose parameters differ between ranks that ended well, though they are not of one batch."""
        return self._apart_in(self._facts)

    def _apart_in(self, all_facts: Sequence[Mapping[str, Any]]) -> list[str]:
        return [
            name
            for name, number in self._sums.items()
            if name not in self._holders
            and name not in self._own.get("of_batches", ())
            and any(facts.get("checksums", {}).get(name, number) != number for facts in all_facts)
        ]

    def not_one_training(self, came: Collection[str]) -> str:
        """Return a warning if ranks trained separately, or all did the same; "" if they trained together.

        Args:
            came: Names that have been brought back.
        """
        if apart := self.apart:
            whose = f", and what came back is rank {self._result_rank}'s" if set(apart) & set(came) else ""
            return (
                f"{', '.join(apart)} {'differ' if len(apart) > 1 else 'differs'} between the ranks{whose}: nothing "
                f"kept {_them(apart)} in step. {self._remedy(apart, 'does')}; --independent, if that is meant"
            )
        words = {"exchanged": True, "was_warned": True, "was_over": False}
        together = any(facts.get(name, default) for facts in self._facts for name, default in words.items())
        if self._ranks == 1 or len(self._facts) < self._ranks or together:
            return ""
        changed = [name for name in self.trained if name not in self._holders]
        others = [name for name in self._changed if name not in changed]
        changed += [name for name in others if _can_be_trained(self._namespace[name])]
        if not changed:
            return ""
        if changed[0] in self._sums:
            found = f"all {self._ranks} ranks did the same work on {listed(changed)}, and exchanged nothing"
            return f"{found}. {self._remedy(changed, 'shares the work out')}; -n 1 does it once"
        found = f"each of {self._ranks} ranks changed {listed(changed)} by itself, and they exchanged nothing"
        return f"{found}: -n 1 does the work once"

    def not_brought_back(self, came: Collection[str]) -> Iterator[str]:
        """Yield the lines on what stayed in the ranks: trained objects first, each with the way to bring it back."""
        namespace = self._namespace
        stale = [
            name
            for name in self.trained
            if name not in came and name in namespace and _checksum(namespace[name]) != self._sums[name]
        ]
        trained = [name for name in stale if name not in self._holders]
        if not trained and stale:  # their contents came under another name, as a new object
            yield f"{listed(stale)} still {'holds' if len(stale) == 1 else 'hold'} what was there before the cell"
        if trained:
            how = self._how_to_bring(trained)
            yield f"trained in the ranks, and in the notebook as before: {listed(trained)}; {how}"
        for name in self._sums:
            if name in came and name not in self._holders and _checksum(namespace.get(name)) != self._sums[name]:
                kind = type(plain(namespace.get(name))).__name__
                inner = self._inner(name)
                yield f"{name} came without all that was trained, which a {kind} leaves out of its copies{inner}"
        asked = {*came, *stale}
        changed = [name for name in self._changed if name not in asked]
        made = [name for name in self._own.get("not_asked", ()) if name not in asked and name not in changed]
        bound = [name for name in (*changed, *made) if name in self._own.get("bound", ())]
        if not any(name in self._sums for name in came):  # otherwise their contents have come
            stays = [name for name in bound if not self._inner(name)]
            yield from (f"{name} cannot leave its process{self._inner(name)}" for name in bound if name not in stays)
            if stays:
                yield f"not brought back: {listed(stays)}; a lock, a thread, a file or a weak reference is in it"
        changed, made = ([name for name in names if name not in bound] for names in (changed, made))
        models = self._own.get("models", {})
        made.sort(key=lambda name: (name not in models, name.isupper()))  # models first, and constants last
        if names := [*changed, *made]:
            yield f"not brought back: {listed(names)}; add {_them(names)} to --out"

    def kept(
        self, came: Collection[str], told: Mapping[str, tuple[str, int]]
    ) -> tuple[dict[str, tuple[str, int]], str]:
        """Return what stays in ranks that live on, by name as in `told`, trained objects first; and the line on it.

        Args:
            came: Names that have been brought back.
            told: What earlier cells have said.
        """
        sums, holders = self._own.get("kept", ({}, ()))
        old = [
            name
            for name, number in sums.items()
            if name in self._namespace and name not in came and _checksum(self._namespace[name]) != number
        ]
        old.sort(key=lambda name: name in holders)
        made = [name for name in self._own.get("stays", ()) if name not in old]
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
            value = plain(self._namespace[name])
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
            for name, other in self._namespace.items()
            if not name.startswith("_") and plain(other) is not value and inner & _ids(plain(other))
        ]
        models = [name for name in found if _is_model(self._namespace[name])]
        return next(iter([*models, *(name for name in found if id(self._namespace[name]) in parts)]), "")

    def _inner(self, name: str) -> str:
        """Return the way to bring the model that the value of `name` has in the rank; "" if it has none."""
        part = self._own.get("models", {}).get(name)
        return f": {part} = {name}.{part} as the cell's last line, and --out {part}" if part else ""

    def _remedy(self, names: Sequence[str], does: str) -> str:
        values = [plain(self._namespace[name]) for name in names if name in self._namespace]
        torch = sys.modules.get("torch")
        if torch is not None and values and all(issubclass(type(value), torch.Tensor) for value in values):
            return f'p.grad = accelerator.reduce(p.grad, "mean") for each of them, before its update, {does}'
        if any(facts.get("has_prepared") for facts in self._facts):
            return (
                "Something was prepared: the loop has to use what accelerator.prepare returned, and no rank may choose "
                "a learning rate by a loss of its own"
            )
        return f"accelerator.prepare, before the loop, {does}"


def _checksum(value: Any) -> int | None:
    try:
        return checksum(plain(value))
    except Exception:  # a class of the user's may raise anything
        return None


def _ids(value: Any) -> set[int]:
    try:
        return set(map(id, parameters_of(value)))
    except Exception:  # as above
        return set()


def _is_model(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(plain(value)), torch.nn.Module)


def _can_be_trained(value: Any) -> bool:
    """Return whether it is an estimator, a sampler ... and not one of the many objects that change when read."""
    return any(hasattr(type(value), method) for method in ("fit", "train", "learn", "run"))


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
