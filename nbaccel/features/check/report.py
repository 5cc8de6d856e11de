"""CheckReport: what a dry run says of the whole run, line by line. Pure, runs in the kernel.

A line is red where the run would fail or be wrong, yellow where something was not checked or is worth a thought, and ok
where it was looked at. Each red line says what to change.
"""

from __future__ import annotations

import ast
import errno
import html
import linecache
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.events import LoopKind
from nbaccel.base.hardware import Platform
from nbaccel.base.quantities import amount, duration, listed, plural
from nbaccel.features.check.dry_run.unreached_lines import not_reached
from nbaccel.features.check.findings import DryRunResult, FoundError, LineOfSaves, unrun_lines
from nbaccel.features.check.forecasts.forecast import Forecast, forecast
from nbaccel.features.flag_effects.effect_table import flags_found
from nbaccel.features.panel.svg import STYLE
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_code import CellSource

__all__ = ["OK", "RED", "YELLOW", "CheckReport", "ReportLine"]

RED, YELLOW, OK = "red", "yellow", "ok"

_SESSION_S = {Platform.KAGGLE: 12 * 3600.0, Platform.KAGGLE_BATCH: 12 * 3600.0, Platform.COLAB: 12 * 3600.0}
"""Longest sessions: kaggle.com/docs/notebooks, research.google.com/colaboratory/faq.html (at most; often less)."""

_SLOW_LOADER = 0.4
"""Share of a step's seconds spent waiting for the loader from which on it is worth a line."""

_WAIT_S = 0.002
"""Waiting for a batch that worker processes would not make shorter: to send one takes about as long."""

_MEMORY = (0.96, 1.08)
"""Peak of a whole run relative to that of its dry run: allocators keep other blocks, and histories grow."""

_TAKEN = 0.03
"""Share of a device from which on it is worth a word that others than torch's allocator have it."""

_STYLE = (
    f"{STYLE}.nbaccel.check div{{display:flex;gap:10px;padding:1px 0}}.nbaccel.check b{{flex:0 0 52px;font-weight:600}}"
    ".nbaccel.check span{flex:1;white-space:pre-wrap;overflow-wrap:anywhere}.nbaccel.check .red b{color:var(--bad)}"
    ".nbaccel.check .ok b{color:var(--good)}.nbaccel.check .yellow b{color:var(--late)}.nbaccel{--late:#8a5a00}"
    "@media(prefers-color-scheme:dark){.nbaccel{--late:#f0c05a}}"
    "body[data-jp-theme-light=true] .nbaccel,html[theme=light] .nbaccel,body.vscode-light .nbaccel{--late:#8a5a00}"
    "body[data-jp-theme-light=false] .nbaccel,html[theme=dark] .nbaccel,body.vscode-dark .nbaccel{--late:#f0c05a}"
)
"""The panel's style sheet, and what a report needs besides: an amber that is readable on both grounds."""

_PARTS = ("loader", "host to device", "forward", "backward", "communication", "optimizer", "saving", "program")
"""Parts of a step in the order of the report, see `StepTimes`."""

_NAMES = {"saving": "saves", "program": "your own code"}
"""Names of these parts in the report, where they differ."""

_CUT_OFF = re.compile(r"\[\s*:[^\]\n]*(\blen\(|samples)")
"""A slice such as ``[: len(loader.dataset) - samples_seen]``, by which programs drop what fills up the last round."""

_OFFLINE = ("offline mode", "hf_hub_offline", "outgoing traffic has been disabled")
"""Words of errors of the Hugging Face Hub, in small letters."""

_FULL = (os.strerror(errno.ENOSPC), "file write failed")
"""Words of errors about a full disk: the system's, and those of `torch.save`."""

_NO_NAME = re.compile(r"(?:NameError|UnboundLocalError): .*?'(\w+)'")

_SMALLEST_COUNT = 10

