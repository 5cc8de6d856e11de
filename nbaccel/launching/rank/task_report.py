"""TaskReport: what a rank tells the kernel when a task is over, and the values that it sends back. Runs in ranks.

An error is described first, since that reads how full the memory is. Then the rank waits for its device: the values are
read only if they are whole, see `CutWatch`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

from nbaccel.base.world import World
from nbaccel.launching.ipc.channel import Channel
from nbaccel.launching.ipc.reports import StackSnapshot, describe
from nbaccel.launching.ipc.spec import Results, Task
from nbaccel.launching.rank.lifetime import SPOILT, OwnHoldings
from nbaccel.launching.rank.parts import RankParts
from nbaccel.launching.rank.separate_trainings import sequence_number
from nbaccel.launching.rank.sharded_results import sharded_tensors
from nbaccel.launching.rank.stack_snapshot import CallLog, is_data, left_behind, scenes
from nbaccel.namespace.inventory import ObjectPlace
from nbaccel.namespace.kind import PLAIN, Change
from nbaccel.namespace.payload import Payload, pack_what_can_travel

__all__ = ["TaskReport"]

_LARGEST_NUMBER, _LONGEST_TEXT = 2**63, 1000


def _is_plain(value: Any) -> bool:
    """Return whether a text names the value exactly: the message has it then, and a rank copies 100 pages less."""
    kind = type(value)
    if kind is int:
        return bool(abs(value) < _LARGEST_NUMBER)
    return kind in (type(None), bool, float) or (kind is str and len(value) <= _LONGEST_TEXT)


class TaskReport:
    """Reports the tasks of one rank.

    Args:
        world: That of the rank.
        parts: The parts of the rank, whose facts go along.
        calls: The last collectives of the rank.
        holdings: What others may still use of the rank.
    """

    def __init__(self, world: World, parts: RankParts, calls: CallLog, holdings: OwnHoldings) -> None:
        self._world = world
        self._holdings = holdings
        self._parts = parts
        self._calls = calls

    def send(
        self,
        channel: Channel,
        status: str,
        error: BaseException | None,
        trace: TracebackType | None,
        task: Task | None,
    ) -> None:
        """Send the report and the results.

        Args:
            channel: To the kernel.
            status: How the task ended: "ok", "stopped", "exited" or "failed".
            error: With which it failed or exited.
            trace: The traceback of the error that ended it; None if it finished.
            task: None if it could not even be built.
        """
        snapshot = self._snapshot(trace, task)
        chain = [] if error is None else describe(error)  # first, because it reads how full the memory was
        cut = None if task is None else self._parts.cut.look(has_failed=status in ("failed", "exited"))
        results = Results() if task is None else self._results_of(task)
        values = {f"out:{name}": value for name, value in results.values.items()}
        changes = {f"change:{number}": change for number, change in enumerate(results.changes)}
        home = None if task is None else task.home
        packed = values | changes | ({} if error is None else {"error": error})
        is_plain = not results.parts and all(map(_is_plain, packed.values()))
        payload, refused = (None, {}) if is_plain else self._packed(packed, values.keys(), results, task)
        missing = dict(results.missing) | {
            name.removeprefix("out:"): reason
            for name, reason in refused.items()
            if name.startswith("out:") and name.removeprefix("out:") not in results.optional
        }
        lacks = {} if payload is None else payload.lacks
        sys.stdout.flush()
        sys.stderr.flush()
        message: dict[str, Any] = {
            "op": "done",
            "status": status,
            "plain": packed if is_plain else None,
            "missing": missing,
            "facts": {
                **results.facts,
                "stayed": {
                    _place_of_change(key, changes): why for key, why in refused.items() if key.startswith("change:")
                },
                "lacks": {name.removeprefix("out:"): list(parts) for name, parts in lacks.items()},
                **self._parts.facts(status, results),
            },
            "exit_code": error.code if isinstance(error, SystemExit) else None,
            "chain": chain,
            "snapshot": snapshot.to_json(),
            "names": [] if home is None else list(home.namespace),
            "sequence": sequence_number(),
            "cut": cut,
            "holds_nothing": payload is None and self._holdings.are_empty(),
        }
        channel.send(message, [] if payload is None else [payload.fd])
        if payload is not None:
            os.close(payload.fd)

    def _packed(
        self, packed: dict[str, Any], names: Collection[str], results: Results, task: Task | None
    ) -> tuple[Payload, dict[str, str]]:
        """Pack values, and the names of those that cannot be sent with the reasons.

        Args:
            packed: All that goes back.
            names: Those of it that the task has named.
        """
        leads_on = any(type(each) not in PLAIN for each in packed.values())
        return pack_what_can_travel(
            packed,
            by_reference=task.by_reference() if task is not None and leads_on else {},
            namespace=None if task is None else task.namespace,
            as_written=True,
            places=results.places,
            may_lack=names if results.may_lack else (),
            sharded=sharded_tensors(results, self._world.world_size),
        )

    def _snapshot(self, trace: TracebackType | None, task: Task | None) -> StackSnapshot:
        """Return where the user's code ended."""
        try:
            top = task.left_behind() if task is not None else ("", {})
            return StackSnapshot(left_behind(*top) if trace is None else scenes(trace, *top), self._calls.last())
        except Exception:  # a snapshot must not change how the run ends
            return StackSnapshot()

    def _results_of(self, task: Task) -> Results:
        cut = self._parts.cut
        if cut.is_spoilt and not cut.is_readable:
            return Results(missing={"the results": SPOILT})
        try:
            results = task.results(self._world.rank)
        except Exception as error:
            results = Results(missing={"the results": f"collecting them failed: {type(error).__name__}: {error}"})
        return _only_names(results, SPOILT) if cut.is_spoilt else results


def _only_names(results: Results, why: str) -> Results:
    """Report the results as missing, with the reason; drop their facts, which describe the same values.

    Imports and functions that a cell has left are not listed.
    """
    was_asked_for = results.places is None
    wanted = {name: value for name, value in results.values.items() if name not in results.optional}
    names = [name for name, value in wanted.items() if was_asked_for or is_data(name, value)]
    names += [ObjectPlace(*change.token).name for change in results.changes]
    return Results(missing={**results.missing, **dict.fromkeys(names, why)})


def _place_of_change(refused: str, changes: Mapping[str, Change]) -> str:
    """Return the place of a change, or of an entry of one, that could not be packed."""
    key, _, entry = refused.removeprefix("change:").partition(":")
    place = ObjectPlace(*changes[f"change:{key}"].token)
    return str(ObjectPlace(place.name, (*place.steps, ("value", entry)))) if entry else str(place)
