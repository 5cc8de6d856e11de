"""Reports of failures: an exception leaves a rank as data and is raised again in the kernel, once. Used by both.

`describe` keeps the user's frames and drops those of the project; the kernel raises what it returns
(`launching.rank_failure`). A `StackSnapshot` is the state of one rank when its run ended badly,
as plain text: `launching.rank.stack_snapshot` takes it in the rank, and the notebook compares those of the ranks.
"""

from __future__ import annotations

import builtins
import difflib
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from nbaccel.base.failures import Failure as Kind, classify
from nbaccel.base.memory_request import MemoryRequest
from nbaccel.base.notices import are_ours
from nbaccel.launching.ipc.dead_loader_workers import WorkerEnd, dead_worker

__all__ = [
    "LIMIT_BYTES",
    "CollectiveCall",
    "ConnectionState",
    "ErrorLink",
    "FrameSnapshot",
    "Place",
    "RankReport",
    "StackSnapshot",
    "ValueSummary",
    "describe",
    "signal_name",
]

_ALIKE = 0.75
"""Similarity of two names, as `difflib` counts, from which one may be a misspelling of the other."""

_CAUSED = "which directly caused:"

Place = tuple[str, int, str, str]  # filename, line number, function, source line


@dataclass(frozen=True, slots=True)
class ErrorLink:
    """One exception of a chain: its text, the places it passed, and how it led to the next.

    Args:
        worker: The end of the worker process of a DataLoader, if the exception is about one.
        demand: The numbers of the refused request for memory, if it is about one.
    """

    type_name: str
    headline: list[str]
    places: list[Place]
    relation: str = ""
    worker: WorkerEnd | None = None
    demand: MemoryRequest | None = None

    @classmethod
    def of(cls, error: BaseException, relation: str) -> ErrorLink:
        headline = _headline(error)
        places = _users_places(error.__traceback__)
        worker = dead_worker(error, "\n".join(headline))
        return cls(type(error).__qualname__, headline, places, relation, worker, MemoryRequest.of(error))

    @property
    def kind(self) -> Kind:
        """Return the kind of this exception by itself; that of the whole failure is `RankReport.kind`."""
        # `classify` takes the class and the text apart: a headline begins with the class.
        text = "\n".join(self.headline).partition(": ")[2]
        return classify(self.type_name, text, None if self.demand is None else self.demand.fullness)

    @classmethod
    def from_json(cls, link: dict[str, Any]) -> ErrorLink:
        """Return one of the links that `describe` made, after it was sent as JSON."""
        worker, demand = link["worker"], link["demand"]
        return cls(
            **link
            | {
                "places": [tuple(place) for place in link["places"]],
                "worker": None if worker is None else WorkerEnd(*worker),
                "demand": None if demand is None else MemoryRequest(**demand),
            }
        )


def describe(error: BaseException) -> list[dict[str, Any]]:
    """Return the chain of `error`, oldest first, as JSON; frames of nbaccel are left out."""
    links: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    relation = ""
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        link = ErrorLink.of(current, relation)
        values = {name: getattr(link, name) for name in ErrorLink.__slots__}
        links.append(values | {"demand": None if link.demand is None else asdict(link.demand)})
        if current.__cause__ is not None:
            current, relation = current.__cause__, _CAUSED
        elif current.__context__ is not None and not current.__suppress_context__:
            current, relation = current.__context__, "and while this was handled:"
        else:
            current = None
    return links[::-1]


def _headline(error: BaseException, indent: str = "") -> list[str]:
    """Return the exception in words; below a group its members, each with the last user's line that it passed."""
    lines = [indent + line.rstrip("\n") for line in traceback.format_exception_only(type(error), error) if line.strip()]
    lines[-1:] = [line + _suggestion(error, line) for line in lines[-1:]]
    if isinstance(error, BaseExceptionGroup):
        lines = lines[:1]  # from Python 3.13 on the members are among them, without their places
        for member in error.exceptions:
            places = _users_places(member.__traceback__)
            place = f"  ({places[-1][0]}, line {places[-1][1]})" if places else ""
            first, *rest = _headline(member, indent + "  ")
            lines += [first + place, *rest]
    return lines


def _suggestion(error: BaseException, headline: str) -> str:
    """Return a suggestion for a name that does not exist, in Python's words since 3.12.

    Earlier versions of Python print it with an uncaught error, but do not make it available.
    """
    if not isinstance(error, AttributeError | NameError) or not error.name or "Did you mean" in headline:
        return ""
    try:
        known = [name for name in _names_there(error) if name.startswith("_") == error.name.startswith("_")]
    except Exception:  # raised by a user's `__dir__`
        return ""
    near = difflib.get_close_matches(error.name, known, n=1, cutoff=_ALIKE)
    return f". Did you mean: {near[0]!r}?" if near else ""


