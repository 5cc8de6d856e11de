"""Lines: cuts the bytes of one stream of one rank into whole lines and progress bars. Runs in the kernel; pure.

Plain text takes a fast path that only splits. Text that rewrites itself (carriage returns, cursor movements of tqdm)
goes through a small model of a terminal: rows that are still being rewritten are a bar, and a row that the cursor has
left for good is a line. It knows nothing of other ranks, and nothing of a screen.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

__all__ = [
    "LastState",
    "LineReader",
]

_LONGEST_LINE = 64 * 1024
_CUT, _CONTINUED = b" [line cut here]", b"[same line] "
_LEFT_FOR_GOOD_S = 0.1
"""Seconds after which a row is finished: tqdm goes to the row of a nested bar and returns within microseconds."""
_MOST_ROWS = 50

_COLOUR_FREE = rb"[@-ln-~]"  # the last character of every escape sequence but `m`, which only colours
_REWRITES = re.compile(rb"\x1b(?:\[[0-9;?]*(?:" + _COLOUR_FREE + rb"|\Z)|\Z)")
_CONTROL = re.compile(r"(\n|\x1b\[[0-9;?]*" + _COLOUR_FREE.decode() + ")")
_WHOLE_BAR = re.compile(r"\[[\d:?]+(?:<[\d:?]+)?, [^\]]*\] *\Z")
"""End of a state of tqdm: "[00:01<00:02, 3.45it/s]", and blanks if its previous state was longer."""
_UNFINISHED = re.compile(r"(?:\r|\x1b(?:\[[0-9;?]*)?)\Z")  # a carriage return may yet become the end of a line


class LastState(bytes):
    """The last state of a progress bar, with times that no other rank's has."""


class LineReader:
    """Cuts a stream of bytes, in chunks of any size, into lines. The caller passes the times."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._partial_since = 0.0
        self._terminal: _Terminal | None = None

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines, without newline, that `data` completes."""
        if self._terminal is None and (b"\r" in data or (b"\x1b" in data and _REWRITES.search(data))):
            self._terminal = _Terminal()
            data, self._partial = bytes(self._partial) + data, bytearray()
        if self._terminal is not None:
            return self._close_terminal(self._terminal.feed(data, now), now)
        head, newline, tail = data.rpartition(b"\n")
        lines = []
        if newline:
            lines = bytes(self._partial + head).split(b"\n")
            self._partial = bytearray()
        if tail and not self._partial:
            self._partial_since = now
        self._partial += tail
        if len(self._partial) + len(data) > _LONGEST_LINE:
            return self._cut(lines)
        return lines

    @property
    def bars(self) -> list[str]:
        """Return the rows that are being rewritten now; empty when there are none."""
        return self._terminal.bars if self._terminal else []

    def take_partial(self, now: float, older_than_s: float) -> bytes:
        """Return text without its newline that has waited long enough, up to the last whole character."""
        if not self._partial or now < self._partial_since + older_than_s:
            return b""
        end = _end_of_last_character(self._partial)
        text, self._partial = bytes(self._partial[:end]), self._partial[end:]
        self._partial_since = now
        return text

    def settle(self, now: float, *, at_once: bool = False) -> list[bytes]:
        """Return bars that the cursor has left for good, or with `at_once` all that it has left."""
        if self._terminal is None:
            return []
        return self._close_terminal(self._terminal.settle(float("inf") if at_once else now), now)

    def finish(self) -> list[bytes]:
        """Return the last lines; called when no more bytes come."""
        lines = self._terminal.finish() if self._terminal else []
        if self._partial:
            lines.append(bytes(self._partial))
        self._terminal, self._partial = None, bytearray()
        return lines

    def partial_due(self, older_than_s: float) -> float | None:
        """Return the time at which `take_partial` will have text."""
        return self._partial_since + older_than_s if self._partial else None

    @property
    def settle_due(self) -> float | None:
        """Return the time at which `settle` will have lines."""
        return self._terminal.settle_due if self._terminal else None

    def _close_terminal(self, lines: list[bytes], now: float) -> list[bytes]:
        """Return to the fast path as soon as nothing is being rewritten."""
        if self._terminal is not None and (rest := self._terminal.plain_rest()) is not None:
            self._terminal = None
            self._partial, self._partial_since = bytearray(rest), now
        return lines

    def _cut(self, lines: list[bytes]) -> list[bytes]:
        """Cut lines and the unfinished rest into marked pieces of at most 64 KiB."""
        pieces = [piece for line in lines for piece in _pieces(line)]
        *full, rest = _pieces(bytes(self._partial))
        self._partial = bytearray(rest)
        return pieces + full


