"""Find what the ranks of a cell trained, made or changed, and the notebook does not have. Runs in the kernel.

`LeftInRanks` judges by the results, not by the cell's text: a rank reports numbers for the parameters that its cell
mentions, which are compared with those of the notebook; and the containers and objects that its cell has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from nbaccel.base.quantities import listed
from nbaccel.namespace.parameters import checksum
from nbaccel.namespace.wrappers import plain

__all__ = ["LeftInRanks", "checksum_of", "them"]


class LeftInRanks:
    """The results of a cell's ranks, compared with the notebook; made before anything comes back.

    Args:
        reports: The reports of the ranks; None for one that gave none.
        result_rank: The rank whose values go back.

    Attributes:
        own: The facts of that rank.
        sums: Numbers of the parameters that its names lead to.
        holders: Those of these names that hold what another one is.
        changed: Names of containers and objects that its cell has changed.
    """

    def __init__(self, reports: Sequence[Any], result_rank: int, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._all_facts = [{} if report is None else report.facts for report in reports]
        self._facts = [report.facts for report in reports if report is not None and report.status == "ok"]
        self._ranks = len(reports)
        self.own: Mapping[str, Any] = {} if reports[result_rank] is None else reports[result_rank].facts
        self._result_rank = result_rank
        self.sums: Mapping[str, int] = self.own.get("checksums", {})
        self.holders: Collection[str] = self.own.get("holders", ())
        self.changed = [name for name in dict.fromkeys(self.own.get("changed", ())) if name in namespace]

    @cached_property
    def trained(self) -> list[str]:
        """Return names whose parameters differ from the notebook's, compared when this is read first."""
        return [name for name, number in self.sums.items() if checksum_of(self.namespace.get(name)) != number]

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
            for name, number in self.sums.items()
            if name not in self.holders
            and name not in self.own.get("of_batches", ())
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
                f"kept {them(apart)} in step. {self._remedy(apart, 'does')}; --independent, if that is meant"
            )
        words = {"exchanged": True, "was_warned": True, "was_over": False}
        together = any(facts.get(name, default) for facts in self._facts for name, default in words.items())
        if self._ranks == 1 or len(self._facts) < self._ranks or together:
            return ""
        changed = [name for name in self.trained if name not in self.holders]
        others = [name for name in self.changed if name not in changed]
        changed += [name for name in others if _can_be_trained(self.namespace[name])]
        if not changed:
            return ""
        if changed[0] in self.sums:
            found = f"all {self._ranks} ranks did the same work on {listed(changed)}, and exchanged nothing"
            return f"{found}. {self._remedy(changed, 'shares the work out')}; -n 1 does it once"
        found = f"each of {self._ranks} ranks changed {listed(changed)} by itself, and they exchanged nothing"
        return f"{found}: -n 1 does the work once"

    def _remedy(self, names: Sequence[str], does: str) -> str:
        values = [plain(self.namespace[name]) for name in names if name in self.namespace]
        torch = sys.modules.get("torch")
        if torch is not None and values and all(issubclass(type(value), torch.Tensor) for value in values):
            return f'p.grad = accelerator.reduce(p.grad, "mean") for each of them, before its update, {does}'
        if any(facts.get("has_prepared") for facts in self._facts):
            return (
                "Something was prepared: the loop has to use what accelerator.prepare returned, and no rank may choose "
                "a learning rate by a loss of its own"
            )
        return f"accelerator.prepare, before the loop, {does}"


def checksum_of(value: Any) -> int | None:
    """Return the number of the parameters of a value of the notebook; None if it cannot be read."""
    try:
        return checksum(plain(value))
    except Exception:  # a class of the user's may raise anything
        return None


def _can_be_trained(value: Any) -> bool:
    """Return whether it is an estimator, a sampler ... and not one of the many objects that change when read."""
    return any(hasattr(type(value), method) for method in ("fit", "train", "learn", "run"))


def them(names: Sequence[str]) -> str:
    """Return the pronoun for `names`."""
    return "it" if len(names) == 1 else "them"