_ACCELERATOR = "accelerator"
_MOST_NAMES = 6
_SMALL_BYTES = 1000
"""Size of a value that is not listed where the cell brings back all that it leaves."""


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One line of a report.

    Args:
        level: "red", "yellow" or "ok".
    """

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report of a check."""

    lines: Sequence[ReportLine]

    @classmethod
    def of(
        cls,
        found: DryRunResult,
        source: CellSource,
        plan: LaunchPlan,
        changed: Sequence[str] = (),
        platform: Platform = Platform.SCRIPT,
        more: Sequence[ReportLine] = (),
    ) -> CheckReport:
        """Return the report on what a dry run of `source` found.

        Args:
            changed: Files that the check changed, by path.
            more: Lines of a `FullCheck`.
        """
        writer = _Writer(found, source, plan, platform)
        lines = [*writer.lines(), *more, *_files(changed)]
        order = {RED: 0, YELLOW: 1, OK: 2}
        return cls(sorted(lines, key=lambda line: order[line.level]))

    @property
    def has_red(self) -> bool:
        return any(line.level == RED for line in self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<div class="{line.level}"><b>{line.level}:</b><span>{html.escape(line.text)}</span></div>'
            for line in self.lines
        )
        return f'<style>{_STYLE}</style><div class="nbaccel check">{rows}</div>'

    def bundle(self) -> dict[str, str]:
        """Return the report as a notebook shows it."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}


class _Writer:
    """Writes the lines of one report."""

    def __init__(self, found: DryRunResult, source: CellSource, plan: LaunchPlan, platform: Platform) -> None:
        self._found = found
        self._source = source
        self._plan = plan
        self._platform = platform
        ends = [found.last("end", rank) for rank in range(found.world_size)]
        reached = {line for end in ends for line in end.get("reached", ())}
        self._gaps = not_reached(source.code, reached) if ends[0] else []
        self._forecast: Forecast | None = None
        if found.of_kind("whole"):
            self._forecast = forecast(found.records[0], found.table, found.noise)

    def lines(self) -> Iterator[ReportLine]:
        yield from self._end()
        for line in unrun_lines(self._found.records):
            yield ReportLine(YELLOW, line.said(self._source.name, "a check"))
        yield from self._flags()
        yield from self._results()
        yield from self._gathers()
        yield from self._memory()
        yield from self._steps()
        yield from self._time()
        yield from self._disk()
        yield from self._out()

    # --- does it end

    def _end(self) -> Iterator[ReportLine]:
        found, error = self._found, self._found.error
        dry_run_s = max(found.seconds - found.setup_s, 0.0)
        took = f"{plural(found.world_size, 'rank')}, set-up {duration(found.setup_s)}, dry run {duration(dry_run_s)}"
        if error is not None:
            yield self._error(error)
            rest = self._rest(error.line)
            if not found.is_hung and self._is_in_cell(error.file) and rest:
                yield ReportLine(YELLOW, f"not reached: {rest}")
            return
        left = found.last("end").get("left", "")
        if left:
            yield ReportLine(YELLOW, f"a loop could be ended only by leaving it: {left}")
        if self._gaps:
            yield ReportLine(YELLOW, f"not reached: {', '.join(map(_lines_words, self._gaps))}")
        if not left:
            yield ReportLine(OK, f"the cell comes to its end ({took})")

    def _flags(self) -> Iterator[ReportLine]:
        """Report flags that have no effect above the loop that trained in the dry run."""
        facts = self._found.facts[0] if self._found.facts else {}
        if (kind := facts.get("loop_kind")) is not None:
            said = flags_found(self._plan.flags, LoopKind(kind), facts["in_force"])
            if said.refusal:
                yield ReportLine(RED, f"the run would end before its first step: {said.refusal}")
            yield from (ReportLine(YELLOW, line) for line in said.lines)

    def _error(self, error: FoundError) -> ReportLine:
        place = f"line {error.line}" if error.line and self._is_in_cell(error.file) else ""
        if place and error.inner:
            place += f" ({error.inner})"
        if not place and error.line:
            place = f"{error.file}, line {error.line}"
        head = ", ".join(filter(None, [place, error.where]))
        more = "".join(f"\n  {line.strip()}" for line in error.more.splitlines() if line.strip())
        if not error.line and (loop := self._found.loop_at_end(error.rank)):
            file = "" if self._is_in_cell(loop["file"]) else f" of {loop['file']}"
            more += f"\n  rank {error.rank} was in the loop in line {loop['line']}{file}: {loop['head']}"
        if reason := self._why_not_checked(error):
            return ReportLine(
                YELLOW, f"{head}: {error.text}{reason}, so this line, and what follows it, could not be checked"
            )
        if any(words in f"{error.text}\n{error.more}".lower() for words in _OFFLINE):
            return ReportLine(
                YELLOW, f"{head}: it needs the network, which a check leaves alone: load it in a cell before this one"
            )
        if error.is_memory:
            at = _at_batch(self._found.last("peak", error.rank).get("batch"))
            return ReportLine(RED, f"{head}: out of memory{at}: {error.text}{more}")
        return ReportLine(RED, f"{head}: {error.text}{more}" if head else f"{error.text}{more}")

    def _why_not_checked(self, error: FoundError) -> str:
        """Return why an error may be one of the check alone, as the end of its line; empty if it is the run's too."""
        if counts := self._counts_of_cut_batches(error.text):
            return f"; {counts} is what the rounds of this check come to"
        if self._found.may_be_of_few_rounds():
            return "; after the few rounds of a check that may be so"
        if name := self._bound_by_a_condition(error):
            return f"; {name} is bound under a condition that did not hold in the few rounds of a check"
        if os.strerror(errno.EBADF) in error.text:
            return "; a file that the notebook has open, and that is too large for a copy, can only be read in a check"
        room_bytes = self._found.free_bytes(tempfile.gettempdir())
        if _is_about_disk(error.text) and room_bytes < self._found.free_bytes(os.getcwd()):
            return (
                f": all files of this check have room for {amount(room_bytes)}, less than the disk has for the run "
                "(let TMPDIR be a folder of a larger disk)"
            )
        lines = unrun_lines([self._found.records[error.rank]])
        if lines and not error.is_memory and not _NO_NAME.match(error.text):
            places = listed([each.place(self._source.name) for each in lines])
            return f"; {places} {'was' if len(lines) == 1 else 'were'} not run in this check"
        return ""

    def _counts_of_cut_batches(self, text: str) -> int | None:
        """Return a number in an error that counts what cut loaders gave, to one rank or to all; None if there is none.

        A number below `_SMALLEST_COUNT` is as likely that of channels or classes.
        """
        numbers = {int(word) for word in re.findall(r"\d+", text)}
        counts = {count for count in self._found.samples_of_cuts() if count >= _SMALLEST_COUNT}
        # Axes of a plot: one entry for each epoch or batch of the whole run, and one for each of the check.
        pairs = [(whole + more, had + more) for whole, had in self._found.rounds_of_cuts() for more in (0, 1)]
        counts |= {had for whole, had in pairs if whole != had and whole in numbers}
        return max(counts & numbers, default=None)

    def _bound_by_a_condition(self, error: FoundError) -> str:
        """Return the name that an error misses, if an `if` above that line would bind it; else an empty text."""
        missing = _NO_NAME.match(error.text)
        if missing is None or not self._is_in_cell(error.file) or not self._found.of_kind("loop"):
            return ""
        conditions = [node for node in ast.walk(self._source.parsed()) if isinstance(node, ast.If)]
        above = (part for node in conditions for part in [*node.body, *node.orelse] if part.lineno < error.line)
        return missing[1] if missing[1] in self._bound_in_gaps(*above) else ""

    def _is_in_cell(self, file: str) -> bool:
        return file == self._source.name

    def _rest(self, line: int) -> str:
        """Return the statements of the cell's top level that come after a line, as a range of lines; empty for none."""
        later = [node for node in self._source.parsed().body if node.lineno > line]
        return _lines_words((later[0].lineno, later[-1].end_lineno or later[-1].lineno)) if later else ""

    # --- is it right

    def _results(self) -> Iterator[ReportLine]:
        if self._found.error is not None:
            return
        asked = set(self._plan.options.names_back or ())
        differing = list(self._found.differing())
        for name, values in differing:
            if name not in asked:
                continue
            shown = ", ".join(f"{value} in rank {rank}" for rank, value in enumerate(values[:4]))
            found = f"{name} depends on the rank ({shown}), and --out brings that of rank 0"
            if name in self._found.trained:
                yield ReportLine(YELLOW, f"{found}, of its part of the samples")
            else:
                yield ReportLine(
                    RED,
                    f"{found}: gather what it is computed from first, predictions and labels by "
                    "accelerator.gather_for_metrics",
                )
        of_batches = _names_of_batches(self._source.parsed())
        others = [name for name, _ in differing if name not in asked and name not in of_batches]
        if others and self._plan.options.names_back is None:
            yield ReportLine(
                YELLOW, f"differs between the ranks, and the notebook gets that of rank 0: {listed(others)}"
            )

    def _gathers(self) -> Iterator[ReportLine]:
        told = set()
        for record in self._found.of_kind("gather"):
            place = record.get("line"), record.get("file")
            if place in told:
                continue
            told.add(place)
            is_here = self._is_in_cell(str(place[1]))
            where = f"line {place[0]}: " if is_here else ""
            text = self._source.code if is_here else "".join(linecache.getlines(str(place[1])))
            is_cut_off = _CUT_OFF.search(text) is not None
            unless = ", unless they are cut off afterwards" if is_cut_off else ""
            yield ReportLine(
                YELLOW if is_cut_off else RED,
                f"{where}accelerator.gather counts {plural(record['repeated'], 'sample')} twice, those that fill up "
                f"the last batch ({record['rows']} rows){unless}: use accelerator.gather_for_metrics",
            )

    # --- does it fit

    def _memory(self) -> Iterator[ReportLine]:
        for restart in self._found.restarts[-1:]:
            yield ReportLine(
                YELLOW,
                f"{restart}. The whole run may meet such a batch after hours, and begin again: give the loader a "
                "smaller batch_size",
            )
        gpus = self._plan.devices.gpus
        kind = "device_reserved" if gpus else "host"
        peaks = [self._found.peak(kind, rank) for rank in range(self._found.world_size)]
        values = [int(each["bytes"]) for each in peaks if each]
        if not values:
            return
        at = _at_batch(max((each for each in peaks if each), key=lambda each: int(each["bytes"])).get("batch"))
        low, high = (round(share * max(values)) for share in _MEMORY)
        words = f"{amount(low)} to {amount(high)}"
        if len(values) > 1:
            words += " in the largest rank"
        if gpus:
            total = min(gpu.total_bytes for gpu in gpus)
            rooms = [self._found.last("peak", rank).get("room", total) for rank in range(self._found.world_size)]
            room = min([total, *rooms])
            words = f"memory{at}: {words} of {amount(total)} on the device"
            if room < (1 - _TAKEN) * total:
                words += f", where CUDA itself and other processes have {amount(total - room)}"
            yield (
                ReportLine(OK, words)
                if high <= room
                else ReportLine(YELLOW, f"{words}, which may be too little: a smaller batch_size leaves more of it")
            )
        else:
            yield ReportLine(OK, f"memory{at}: {words} of the host")

    def _steps(self) -> Iterator[ReportLine]:
        timed = self._found.of_kind("step_times")
        passes = [each for each in timed if _is_of_steps(each) and any(each["seconds"].values())]
        passes = [each for each in passes if each["seconds"].get("optimizer")] or passes  # those that train
        if not passes:
            return
        best = max(passes, key=lambda each: sum(each["seconds"].values()))
        seconds = {name: part for name in _PARTS if (part := best["seconds"].get(name))}
        whole = sum(seconds.values())
        shares = ", ".join(
            f"{_NAMES.get(name, name)} {part / whole:.0%}" for name, part in seconds.items() if part / whole >= 0.01
        )
        a_batch = whole / best["batches"]
        yield ReportLine(OK, f"a batch takes {_short(a_batch)}: {shares}")
        share = seconds.get("loader", 0.0) / whole
        if share > _SLOW_LOADER and share * a_batch > _WAIT_S:
            yield ReportLine(
                YELLOW,
                f"{best.get('name') or 'the loader'} takes {share:.0%} of each batch: try another num_workers, or a "
                "cheaper data set; --speed 3min measures what helps",
            )

    def _time(self) -> Iterator[ReportLine]:
        expected = self._forecast
        if expected is None or self._found.error is not None:
            return
        if self._found.last("end").get("left"):
            yield ReportLine(YELLOW, "the time cannot be forecast: a loop was left, and its rounds are not known")
            return
        start_s = self._found.seconds - float(self._found.last("whole").get("seconds", 0.0))
        for unknown in expected.unknown:
            yield ReportLine(YELLOW, f"the time cannot be forecast: {unknown}")
        for early in expected.may_end_early:
            yield ReportLine(OK, early)
        if expected.high_s is None:
            return
        low, high = expected.low_s + start_s, expected.high_s + start_s
        words = f"the whole run takes {_about(low)} to {_about(high)}"
        limit_s, whose = self._limit()
        if limit_s is None:
            yield ReportLine(OK, words)
        elif low > limit_s and expected.may_end_early:
            yield ReportLine(YELLOW, f"{words} unless it ends earlier, and {whose} ends it after {duration(limit_s)}")
        elif low > limit_s:
            yield ReportLine(
                RED,
                f"{words}, and {whose} ends it after {duration(limit_s)}: fewer epochs, or --checkpoint-every 10min "
                "and --resume in the next session",
            )
        elif high > limit_s:
            yield ReportLine(YELLOW, f"{words}, and {whose} ends it after {duration(limit_s)}")
        else:
            yield ReportLine(OK, f"{words}; {whose} ends it after {duration(limit_s)}")

    def _limit(self) -> tuple[float | None, str]:
        limit = self._plan.options.limit
        if limit is not None:
            return limit.seconds, limit.flag
        session = _SESSION_S.get(self._platform)
        return session, "a session of " + self._platform.value.partition(",")[0]

    def _disk(self) -> Iterator[ReportLine]:
        for save in self._found.saves():
            count = self._times_of(save)
            kept = count if save.paths > 1 and count is not None else 1
            if save.keeps is not None:
                kept = min(kept, save.keeps + 1)  # the oldest one goes when the next is complete
            whole = save.nbytes * kept
            free = self._found.free_bytes(save.path)
            times = "" if count is None else f", {plural(count, 'time')} in the whole run"
            place = f" to {save.path}" if save.path else ""  # a library may write to a file that has no name
            words = f"a save{place} has {amount(save.nbytes)} and takes {_short(save.seconds)}{times}"
            if whole > free:
                yield ReportLine(
                    RED,
                    f"{words}: that is {amount(whole)}, and the disk has {amount(free)} free: keep fewer of them, or "
                    "name a folder on another disk",
                )
            else:
                yield ReportLine(OK, f"{words}; {amount(free)} free")

    def _times_of(self, save: LineOfSaves) -> int | None:
        if not save.loops:
            return save.count
        if self._forecast is None or self._found.error is not None:  # then its loops have not had their rounds
            return None
        times = self._forecast.times(save.loops[-1], save.count)
        return None if times is None else round(times)

    def _out(self) -> Iterator[ReportLine]:
        found = self._found
        if found.error is not None:
            return
        facts: Mapping[str, Any] = found.facts[0] if found.facts else {}
        sizes = facts.get("left_bytes", {})
        later = self._bound_in_gaps(self._source.parsed())
        for level, missing in ((RED, found.missing.keys() - later), (YELLOW, found.missing.keys() & later)):
            if missing:
                reasons = ", ".join(f"{name} ({why})" for name, why in found.missing.items() if name in missing)
                unless = ", unless by a line that was not reached" if level is YELLOW else ""
                yield ReportLine(level, f"--out would not bring {reasons}{unless}")
        if self._plan.options.names_back is None:
            sizes = {name: size for name, size in sizes.items() if size >= _SMALL_BYTES and name != _ACCELERATOR}
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        parts = [f"{name} ({amount(size)})" for name, size in largest[:_MOST_NAMES]]
        if len(largest) > _MOST_NAMES:
            parts.append(f"{len(largest) - _MOST_NAMES} smaller ones")
        if parts:
            yield ReportLine(OK, f"comes back: {', '.join(parts)}")

    def _bound_in_gaps(self, *trees: ast.AST) -> set[str]:
        """Return the names that lines bind which were not reached, such as those of the last epoch."""
        bound = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
        return {
            node.id
            for node in bound
            if isinstance(node.ctx, ast.Store) and any(first <= node.lineno <= last for first, last in self._gaps)
        }


