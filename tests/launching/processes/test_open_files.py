"""What a rank is writing to, as its kernel sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nbaccel.launching.processes.workers import files_being_written

WRITER = """
import sys
written, read, gone = open(sys.argv[1], "a"), open(sys.argv[2]), open(sys.argv[3], "w")
import os
os.unlink(sys.argv[3])
print("open", flush=True)
sys.stdin.read()
"""


def test_files_open_for_writing_are_named_and_no_others(tmp_path: Path) -> None:
    written, read, gone = (tmp_path / name for name in ("written.csv", "read.txt", "gone.tmp"))
    read.write_text("x")
    with (
        open(tmp_path / "ours.log", "w") as ours,
        subprocess.Popen(
            [sys.executable, "-c", WRITER, written, read, gone],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[ours.fileno()],
        ) as writer,
    ):
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        assert files_being_written([writer.pid], str(tmp_path / "private")) == [str(written)]
        assert files_being_written([writer.pid], str(tmp_path)) == []


def test_a_process_that_is_over_writes_nothing() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert files_being_written([pid], "/nowhere") == []