def _names_there(error: AttributeError | NameError) -> set[str]:
    """Return the names that could have been meant."""
    if isinstance(error, AttributeError):
        return {*dir(error.obj)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    here = {*frames[-1].f_locals, *frames[-1].f_globals} if frames else set()
    return here | {*vars(builtins)}


def _users_places(trace: TracebackType | None) -> list[Place]:
    frames = traceback.extract_tb(trace)
    return [
        (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame, is_ours in zip(frames, are_ours([frame.filename for frame in frames]), strict=True)
        if not is_ours
    ]


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; the number itself if it has no name."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


LIMIT_BYTES = 200_000
"""Largest size of the snapshot of one rank."""


class ValueSummary(NamedTuple):
    """One name of the user's.

    Args:
        form: Type and size, "int64 (7,) on cpu, 56 B"; it should be the same on all ranks.
        text: A short repr of plain data, empty for other values.
        flaw: "NaN", "NaN in fc.weight", empty if none was seen.
    """

    name: str
    form: str
    text: str = ""
    flaw: str = ""


class FrameSnapshot(NamedTuple):
    """One frame of a rank's Python stack.

    Args:
        source: Its line as the rank saw it.
        is_users: It belongs to no library.
        values: The names that its code uses.
    """

    file: str
    line: int
    function: str
    source: str
    is_users: bool = True
    values: Sequence[ValueSummary] = ()


class CollectiveCall(NamedTuple):
    """A collective of the project that the rank entered, and the line of the user's that called it.

    Args:
        file: Empty if no line of the user's is above it, as in a thread of the project.
    """

    operation: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """One rank's stack, outermost frame first, and its last collectives, oldest first.

    It is sent in the rank's report as JSON, so it can be read when no process of the run is left, and keeps no tensor
    alive.
    """

    scenes: Sequence[FrameSnapshot] = ()
    calls: Sequence[CollectiveCall] = ()

    def to_json(self, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
        """Return JSON of at most `limit_bytes`; if that is too little, names of the outermost frames are dropped first.

        Example:
            >>> StackSnapshot([FrameSnapshot("a.py", 3, "f", "g(x)")]).to_json()["calls"]
            []
        """
        scenes, calls = list(self.scenes), list(self.calls)
        excess = len(json.dumps([scenes, calls])) - limit_bytes
        for at, scene in enumerate(scenes):
            if excess <= 0:
                break
            scenes[at] = scene._replace(values=())
            excess -= len(json.dumps(scene)) - len(json.dumps(scenes[at]))
        while excess > 0 and scenes:
            excess -= len(json.dumps(scenes.pop(0)))
        return {"scenes": scenes, "calls": calls}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StackSnapshot:
        scenes = [scene._replace(values=[ValueSummary(*value) for value in scene.values]) for scene in _scenes(data)]
        return cls(scenes, [CollectiveCall(*call) for call in data["calls"]])


def _scenes(data: dict[str, Any]) -> list[FrameSnapshot]:
    return [FrameSnapshot(*scene) for scene in data["scenes"]]


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """The state of a rank's process groups on a device after a task.

    Args:
        is_cut: They were aborted.
        is_sound: The rank is as its last whole step left it.
        obstacle: The reason why they cannot be formed anew; empty if they can.
    """

    is_cut: bool
    is_sound: bool
    obstacle: str


@dataclass(slots=True)
class RankReport:
    """The report of a rank when its work was over.

    Args:
        status: "ok", "stopped" (by the project's stop or an interrupt), "failed" (an exception) or "exited"
            (SystemExit).
        payload_fd: Memfd of its values; the reader of the report closes it. -1 without one.
        snapshot: The state of its stack.
        names: The names of a persistent rank.
        sequence: Number of collectives that torch has issued in the default process group; None without one.
        cut: The state of its groups on a device, if it has some.
        plain: The values that the message itself has, in place of a memfd.
        holds_nothing: Nothing of its process is of use to another rank.
    """

    status: str
    payload_fd: int
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    links: list[ErrorLink] = field(default_factory=list)
    exit_code: Any = None
    snapshot: StackSnapshot = field(default_factory=StackSnapshot)
    names: frozenset[str] = frozenset()
    sequence: int | None = None
    cut: ConnectionState | None = None
    plain: Mapping[str, Any] | None = None
    holds_nothing: bool = False

    @property
    def has_values(self) -> bool:
        """Return whether there are values of the rank, in a memfd or in the message itself."""
        return self.payload_fd >= 0 or self.plain is not None

    @classmethod
    def from_frame(cls, message: dict[str, Any], fds: list[int]) -> RankReport:
        return cls(
            message["status"],
            fds[0] if fds else -1,
            message["missing"],
            message["facts"],
            [ErrorLink.from_json(link) for link in message["chain"]],
            message["exit_code"],
            StackSnapshot.from_json(message["snapshot"]),
            frozenset(message["names"]),
            message["sequence"],
            None if message["cut"] is None else ConnectionState(**message["cut"]),
            message["plain"],
            message["holds_nothing"],
        )

    @classmethod
    def of_an_outsider(cls) -> RankReport:
        """Return the report of a rank that took no part."""
        return cls("ok", -1)

    @property
    def is_failure(self) -> bool:
        return self.status in ("failed", "exited")

    @property
    def cause(self) -> ErrorLink | None:
        """Return the exception that decides the kind of the failure; None if the rank did not fail by one.

        It is the one that left the cell, or the first that directly caused it, ``raise … from``, that is more than an
        error in the program.
        """
        if self.status != "failed" or not self.links:
            return None
        for link in reversed(self.links):
            if link is not self.links[-1] and link.relation != _CAUSED:
                break
            if link.kind is not Kind.USER:
                return link
        return self.links[-1]

    @property
    def kind(self) -> Kind | None:
        """Return the kind of the failure; None if the rank did not fail by an exception."""
        return None if (cause := self.cause) is None else cause.kind

    @property
    def is_consequence(self) -> bool:
        """Return whether this failure says only that another rank was lost."""
        return self.kind is Kind.PEER_LOST

    def close(self) -> None:
        if self.payload_fd >= 0:
            os.close(self.payload_fd)
            self.payload_fd = -1
