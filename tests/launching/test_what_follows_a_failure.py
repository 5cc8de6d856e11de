"""What words an error, and starts a run again, is loaded by the kernel when a run has failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbaccel")
for cell in ("1", "1 / 0"):
    ran = shell.run_cell(f"%%accelerate -n 2 --cpu\\n{cell}")
    loaded = [f"nbaccel.launching.{name}" in sys.modules for name in ("diagnosis", "oom_restart")]
    print("ended:", type(ran.error_in_exec).__name__, *loaded)
"""


@pytest.mark.slow
def test_it_is_loaded_by_the_first_failure() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert ended == ["ended: NoneType False False", "ended: ZeroDivisionError True True"]
