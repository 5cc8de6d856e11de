"""DryRunResult: the records and reports of the ranks of a dry run, as values. Runs in the kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.base.failures import Failure
from nbaccel.base.notices import is_users
from nbaccel.features.check.dry_run.rank_records import NOT_RUN
from nbaccel.features.check.forecasts.forecast import loops_open_at_end
from nbaccel.features.check.forecasts.loop_tree import is_cut
from nbaccel.features.check.forecasts.trainer_counts import SAVE
from nbaccel.launching.ipc.reports import ErrorLink
from nbaccel.launching.ipc.user_code import cell_name
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.run import Run

__all__ = ["DryRunResult", "FoundError", "LineOfSaves", "UnrunLine", "error_of", "unrun_lines"]

Record = Mapping[str, Any]

_METRICS = os.path.join("sklearn", "metrics", "")
"""Scores of some batches alone may lack a class."""


@dataclass(frozen=True, slots=True)
class FoundError:
    """The error that ended a dry run.

    Args:
        text: In one line.
        where: "rank 1", "all 2 ranks".
        file, line: Those of the innermost place in the cell, else in the program; line 0 if there is none.
        more: What the launcher adds: where the others were, what to do.
        is_memory: The rank ran out of memory.
        rank: The one that failed first.
        inner: The place in another cell or file of the user's that this line has called: "Cell In[4], line 12".
        is_users: It was raised by the user's own code, in no library.
        raised_in: The file whose code has raised it.
    """

    text: str
    where: str
    file: str = ""
    line: int = 0
    more: str = ""
    is_memory: bool = False
    rank: int = 0
    inner: str = ""
    is_users: bool = False
    raised_in: str = ""


@dataclass(frozen=True, slots=True)
class LineOfSaves:
    """Saves by one line of the program, or by one function.

    Args:
        path: The path of the last one.
        nbytes, seconds: Those of one save.
        count: How often.
        paths: Different ones.
        loops: Numbers of the loops around it.
        keeps: How many of them stay; None: all, as far as is known.
    """

    path: str
    nbytes: int
    seconds: float
    count: int
    paths: int
    loops: tuple[int, ...]
    keeps: int | None = None


@dataclass(frozen=True, slots=True)
class UnrunLine:
    """A line that was not run.

    Args:
        file: A path, or "Cell In[4]".
        why: A sentence.
    """

    file: str
    line: int
    why: str

    @classmethod
    def of(cls, record: Record) -> UnrunLine:
        return cls(cell_name(record["file"]) or record["file"], record["line"], record["why"])

    def place(self, cell: str) -> str:
        """Return its place.

        Args:
            cell: Whose lines go without a name.
        """
        return f"line {self.line}" if self.file == cell else f"{self.file}, line {self.line}"

    def said(self, cell: str, what: str) -> str:
        """Return the line of a report.

        Args:
            what: The run that it is about.
        """
        return f"{self.place(cell)} was not run, since {what} cannot undo it: {self.why}"


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The findings of one dry run.

    Args:
        records: The records of each rank, oldest first.
        facts: The facts of each rank, from its report; empty for a rank that left none.
        seconds: That the dry run took, with the start of its ranks.
        noise: See `forecast.measure_noise`.
        free_bytes: Returns the free bytes of the disk of a path.
        is_hung: It was ended since no rank could go on.
        missing: Names of `--out` that did not come, each with the reason.
        restarts: A line for each time that memory ran out and smaller batches were tried; the rest is of the last
            attempt.
        trained: See `trained_names`.
        incomparable: See `incomparable_names`.
        is_late: It was ended by its time limit, which is no error.
    """

    records: Sequence[Sequence[Record]]
    facts: Sequence[Mapping[str, Any]]
    error: FoundError | None
    seconds: float
    noise: float
    free_bytes: Callable[[str], int]
    log_path: str = ""
    is_hung: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    restarts: Sequence[str] = ()
    trained: Set[str] = frozenset()
    incomparable: Set[str] = frozenset()
    is_late: bool = False

    @classmethod
    def of(
        cls,
        records: Sequence[Sequence[Record]],
        run: Run,
        ended: RankResults,
        *,
        seconds: float,
        noise: float,
        free_bytes: Callable[[str], int],
        trained: Set[str] = frozenset(),
        incomparable: Set[str] = frozenset(),
    ) -> DryRunResult:
        reports = ended.reports
        speaker = reports[ended.task.result_rank]
        return cls(
            [_of_last_attempt(each) for each in records],
            [{} if report is None else report.facts for report in reports],
            error_of(run, ended),
            seconds,
            noise,
            free_bytes,
            run.log_path,
            ended.hang is not None,
            {} if speaker is None else speaker.missing,
            run.restarts,
            trained,
            incomparable,
            ended.is_timed_out,
        )

    @property
    def world_size(self) -> int:
        return len(self.records)

    def of_kind(self, kind: str, rank: int = 0) -> list[Record]:
        """Return the records of one kind."""
        return [record for record in self.records[rank] if record["kind"] == kind]

    def last(self, kind: str, rank: int = 0) -> Record:
        """Return the last record of one kind; an empty one if there is none."""
        return next(iter(self.of_kind(kind, rank)[::-1]), {})

    @property
    def table(self) -> list[dict[str, Any]]:
        """Return the rewritten places, see `dry_run.rewriting.Table`."""
        table: list[dict[str, Any]] = self.last("table").get("table", [])
        return [entry | {"file": cell_name(entry["file"]) or entry["file"]} for entry in table]

    @property
    def setup_s(self) -> float:
        """Return the seconds before the first loop that matters."""
        return float(self.last("whole").get("setup_s", self.last("setup").get("seconds", 0.0)))

    def peak(self, kind: str, rank: int = 0) -> Record:
        """Return a peak of memory of a rank: "bytes", and "batch", during which it rose; empty if it is not known.

        Args:
            kind: "host", "device" or "device_reserved".
        """
        peak: Record = self.last("peak", rank).get("peaks", {}).get(kind, {})
        return peak

    def saves(self) -> list[LineOfSaves]:
        """Return the saves of rank 0: files that lie in one folder, numbers in paths apart, as one save."""
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in self.of_kind("save"):
            folder = _without_numbers(os.path.dirname(str(record["path"])))
            own = "" if folder else str(record["path"])
            groups.setdefault((folder, own, tuple(record["loops"])), []).append(record)
        left = set(self.last("saves_left").get("paths", ()))
        return [_line_of(records, left, self.last("trainer").get("keeps")) for records in groups.values()]

    def differing(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each name whose value differs between the ranks, and should not, with the values as text."""
        seen = [facts.get("seen", {}) for facts in self.facts]
        for name in dict.fromkeys(name for each in seen for name in each if name not in self.incomparable):
            values = [each.get(name) for each in seen]
            if all(value is not None for value in values) and len({value[0] for value in values}) > 1:
                yield name, [value[1] for value in values]

    def may_be_of_few_rounds(self) -> bool:
        """Return whether the error may come from loops that ended early: a history is short, and classes are missing.

        An index beyond the end, or a number that is no key, counts only behind such a loop: in the loop itself the
        whole run would meet it, too.
        """
        error = self.error
        if error is None:
            return False
        if error.text.startswith("AssertionError"):
            return error.is_users and bool(self.of_kind("loop"))
        if re.match(r"IndexError|KeyError: \d+$", error.text):
            return error.is_users and self._is_behind_a_cut_loop(error.rank)
        is_of_classes = error.text.startswith("ValueError") and re.search(r"\b(class|label)", error.text) is not None
        return is_of_classes and _METRICS in error.raised_in and bool(self.of_kind("cut", error.rank))

    def _is_behind_a_cut_loop(self, rank: int) -> bool:
        """Return whether the program had left a loop that ended early, in the present round of the loop around both."""
        loops = self.of_kind("loop", rank)
        around = next((loop for loop in loops if loop["end"] == "error"), None)  # the innermost one ends first
        cut = [loop for loop in loops if is_cut(loop)]
        if around is None:
            return bool(cut)
        return any(loop["outer"] == around["id"] and loop["outer_round"] == around["rounds"] for loop in cut)

    def loop_at_end(self, rank: int) -> Record:
        """Return the entry of the innermost loop that a rank was in when its process died; empty if there is none."""
        numbers = loops_open_at_end(self.records[rank])
        return next((entry for entry in self.table if numbers and entry["number"] == numbers[-1]), {})

    def rounds_of_cuts(self) -> Iterator[tuple[int, int]]:
        """Yield for each loop that ended early the rounds of the whole run, and those that it had.

        The last ones are those of a loop inside of another, in all its rounds.
        """
        loops = [loop for loop in self.of_kind("loop") if loop.get("total")]
        ended = {(int(loop["total"]), int(loop["rounds"])) for loop in loops if loop["rounds"] < loop["total"]}
        yield from ended
        for number in {loop["number"] for loop in loops}:
            alike = [loop for loop in loops if loop["number"] == number]
            had = sum(int(loop["rounds"]) for loop in alike)
            yield from ((outer * int(alike[-1]["total"]), had) for outer, _ in ended)

    def samples_of_cuts(self) -> Iterator[int]:
        """Yield how many samples a loop had of a loader that has more: in each rank, and in all of them.

        The second is given with the samples that fill up the last round, and without them.
        """
        ranks: dict[tuple[str, int], list[Record]] = {}
        for rank in range(self.world_size):
            for record in self.of_kind("cut", rank):
                ranks.setdefault((record["place"], record["number"]), []).append(record)
        for each in ranks.values():
            yield from (record["samples"] for record in each)
            yield sum(record["samples"] for record in each)
            if (remainder := each[0]["remainder"]) >= 0:
                yield sum(record["samples"] - record["last_samples"] for record in each) + remainder


def _of_last_attempt(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records since the program began for the last time, which the table is the first of."""
    begins = [at for at, record in enumerate(records) if record["kind"] == "table"]
    return records[begins[-1] :] if begins else records


def _without_numbers(path: str) -> str:
    """Return a path by which those of a later save are recognised.

    Example:
        >>> _without_numbers("/data/checkpoint-500/model.pt")
        '/data/checkpoint-#/model.pt'
    """
    return re.sub(r"\d+", "#", path)


def _line_of(records: Sequence[Record], left: Set[str], trainer_keeps: int | None) -> LineOfSaves:
    """Return saves of the same files as one line. Files whose names differ by a number are of different saves.

    Args:
        left: Paths that were there at the end.
        trainer_keeps: How many saves the trainer of a library keeps; None: all.
    """
    files: dict[str, list[Record]] = {}
    for record in records:
        files.setdefault(_without_numbers(str(record["path"])), []).append(record)
    last, loops = str(records[-1]["path"]), tuple(records[0]["loops"])
    paths = max(({str(record["path"]) for record in each} for each in files.values()), key=len)
    keeps = trainer_keeps if SAVE in loops else records[0].get("keeps")
    if 0 < len(paths & left) < len(paths):  # where none is left, they may have got other names
        keeps = len(paths & left)
    return LineOfSaves(
        last if len(files) == 1 else os.path.dirname(last),
        sum(max(record["bytes"] for record in each) for each in files.values()),
        sum(max(record["seconds"] for record in each) for each in files.values()),
        max(map(len, files.values())),
        len(paths),
        loops,
        keeps,
    )


def unrun_lines(records: Sequence[Sequence[Record]]) -> list[UnrunLine]:
    """Return the lines that some rank did not run, since they cannot be undone.

    Args:
        records: The records of each rank.
    """
    found = (record for of_rank in records for record in of_rank if record["kind"] == NOT_RUN)
    return list(dict.fromkeys(map(UnrunLine.of, found)))


def error_of(run: Run, ended: RankResults) -> FoundError | None:
    """Return the error that ended a run; None if it ended well."""
    error = run.error
    if error is None:
        return None
    rank = ended.first_failed
    if ended.hang is not None or rank is None:
        return _as_text(error)
    where = f"all {len(ended.reports)} ranks" if ended.failed_alike else f"rank {rank}"
    report = ended.reports[rank]
    if report is None or not report.links:
        return replace(_as_text(error), rank=rank)
    link = report.links[-1]
    file, line, inner = _place_of(link)
    head, *rest = "\n".join(link.headline or [link.type_name]).splitlines()
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("raised on ")]
    kind = report.kind
    return FoundError(
        head,
        where,
        file,
        line,
        "\n".join(dict.fromkeys([*rest, *"\n".join(notes).splitlines()])),
        kind is Failure.OUT_OF_MEMORY,
        rank,
        inner,
        bool(link.places) and is_users(link.places[-1][0]),
        link.places[-1][0] if link.places else "",
    )


_OF_A_RUN = re.compile(r" Variables in the ranks are gone;.*?(?:\.|$)|\nThe run was ended by its hang timeout\.")
"""Sentences about what is left of a run, which a dry run never leaves."""


def _as_text(error: BaseException) -> FoundError:
    """Return an error that is about ranks, and not of the program."""
    head, _, rest = _OF_A_RUN.sub("", str(error)).partition("\n")
    return FoundError(head, "", more=rest)


def _place_of(link: ErrorLink) -> tuple[str, int, str]:
    """Return file and line of the innermost place of the cell, else of any, and the user's place that it has called."""
    cells = [at for at, place in enumerate(link.places) if place[0].startswith("Cell In[")]
    if not cells:
        return (*link.places[-1][:2], "") if link.places else ("", 0, "")
    called = [place for place in link.places[cells[-1] + 1 :] if is_users(place[0])]
    inner = f"{cell_name(called[-1][0]) or called[-1][0]}, line {called[-1][1]}" if called else ""
    return (*link.places[cells[-1]][:2], inner)
