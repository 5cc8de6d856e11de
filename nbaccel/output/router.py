"""Turn the bytes that n ranks print into visible output and a log. Runs in the kernel; starts nothing, owns no pipe.

`OutputRouter` shows whole lines, tagged by rank as soon as two ranks have printed; identical lines of all ranks once,
tagged as soon as some line was not; the bars of all ranks live; and no more than a Jupyter server forwards. Everything
goes to the `RunLog`, whatever the screen leaves out. `Excerpt` chooses the lines of a long output that the notebook
keeps, and `Displays` gives the rich output of a rank display ids of its own. A rank's uncaught error does not come this
way: it is reported, whichever ranks are shown.

Reasons: docs/design/screen.md
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

from nbaccel.output.lines import LastState, LineReader
from nbaccel.output.merge import LineMerger, Merged, Unshared, cost, is_unshared
from nbaccel.output.painter import BATCH_S, LiveBars, Painter, Screen

__all__ = [
    "KEPT_BYTES",
    "Displays",
    "Excerpt",
    "OutputRouter",
    "RunLog",
    "Screen",
    "ShownLine",
]

_STREAMS = ("stdout", "stderr")
_PARTIAL_S = 0.3
# A Jupyter server stops output above 1 MB/s over 3 s: https://github.com/jupyter/notebook/issues/6428.
_BURST_BYTES = 1_000_000
_PIECE_BYTES = 256 * 1024
_OF_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+"
)
"""Line that gloo of torch 2.8 to 2.10 prints in each rank for each group that it has connected."""

_STAMP = re.compile(rb"(?:\[rank\d+\]:)?(\[?[DIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?(?=\S+:\d+\] )")
"""Prefix of messages from torch's C++ parts: "[rank1]:[W1122 05:43:12.123456789 reducer.cpp:1457] Warning: …"."""

_COLUMNS = 120
"""Columns for text without a terminal: they fit side by side in a notebook."""


