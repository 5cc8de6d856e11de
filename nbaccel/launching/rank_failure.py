"""RankFailure: the failure that ended a run, as one error of the kernel. Runs in the kernel.

It raises the user's own class if it is available, otherwise a class of the same name, with one traceback that names the
rank and the cell's line.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from nbaccel.base.short_tracebacks import show_as
from nbaccel.errors import RanksFailed
from nbaccel.launching.ipc.reports import ErrorLink, Place

__all__ = ["Naming", "RankFailure"]


_CONTEXT_LINES = 2


_FIRST_PLACES, _LAST_PLACES = 10, 20
"""Number of places of a long traceback that are shown, at its beginning and end; a recursion has a thousand."""


Naming = Callable[[str], str | None]  # filename -> "Cell In[5]"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure that ended a run, as the kernel shows it.

    Args:
        rank: The first rank that failed.
        error: The user's exception if it could be sent, otherwise None.
        peers: One sentence on the end of the others.
        is_everyones: All ranks failed with the same error.
        node: The machine that the rank ran on; empty if all ran on this one.
    """

    rank: int
    world_size: int
    links: list[ErrorLink]
    error: BaseException | None = None
    peers: str = ""
    is_everyones: bool = False
    node: str = ""

    def exception(self, cell_name: Naming | None = None, hint: str = "") -> BaseException:
        """Return the exception to raise in the kernel: the user's class, rendered with the rank's own traceback.

        Args:
            hint: A last line for the reader.
        """
        error = self._stand_in() if self.error is None else self.error
        lines = self.render(cell_name) + ([hint] if hint else [])
        error.__traceback__ = None
        error.__context__ = None
        error.__cause__ = _RankTraceback("\n".join(lines))
        error.add_note(self.where())
        if hint:
            error.add_note(hint)
        show_as(error, lines, [*self.links[-1].headline, f"{self.where()}."])
        return error

    def _stand_in(self) -> BaseException:
        last = self.links[-1]
        kind = type(last.type_name.rpartition(".")[2], (RanksFailed,), {"__module__": "__main__"})
        text = last.headline[-1].partition(": ")[2] if last.headline else ""
        return cast(BaseException, kind(text, self.rank, self.world_size))

    def where(self) -> str:
        place = f"raised on {self._who}"
        return f"{place}; {self.peers}" if self.peers else place

    @property
    def _who(self) -> str:
        if self.is_everyones:
            return f"all {self.world_size} ranks"
        return f"rank {self.rank} of {self.world_size}{self.node and f' on {self.node}'}"

    def render(self, cell_name: Naming | None = None) -> list[str]:
        """Return the traceback as lines of text; `cell_name` turns the file name of a cell into "Cell In[5]"."""
        lines: list[str] = []
        for link in self.links:
            if link.relation and lines:
                lines += ["", f"... {link.relation}", ""]
            title = f"{link.type_name.ljust(40)} on {self._who} (most recent call last)"
            lines.append(title)
            for place in link.places[:_FIRST_PLACES]:
                lines += _render_place(place, cell_name)
            if (left_out := len(link.places) - _FIRST_PLACES - _LAST_PLACES) > 0:
                lines.append(f"... {left_out} more calls ...")
            for place in link.places[max(_FIRST_PLACES, len(link.places) - _LAST_PLACES) :]:
                lines += _render_place(place, cell_name)
            lines.append("")
            lines += link.headline
        lines += [self.where() + "."]
        return lines


class _RankTraceback(Exception):
    """Carries a rank's traceback as text, so that plain Python prints it as the cause."""

    def __init__(self, text: str) -> None:
        super().__init__("\n" + text)


def _render_place(place: Place, cell_name: Naming | None) -> list[str]:
    filename, number, function, line = place
    cell = filename if filename.startswith("Cell In[") else (cell_name(filename) if cell_name else None)
    inside = "" if function in ("<module>", "") else f", in {function}"
    if cell is None:
        shown = [f"File {filename}:{number}{inside}"]
        return [*shown, f"    {line}"] if line else shown
    source = linecache.getlines(filename)
    shown = [f"{cell}, line {number}{inside}"]
    first = max(1, number - _CONTEXT_LINES)
    for at in range(first, min(len(source), number + _CONTEXT_LINES) + 1):
        arrow = "---->" if at == number else "     "
        shown.append(f"{arrow} {at:>4} {source[at - 1].rstrip()}".rstrip())
    return shown if source else [*shown, f"    {line}"]
