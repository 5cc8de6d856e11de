"""What ranks print, in a real kernel: ``make bench ROWS=output``. Seconds, lines that arrived whole, messages.

Two ranks print 4,000 and 200,000 lines of three arguments each. Beside us a plain cell that prints as many alone, and
Accelerate's and Fabric's launchers, whose ranks write to the kernel's own sockets: of theirs only the 4,000, once.

Of a flood we show the first and the last lines and say where all of them are; so for 200,000 lines the log is what has
to be whole, and the screen, the messages and the kernel's memory are what must not grow with the lines.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.findings import Finding, options_of, tell
from benchmarks.harness import installed
from benchmarks.kernels import LAUNCHERS, NEEDS, PLAIN, Launcher, new_kernel
from kernel.harness import Cell, RealKernel

FEW, MANY = 4_000, 200_000

_MOST_S, _MOST_MESSAGES = 0.3, 60
_BURST_MB, _MB_PER_S = 1.0, 0.4
"""What the screen may get of a flood at most: at once, and for each second that the run lasts."""
_LAST_LINES_MB = 0.1
_MOST_GROWTH_MB = 30

_PATIENCE_S = 600.0

_PRINTS = """
import os
rank = os.environ.get("RANK", 0)
for step in range({lines}):
    print("rank", rank, f"step {{step}}")
"""

_LOG = re.compile(r"lines? hidden, all of them are in (\S+)")
_SHOWN = re.compile(r"(?:\[rank (?P<tag>\d)\] )?(?P<line>rank (?P<rank>\d) step \d+)")


@dataclass(frozen=True, slots=True)
class Flood:
    """What came of so many lines. whole: those on the screen that are as they were printed; logged: those in the log.

    growth_bytes: of the kernel's memory, at its highest.
    """

    seconds: float
    whole: int
    logged: int
    messages: int
    shown_bytes: int
    growth_bytes: int


def whole_lines(text: str, lines: int, ranks: int) -> int:
    """How many of the lines that `ranks` printed are in `text`, each once, not torn, and said to be of its own rank."""
    printed = {f"rank {rank} step {step}" for rank in range(ranks) for step in range(lines // ranks)}
    found = (_SHOWN.fullmatch(line) for line in text.splitlines())
    return len(printed & {match["line"] for match in found if match and match["tag"] in (None, match["rank"])})


def flood(kernel: RealKernel, launcher: Launcher, lines: int) -> Flood:
    status = Path(f"/proc/{kernel.pid}/status")
    Path(f"/proc/{kernel.pid}/clear_refs").write_text("5")  # the highest is what it is now
    before = _highest_bytes(status)
    running = kernel.begin(launcher.filled(_PRINTS.format(lines=lines // launcher.ranks)))
    running.until(
        lambda cell: running.is_idle, timeout_s=_PATIENCE_S
    )  # read as it comes: a socket keeps 1,000 messages
    cell = running.end(_PATIENCE_S).succeeded()
    after = _highest_bytes(status)
    text = cell.stdout
    logged = 0
    if found := _LOG.search(text):
        with open(found[1]) as log:
            logged = whole_lines(_without_tags(log.read()), lines, launcher.ranks)
    whole = whole_lines(text, lines, launcher.ranks)
    return Flood(cell.seconds, whole, logged, _messages(cell), len(text.encode()), after - before)


def _messages(cell: Cell) -> int:
    return sum(cell.sent.values())


def _without_tags(log: str) -> str:
    return re.sub(r"^.*?(?=rank \d step)", "", log, flags=re.M)


def _highest_bytes(status: Path) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024


def findings(turns: int) -> Iterator[Finding]:
    for name, launcher in installed(LAUNCHERS, NEEDS).items():
        is_ours = name.startswith("nbaccel")
        once = not is_ours and name != PLAIN
        with new_kernel() as kernel:
            kernel.do(launcher.setup)
            floods = [flood(kernel, launcher, FEW) for _ in range(1 if once else turns)]
            yield from _few(name, floods, is_ours)
            if not once:
                yield from _many(name, flood(kernel, launcher, MANY), is_ours)


def _few(name: str, floods: list[Flood], is_ours: bool) -> Iterator[Finding]:
    what = f"{FEW:,} lines, {name}"
    seconds = statistics.median(one.seconds for one in floods)
    yield Finding(what, "took", seconds, "s", at_most=_MOST_S if is_ours else None)
    whole = min(one.whole for one in floods)
    yield Finding(what, "arrived whole", whole, "lines", at_least=FEW if is_ours else None)
    messages = max(one.messages for one in floods)
    yield Finding(what, "messages to the front end", messages, "", at_most=_MOST_MESSAGES if is_ours else None)


def _many(name: str, one: Flood, is_ours: bool) -> Iterator[Finding]:
    what = f"{MANY:,} lines, {name}"
    yield Finding(what, "took", one.seconds, "s")
    yield Finding(what, "arrived whole, or are in the log", max(one.whole, one.logged), "lines", at_least=MANY)
    yield Finding(what, "messages to the front end", one.messages, "")
    most_mb = _BURST_MB + _MB_PER_S * one.seconds + _LAST_LINES_MB
    yield Finding(what, "on the screen", one.shown_bytes / 1e6, "MB", at_most=most_mb if is_ours else None)
    yield Finding(what, "kernel grew by", one.growth_bytes / 1e6, "MB", at_most=_MOST_GROWTH_MB if is_ours else None)


def main() -> int:
    options = options_of(__doc__, turns=5)
    return tell(findings(options.turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