class OutputRouter:
    """Takes the output of ranks by `feed`, and writes it to `screen`; call `tick` whenever `due_in` says so.

    Args:
        shown_ranks: Ranks whose text is shown; all by default. Every rank's text is logged. Lines that all ranks print
            are merged only if all are shown.
        log: Gets every line, prefixed by its rank.
        bytes_per_s: The lasting rate of the screen, after a burst of 1 MB; Jupyter servers drop output above 1 MB/s.
        kept_bytes: Bytes of text that are shown before the screen gets an excerpt of the rest; None for all of it.
        bars_on: The stream on which progress bars are shown; by default the one to which they were printed.
    """

    def __init__(
        self,
        world_size: int,
        screen: Screen,
        *,
        shown_ranks: Collection[int] | None = None,
        log: BinaryIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        bytes_per_s: int = 400_000,
        kept_bytes: int | None = None,
        bars_on: str | None = None,
    ) -> None:
        shown = [rank for rank in range(world_size) if shown_ranks is None or rank in shown_ranks]
        self._readers = {rank: {stream: LineReader() for stream in _STREAMS} for rank in shown}
        self._all_readers = [(rank, *each) for rank, readers in self._readers.items() for each in readers.items()]
        self._first = shown[0] if shown else None  # the rank whose rich output is shown
        self._log = RunLog(log)
        self._merger = LineMerger(shown, self._note, match=len(shown) == world_size)
        self._displays = Displays(f"nbaccel-{os.urandom(6).hex()}")
        self._excerpt = Excerpt(kept_bytes)
        self._taken = 0  # lines of the shown ranks
        self._bars = LiveBars()
        self._bars_on = bars_on
        self._ranks_differ = False  # a line that other ranks have not printed was shown
        self._screen = screen
        self._painter = Painter(screen)
        self._clock = clock
        self._budget = _Budget(bytes_per_s, clock())

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take bytes from the pipe of `rank`, in chunks of any size."""
        self._log.write(rank, stream, data)
        if rank not in self._readers:
            return
        now = self._clock()
        for start in range(0, len(data), _PIECE_BYTES):
            if lines := self._readers[rank][stream].feed(data[start : start + _PIECE_BYTES], now):
                self._finish_bars(rank, stream, now)
                self._push(rank, stream, lines, now)
        self._want_bar(rank, stream)

    def publish(self, rank: int, message: dict[str, Any]) -> None:
        """Show a rich message, after the text that `rank` printed before it.

        Only those of the first shown rank are shown.
        """
        if rank != self._first:
            kinds = ", ".join(message.get("data") or ()) or message["kind"]
            self._log.remark(rank, f"rich output of this rank is not shown: {kinds}")
            return
        now = self._settled(rank)
        if message["kind"] in ("display", "payload"):  # an update would be a line for each state
            self._log.add(rank, str((message.get("data") or {}).get("text/plain", "")))
        for own in self._displays.translate(message):
            self._painter.publish(own, now)

    def settle(self, rank: int) -> None:
        """Show everything that `rank` has printed so far, before the user is asked to answer it."""
        if rank in self._readers:
            self._painter.paint(self._settled(rank), at_once=True)

    def _settled(self, rank: int) -> float:
        now = self._clock()
        for stream, reader in self._readers[rank].items():
            self._push(rank, stream, reader.settle(now, at_once=True), now)
            self._want_bar(rank, stream)
        self._take_partial(now, older_than_s=0.0)
        self._show(self._merger.force(rank, self._budget.left(now)))
        return now

    def rank_done(self, rank: int) -> None:
        """End the output of `rank`: its pipes are at their end, and a last line without newline is complete."""
        self._log.finish(rank)
        if rank not in self._readers:
            return
        now = self._clock()
        for stream, reader in self._readers[rank].items():
            self._push(rank, stream, reader.finish(), now)
            self._want_bar(rank, stream)
        self._merger.done(rank)
        self._release(now)

    def tick(self) -> None:
        """Emit what is due."""
        now = self._clock()
        for rank, stream, reader in self._all_readers:
            if lines := reader.settle(now):
                self._push(rank, stream, lines, now)
                self._want_bar(rank, stream)
        self._take_partial(now, older_than_s=_PARTIAL_S)
        self._flush_log()
        self._painter.paint(now)

    def due_in(self) -> float | None:
        """Return the seconds until `tick` has something to do; None when nothing is pending."""
        now = self._clock()
        times = [self._painter.due, *[reader.settle_due for _, _, reader in self._all_readers]]
        if (lines_due := self._merger.due()) is not None:
            times.append(max(lines_due, self._budget.ready_at(now)))
        elif self._passes_partial_text:
            times += [reader.partial_due(_PARTIAL_S) for _, _, reader in self._all_readers]
        return min((max(0.0, at - now) for at in times if at is not None), default=None)

    def close(self) -> None:
        """End the output of the run: show everything that waits, of a flood its last lines."""
        for rank in self._readers:
            self.rank_done(rank)
        now = self._clock()
        for rank in self._readers:
            self._show(self._merger.force(rank, self._budget.left(now)))
        self._show_the_end()
        self._flush_log()
        self._painter.paint(now, at_once=True)
        for own in self._displays.close():
            self._painter.publish(own, now)

    @property
    def _passes_partial_text(self) -> bool:
        """Return whether text without its newline may be shown; with several ranks it would break their lines."""
        return len(self._readers) == 1

    def _finish_bars(self, rank: int, stream: str, now: float) -> None:
        """Push the bars that `rank` had finished when it printed a line to `stream`, which comes below them."""
        for other, reader in self._readers[rank].items():
            if other != stream and reader.settle_due is not None:
                self._push(rank, other, reader.settle(now, at_once=True), now)
                self._want_bar(rank, other)

    def _push(self, rank: int, stream: str, lines: Sequence[bytes], now: float) -> None:
        for is_bar, group in groupby(lines, key=lambda line: isinstance(line, LastState)):
            shown = [line if line[:1] != b"[" else _without_stamp(line) for line in group]
            if is_bar and self._bars.are_of_one_rank:
                shown = [Unshared(line) for line in shown]
            if shown := [line for line in shown if line[:1] != b"[" or not _OF_GLOO.fullmatch(line)]:
                self._taken += len(shown)
                self._merger.push(rank, self._bars_on or stream if is_bar else stream, shown, now)
                self._release(now)

    def _take_partial(self, now: float, older_than_s: float) -> None:
        self._release(now)
        if not self._passes_partial_text or self._merger.due() is not None:
            return
        for _, stream, reader in self._all_readers:
            if text := reader.take_partial(now, older_than_s):
                self._painter.add(stream, text.decode(errors="replace"))

    def _want_bar(self, rank: int, stream: str) -> None:
        self._bars.note(rank, stream, self._readers[rank][stream].bars)
        if self._screen.has_room_for_bars:
            self._screen.show_bars(self._bars.rows())
            return
        if not self._bars.are_there:
            self._painter.want("", "")
            return
        columns = shutil.get_terminal_size((_COLUMNS, 24)).columns - 1
        self._painter.want(self._bars_on or self._bars.stream, self._bars.line(columns))

    def _release(self, now: float) -> None:
        left = self._budget.left(now)
        self._show(self._merger.release(now, left, has_room=left > _BURST_BYTES / 2))

    def _show(self, merged: Iterable[Merged]) -> None:
        for line in merged:
            tag = self._tag(line)
            self._budget.take(cost(line.text, tag))
            lines = 0 if isinstance(line.text, _Note) else len(self._readers) if line.rank is None else 1
            self._take(ShownLine(line.stream, f"{tag}{line.text.decode(errors='replace')}\n", line.rank, lines))

    def _tag(self, line: Merged) -> str:
        """Return the mark of whose line it is: none while all ranks have printed the same, or one alone has printed."""
        if is_unshared(line.text):
            return ""
        if line.rank is None:
            return "[all] " if self._ranks_differ else ""
        self._ranks_differ = True
        return f"[rank {line.rank}] " if len(self._merger.speakers) > 1 else ""

    def _take(self, line: ShownLine) -> None:
        was_cut = self._excerpt.is_cut
        for shown in self._excerpt.take(line, self._clock()):
            self._painter.add(shown.stream, shown.text)
        if self._excerpt.is_cut and not was_cut:
            self._painter.add(
                line.stream, f"... from here on a line now and then, and the last ones{self._where_all_are}\n"
            )

    def _show_the_end(self) -> None:
        """Show the last lines, and repeat that some were hidden, since the first notice may be far above."""
        last = self._excerpt.last()
        for line in last:
            self._painter.add(line.stream, line.text)
        if hidden := self._taken - self._excerpt.shown:
            self._painter.add("stdout", f"{self._note(hidden).decode()}\n")

    def _flush_log(self) -> None:
        self._log.flush()
        if trouble := self._log.take_trouble():
            self._painter.add("stderr", f"the log of this run ends here, it could not be written: {trouble}\n")

    def _note(self, hidden: int) -> bytes:
        lines = "1 line" if hidden == 1 else f"{hidden:,} lines"
        where = self._where_all_are or ", they came too fast for a notebook"
        return _Note(f"... {lines} hidden{where}".encode())

    @property
    def _where_all_are(self) -> str:
        return f", all of them are in {self._log.path}" if self._log.path else ""


class _Note(bytes):
    """A line of the project among those of a rank."""


def _without_stamp(line: bytes) -> bytes:
    """Return a message of torch's C++ parts without time, process and rank, so that those of all ranks are equal.

    Example:
        >>> _without_stamp(b"[rank1]:[W1122 05:43:12.123456789 reducer.cpp:1457] Warning: find_unused_parameters")
        b'[W reducer.cpp:1457] Warning: find_unused_parameters'
        >>> _without_stamp(b"[rank1]: no message")
        b'[rank1]: no message'
    """
    stamp = _STAMP.match(line)
    return line if stamp is None else stamp[1] + b" " + line[stamp.end() :]


class _Budget:
    """Bytes that may go to the screen now: a bucket of 1 MB that refills at `bytes_per_s`."""

    def __init__(self, bytes_per_s: int, now: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = float(_BURST_BYTES)
        self._counted_at = now

    def left(self, now: float) -> float:
        refill = (now - self._counted_at) * self._bytes_per_s
        self._left, self._counted_at = min(_BURST_BYTES, self._left + refill), now
        return self._left

    def take(self, nbytes: int) -> None:
        self._left -= nbytes

    def ready_at(self, now: float) -> float:
        """Return the time at which there is enough again for a batch."""
        batch = self._bytes_per_s * BATCH_S
        return now + max(0.0, batch - self.left(now)) / self._bytes_per_s


_NOTHING = {"text/plain": ""}


class Displays:
    """Turns the display messages of a rank into messages for the screen: "display" and "update", never "clear".

    Ids that a program gives are the notebook's, so a rank may update a display of an earlier cell, and a later cell one
    of a rank's (ipython#11049); the project's own ids begin with "nbaccel-", and are not among them. Displays without
    an id get a unique one. ``clear_output`` clears displays of this run only: printed text stays where it is.

    Args:
        prefix: Unique among everything that the notebook displays.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._ids: dict[str, str] = {}  # by the rank's display id, the id on the screen
        self._shown: list[str] = []  # displayed since the last clear
        self._cleared: deque[str] = deque()  # places that the next displays take

    def translate(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the messages for the screen that follow from `message` of the rank."""
        kind = message["kind"]
        if kind == "clear":
            yield from self._clear(wait=bool(message.get("wait")))
        elif kind == "update":
            yield _message(
                "update", message, self._ids.get(message["display_id"]) or self._named(message["display_id"])
            )
        elif kind == "payload":
            yield message
        else:
            yield self._display(message)

    def close(self) -> Iterator[dict[str, Any]]:
        """Blank the places that were cleared and not used again."""
        for own_id in self._cleared:
            yield _message("update", {"data": _NOTHING}, own_id)
        self._cleared.clear()

    def _display(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = "update" if self._cleared else "display"
        if self._cleared:
            own_id = self._cleared.popleft()
        else:
            self._count += 1
            own_id = self._named(message.get("display_id") or self._count)
        self._shown.append(own_id)
        if message.get("display_id"):
            self._ids[message["display_id"]] = own_id
        return _message(kind, message, own_id)

    def _named(self, display_id: str | int) -> str:
        is_the_programs = type(display_id) is str and not display_id.startswith("nbaccel-")
        return str(display_id) if is_the_programs else f"{self._prefix}-{display_id}"

    def _clear(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Free the places of all displays; at once, or with the next display if `wait` is set."""
        if wait:
            yield from self.close()
        self._cleared.extend(self._shown)
        self._shown.clear()
        if not wait:
            for own_id in self._cleared:
                yield _message("update", {"data": _NOTHING}, own_id)


def _message(kind: str, message: dict[str, Any], own_id: str) -> dict[str, Any]:
    return {"kind": kind, "data": message["data"], "metadata": message.get("metadata") or {}, "display_id": own_id}


_LONGEST_PARTIAL = 64 * 1024


class RunLog:
    """Writes whole lines, prefixed ``[rank 1] ``; after an error in writing the log ends, and the run goes on.

    Every line of every rank is in one file. The work is per chunk, not per line: it has to keep up with a rank that
    prints 100 MB. The caller opens and closes the file.

    Args:
        file: None logs nothing.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._partial: defaultdict[tuple[int, str], bytearray] = defaultdict(bytearray)
        self._trouble = ""

    @property
    def path(self) -> str:
        """Return the path of the log; empty if there is none."""
        name = getattr(self._file, "name", None)
        return name if isinstance(name, str) else ""

    def write(self, rank: int, stream: str, data: bytes) -> None:
        head, newline, tail = data.rpartition(b"\n")
        partial = self._partial[rank, stream]
        if newline:
            self._write_lines(rank, bytes(partial) + head)
            partial.clear()
        partial += tail
        if len(partial) > _LONGEST_PARTIAL:  # progress bars: megabytes may come without a newline
            self._write_lines(rank, bytes(partial))
            partial.clear()

    def add(self, rank: int, text: str) -> None:
        """Write the text of rich output, which stands beside its picture or table."""
        if text:
            self.finish(rank)
            self._write_lines(rank, text.encode("utf-8", "backslashreplace"))

    def remark(self, rank: int, text: str) -> None:
        """Write a line of the project about output that is no text."""
        self._write_lines(rank, f"({text})".encode())

    def finish(self, rank: int) -> None:
        """Complete a last line without newline."""
        for (of_rank, _), partial in self._partial.items():
            if of_rank == rank and partial:
                self._write_lines(rank, bytes(partial))
                partial.clear()

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def take_trouble(self) -> str:
        """Return the error that ended the log, once; empty if there is none."""
        trouble, self._trouble = self._trouble, ""
        return trouble

    def _write_lines(self, rank: int, lines: bytes) -> None:
        if self._file is not None:
            prefix = b"[rank %d] " % rank
            try:
                self._file.write(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """End the log, not the run, after an error such as a full disk."""
        self._file, self._trouble = None, str(error)


KEPT_BYTES = 180_000
"""Bytes of the first lines. With the later ones, an output has about 200 kB: 2,000 lines of 100 characters."""
_LAST_BYTES = 12_288
"""Bytes of the last lines, in equal shares for the ranks: one rank may have been silent for long."""
_LAST_BYTES_OF_RANK = 4_096
_NOW_AND_THEN_S = 10.0
_PART_OF_TIME = 0.02
"""Fraction of the run's time by which the pause grows: a night is not to show a line every ten seconds."""


class ShownLine(NamedTuple):
    """A line for the screen.

    Args:
        rank: That of the line, None for all.
        lines: Number of ranks' lines it stands for.
    """

    stream: str
    text: str
    rank: int | None = None
    lines: int = 1


class Excerpt:
    """Takes every line, and returns those to show.

    A notebook file keeps every line that was shown for good. So the notebook shows the first lines, then a line from
    time to time, which proves that the run goes on, and the last ones. The log has all lines.

    Args:
        first_bytes: Bytes of the beginning to show; None for everything.

    Attributes:
        shown: Number of lines of the ranks that were returned.

    Example:
        >>> excerpt = Excerpt(first_bytes=8)
        >>> lines = [ShownLine("stdout", f"line {number}\\n") for number in range(6)]
        >>> [bool(excerpt.take(line, now=0.0)) for line in lines], excerpt.shown
        ([True, True, False, False, False, False], 2)
        >>> [line.text for line in excerpt.last()], excerpt.shown
        (['line 2\\n', 'line 3\\n', 'line 4\\n', 'line 5\\n'], 6)
    """

    def __init__(self, first_bytes: int | None) -> None:
        self.shown = 0
        self._left = first_bytes
        self._tails: defaultdict[int | None, _Tail] = defaultdict(_Tail)
        self._order = 0
        self._cut_at = self._next_at = 0.0

    @property
    def is_cut(self) -> bool:
        """Return whether the first lines are over."""
        return self._left is not None and self._left <= 0

    def take(self, line: ShownLine, now: float) -> list[ShownLine]:
        """Return the lines to show after `line` has come: the line, or nothing."""
        if not self.is_cut:
            if self._left is not None:
                self._left -= len(line.text)
                self._cut_at, self._next_at = now, now + _NOW_AND_THEN_S
        elif now >= self._next_at:
            self._next_at = now + max(_NOW_AND_THEN_S, (now - self._cut_at) * _PART_OF_TIME)
            self._tails.pop(line.rank, None)  # those after it may be the rank's last ones
        else:
            self._order += 1
            self._tails[line.rank].add(self._order, line)
            return []
        self.shown += line.lines
        return [line]

    def last(self) -> list[ShownLine]:
        """Return the last lines that are not on the screen; called when no more lines come."""
        tails = self._tails.values()
        for tail in tails:
            tail.trim(_LAST_BYTES // len(tails))
        lines = [line for _, line in sorted(numbered for tail in tails for numbered in tail.lines)]
        self._tails.clear()
        self.shown += sum(line.lines for line in lines)
        return lines


class _Tail:
    """The last lines of one rank, each with its position among those of all ranks."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, ShownLine]] = deque()
        self._nbytes = 0

    def add(self, order: int, line: ShownLine) -> None:
        self.lines.append((order, line))
        self._nbytes += len(line.text)
        self.trim(_LAST_BYTES_OF_RANK)

    def trim(self, nbytes: int) -> None:
        while len(self.lines) > 1 and self._nbytes > nbytes:
            _, line = self.lines.popleft()
            self._nbytes -= len(line.text)
