"""What outlives a kernel that is killed: ``make bench ROWS=orphans``. Processes, one second after its SIGKILL.

Each of two ranks has started a process of its own and catches whatever is raised in it, as a careless loop does. A raw
cell, which is the kernel itself, leaves the process that it has started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks.findings import Finding, options_of, tell
from benchmarks.harness import installed
from benchmarks.kernels import LAUNCHERS, NEEDS, Launcher, new_kernel

_WITHIN_S = 1.0
_PATIENCE_S = 120.0

_LIVES_ON = """
import os, subprocess, time
subprocess.Popen(["sleep", "600"])
open(f"marks/{os.getpid()}", "x").close()
ends_at = time.monotonic() + 600
while time.monotonic() < ends_at:
    try:
        time.sleep(0.01)
    except BaseException:
        pass
"""


def left_by(launcher: Launcher) -> int:
    """How many processes are still there; they are ended before it returns.

    Raises:
        TimeoutError: the ranks were not under way in time.
    """
    with new_kernel() as kernel:
        marks = kernel.folder / "marks"
        marks.mkdir()
        kernel.do(launcher.setup)
        kernel.begin(launcher.filled(_LIVES_ON))
        deadline_s = time.monotonic() + _PATIENCE_S
        while len(list(marks.iterdir())) < launcher.ranks:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the ranks were not under way after {_PATIENCE_S:.0f} s")
            time.sleep(0.01)
        kernel.kill()
        return len(kernel.survivors(_WITHIN_S))


def findings(turns: int) -> Iterator[Finding]:
    what = f"processes left {_WITHIN_S:g} s after the kernel was killed, the most of {turns}"
    for name, launcher in installed(LAUNCHERS, NEEDS).items():
        left = max(left_by(launcher) for _ in range(turns))
        yield Finding(what, name, left, "", at_most=0 if name.startswith("nbaccel") else None)


def main() -> int:
    options = options_of(__doc__, turns=3)
    return tell(findings(options.turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