def _pieces(line: bytes) -> list[bytes]:
    pieces = []
    while len(line) > _LONGEST_LINE:
        end = _end_of_last_character(line[:_LONGEST_LINE])
        pieces.append(line[:end] + _CUT)
        line = _CONTINUED + line[end:]
    return [*pieces, line]


def _end_of_last_character(text: bytes | bytearray) -> int:
    """Return the end of the last whole UTF-8 character of `text`."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # the first byte of a character of several bytes
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < width else len(text)
        if byte < 0x80:
            break
    return len(text)


@dataclass(slots=True)
class _Row:
    """One row of the terminal.

    Args:
        is_bar: The cursor went back to its beginning.
    """

    text: str = ""
    column: int = 0
    is_bar: bool = False

    def write(self, text: str) -> None:
        for index, piece in enumerate(text.split("\r")):
            if index:
                self.column, self.is_bar = 0, True
            end = self.column + len(piece)
            self.text = self.text[: self.column] + piece + self.text[end:]
            self.column = end
        if self.is_bar and self.column < len(self.text) and _WHOLE_BAR.search(self.text[: self.column]):
            # tqdm draws the last state of an inner bar over the outer bar's row without wiping it.
            self.text = self.text[: self.column]

    def erase(self, everything: bool) -> None:
        self.text = "" if everything else self.text[: self.column]

    @property
    def is_blank(self) -> bool:
        return not self.text.strip()

    def line(self) -> bytes:
        if not self.is_bar:
            return self.text.encode()
        text = self.text.rstrip()
        return LastState(text.encode()) if _WHOLE_BAR.search(text) else text.encode()


class _Terminal:
    """Rows that may still change, and the cursor among them."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._cursor = 0
        self._below_since: float | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        text = self._held + self._decoder.decode(data)
        text = text.replace("\r\n", "\n")
        self._held = found[0] if (found := _UNFINISHED.search(text)) else ""
        lines: list[bytes] = []
        parts = _CONTROL.split(text[: len(text) - len(self._held)])
        for index, part in enumerate(parts):
            if index % 2 == 0:
                if part:
                    lines += self._write(part)
            else:
                lines += self._control(part, now)
        return lines

    @property
    def bars(self) -> list[str]:
        if self._held != "\r" and not any(row.is_bar for row in self._rows):
            return []
        return [row.text.rstrip() for row in self._rows if not row.is_blank]

    @property
    def settle_due(self) -> float | None:
        return None if self._below_since is None else self._below_since + _LEFT_FOR_GOOD_S

    def settle(self, now: float) -> list[bytes]:
        return self._leave(self._cursor) if self.settle_due is not None and now >= self.settle_due else []

    def finish(self) -> list[bytes]:
        self._rows[self._cursor].write(self._held + self._decoder.decode(b"", final=True))
        while len(self._rows) > 1 and self._rows[-1].is_blank:
            self._rows.pop()
        last = self._rows[-1]
        return self._leave(len(self._rows) - last.is_blank)

    def plain_rest(self) -> bytes | None:
        """Return the unfinished line, if it is the only row, the cursor is at its end and nothing rewrites it."""
        (row, *others), undecoded = self._rows, self._decoder.getstate()[0]
        is_plain = not (others or row.is_bar or self._held or undecoded) and row.column >= len(row.text)
        return row.text.encode() if is_plain else None

    def _write(self, text: str) -> list[bytes]:
        row = self._rows[self._cursor]
        row.write(text)
        if len(row.text) <= _LONGEST_LINE:
            return []
        *full, rest = _pieces(row.line())
        row.text = rest.decode(errors="replace")
        row.column = len(row.text)
        return self._leave(self._cursor) + full

    def _control(self, control: str, now: float) -> list[bytes]:
        if control == "\n":
            return self._down(now)
        row = self._rows[self._cursor]
        if control.endswith("A"):
            count = control[2:-1]
            self._cursor = max(0, self._cursor - (int(count) if count.isdigit() else 1))
            self._rows[self._cursor].column = row.column
            self._below_since = self._below_since if self._cursor else None
        elif control.endswith("K"):
            row.erase(everything=control[2:-1] == "2")
        return []

    def _down(self, now: float) -> list[bytes]:
        row = self._rows[self._cursor]
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(_Row())
        self._rows[self._cursor].column = 0
        is_line = not row.is_bar and (self._cursor == 1 or not row.is_blank)
        if is_line or self._cursor > _MOST_ROWS:
            return self._leave(self._cursor)
        if self._below_since is None:
            self._below_since = now
        return []

    def _leave(self, count: int) -> list[bytes]:
        """Finish the first `count` rows: bars that were wiped out are dropped, other rows are lines."""
        rows, self._rows = self._rows[:count], self._rows[count:] or [_Row()]
        self._cursor = max(0, self._cursor - count)
        self._below_since = None
        return [row.line() for row in rows if not (row.is_bar and row.is_blank)]