def _is_of_steps(times: Mapping[str, Any]) -> bool:
    """Return whether a pass shows the parts of a step; one left after one batch, ``next(iter(loader))``, may not."""
    batches = times.get("batches", 0)
    return batches > 1 or (batches == 1 and bool({"forward", "backward"} & times["seconds"].keys()))


def _names_of_batches(tree: ast.Module) -> set[str]:
    """Return the names that are bound in innermost loops alone: each rank has its own batches, and its own loss.

    Example:
        >>> sorted(_names_of_batches(ast.parse("for e in n:\\n  for x in y: loss = x\\n  acc = f()\\nscore = acc")))
        ['loss', 'x']
    """
    inside: set[str] = set()
    outside: set[str] = set()

    def look(node: ast.AST, is_innermost: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.For | ast.While):
                inner = (each for part in child.body for each in ast.walk(part))
                look(child, not any(isinstance(each, ast.For | ast.While) for each in inner))
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                (inside if is_innermost else outside).add(child.id)
            else:
                look(child, is_innermost)

    look(tree, False)
    return inside - outside


def _is_about_disk(text: str) -> bool:
    """Return whether an error says that a disk is full; shared memory may be, too."""
    return any(words in text for words in _FULL) and "shm" not in text and "</torch_" not in text


def _files(changed: Sequence[str]) -> Iterator[ReportLine]:
    for path in changed:
        yield ReportLine(YELLOW, f"changed by this check: {path}")


def _lines_words(lines: tuple[int, int]) -> str:
    first, last = lines
    return f"line {first}" if first == last else f"lines {first}-{last}"


def _at_batch(batch: Mapping[str, Any] | None) -> str:
    if not batch or batch.get("kind") != "longest":
        return ""
    size = batch.get("size")
    return f" at the longest batch{f' (size {size:g})' if size else ''}"


def _about(seconds: float) -> str:
    """Format a time that is known roughly.

    Example:
        >>> _about(7790.0), _about(75.4), _about(3.21), _about(1e6)
        ('2 h 10 min', '1 min 15 s', '3.2 s', '278 h')
    """
    unit = next(unit for least, unit in ((360_000, 3600), (3600, 60), (10, 1), (0, 0.1)) if seconds >= least)
    return duration(round(seconds / unit) * unit)


def _short(seconds: float) -> str:
    """Format a short duration.

    Example:
        >>> _short(0.0004), _short(0.0123), _short(2.0)
        ('0.4 ms', '12 ms', '2 s')
    """
    if seconds >= 1.0:
        return duration(seconds)
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 1.0 else f"{milliseconds:.1g} ms"
