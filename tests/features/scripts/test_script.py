"""A rank of `nbaccel launch` runs a program as the interpreter does, and leaves without the interpreter's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, pickle, sys, threading, __main__
from beside import VALUE

class Thing:
    def __del__(self):
        print("the interpreter's end")

thing = Thing()
thread = threading.Thread(target=lambda: (gate.wait(), print("thread")))
gate = threading.Event()
thread.start()
atexit.register(lambda: print("atexit", pickle.loads(pickle.dumps(Thing)) is Thing, __main__.VALUE))
print(__name__, sys.argv, __file__, __spec__, VALUE)
gate.set()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbaccel.features.scripts.script", *words]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def script(folder: Path, text: str) -> str:
    """A script in a folder of its own, beside a module that it imports; its path from `folder`."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "beside.py").write_text("VALUE = 7\n")
    (folder / "scripts" / "train.py").write_text(text)
    return os.path.join("scripts", "train.py")


def test_a_script_is_main_has_its_arguments_and_folder_and_its_threads_and_handlers_come_to_their_end(
    tmp_path: Path,
) -> None:
    path = script(tmp_path, PROGRAM)
    done = run(tmp_path, path, "-m", "two words")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"__main__ {[path, '-m', 'two words']} {path} None 7",
        "thread",
        "atexit True 7",
    ]


def test_a_module_finds_what_is_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)\n")
    done = run(tmp_path, "-m", "job", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "__main__ ['--epochs', '3'] job\n")


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, 'Traceback (most recent call last):\n  File "scripts/train.py", line 2, in'),
        ("x = [", 1, '  File "scripts/train.py", line 2\n'),
    ],
)
def test_the_exit_status_is_the_programs(tmp_path: Path, end: str, status: int, said: str) -> None:
    done = run(tmp_path, script(tmp_path, f"import sys\n{end}\n"))
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert bool(done.stderr) == bool(said)


def test_a_traceback_begins_in_the_program(tmp_path: Path) -> None:
    done = run(tmp_path, script(tmp_path, "def fail():\n    raise ValueError('seven')\nfail()\n"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "scripts/train.py", line 3, in <module>',
    ]
    assert done.stderr.splitlines()[-1] == "ValueError: seven"
