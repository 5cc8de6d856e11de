"""The command behind ``make unit``: pytest in several processes, and a second try for a handful of tests that failed.

    python tests/suite.py -m "not gpu and not soak"        the arguments are pytest's

Two passes. Tests that start kernels, browsers and ranks mostly wait, so `WORKERS` processes of pytest-xdist run them
beside each other. What is marked `timed` measures seconds: it runs afterwards, alone. With ``--alone`` as the first
argument nothing runs beside anything: for tests that fill the machine's memory.

Thousands of tests that start kernels, browsers and ranks share two cores with whatever else the machine does; where
one of them fails by chance, the whole run would say nothing about the change that it was to judge. A defect fails
twice. What failed and then passed is printed as UNSTEADY, with its first failure above it: it is a defect too, of the
test or of nbaccel, but not of this change. Python's own suite does the same (``regrtest --rerun``). Where numbers
differ, a second try excuses nothing: what is rounded in another way now and then is a defect that chance would hide.

More than `HANDFUL` failures, an error while collecting, or an interrupt get no second try. A table says at the end for
which folders the minutes were spent.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = [
    "COMPARES",
    "HANDFUL",
    "LARGE_PAGES",
    "SLEEPING",
    "TIMED",
    "WORKERS",
    "main",
    "may_be_chance",
    "numbers_differ",
]

HANDFUL = 15
"""Tests that may fail by chance in one run. Alone it has been one of 6,000 in three runs; beside each other, on a
machine that is busy with other things too, a dozen."""

WORKERS = min((os.cpu_count() or 1) + 2, 8)
"""Processes that run tests beside each other: two more than cores, since each waits for ranks a part of its time."""

TIMED = "NBACCEL_TESTS_TIMED"
"""The variable that leaves what is timed for "later", or has it run "alone"; read where tests are selected."""

LARGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""The variable, and its value, with which glibc asks for large pages. Tests fork thousands of ranks from processes of
some hundred MB, and a fork copies the tables of pages: a tenth of the time of tests that fork. It is for the processes
of pytest alone, which take it out of what they hand on."""

SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Variables with which OpenMP's threads sleep while they wait for each other. By default they turn in a circle, and
where more processes run than there are cores, a training of seconds takes minutes."""

COMPARES = re.compile(
    r"torch\.equal|Tensor-likes are not|\.equal\(|array_equal|assert_close|allclose|isclose|approx\(|tobytes\(|digest"
    r"|fingerprint|(loss|weight|bias|grad|param)\w*[\])}\"' ]* [!=]= "
    r"| [!=]= [\[({\"' ]*\w*(loss|weight|bias|grad|param)"
)
"""How tests, and the cells in them, compare what was computed."""

_TOO_LATE = re.compile(r"[Tt]imeout|[Tt]imed ?out|no reply within|no idle state|before the awaited output")
"""What a test says that waited in vain, for a kernel or a rank."""


class _Record:
    """A plugin of pytest that keeps which tests failed, in their set-up, call or tear-down, and the seconds of all.

    Attributes:
        not_collected: Files whose tests nobody could run.
    """

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.different: list[str] = []
        self.not_collected: list[str] = []
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
            if numbers_differ(report.longreprtext):
                self.different.append(report.nodeid)
        part = "/".join(report.nodeid.partition("::")[0].split("/")[:3])
        part = part.rpartition("/")[0] if part.endswith(".py") and part.count("/") > 1 else part
        self._seconds[part] += report.duration
        self._tests[part] += report.when == "call"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # processes of pytest-xdist go on without that file, and end as after a failed test
            self.not_collected.append(report.nodeid)

    def table(self) -> str:
        """Return what the time was spent for: a line for each folder, the longest first, short ones together."""
        whole_s = sum(self._seconds.values())
        long = [(part, seconds) for part, seconds in self._seconds.most_common() if seconds >= whole_s / 100]
        rest = self._tests.total() - sum(self._tests[part] for part, _ in long)
        lines = [f"{seconds / 60:6.1f} min {self._tests[part]:5} tests  {part}" for part, seconds in long]
        lines.append(f"{(whole_s - sum(seconds for _, seconds in long)) / 60:6.1f} min {rest:5} tests  elsewhere")
        return "\n".join(["", "what the minutes of all processes were spent for:", *lines])


def main(arguments: Sequence[str]) -> int:
    """Run pytest with ``arguments``, in two passes; the exit code, or that of the second try."""
    # Hundreds of processes import the package and some the tests: they are compiled once, whatever the shell prefers.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.update(SLEEPING)
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it: other processes import the tests' functions by name
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children
    record = _Record()
    if arguments and arguments[0] == "--alone":
        code = int(pytest.main([*arguments[1:]], plugins=[record]))
    else:
        code = _run(arguments, record)
    print(record.table(), flush=True)
    if record.not_collected or not may_be_chance(code, len(record.failed)):
        return code
    print(f"\nonce more, in a fresh process: {len(record.failed)} failed", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *record.failed]).returncode
    if again == pytest.ExitCode.OK:
        for test in record.failed:
            print(f"UNSTEADY: {test} failed, and passed when it was run again")
    for test in record.different:
        print(f"NUMBERS DIFFER: {test} compares what was computed, and no second try excuses that")
    return again or int(bool(record.different))


def may_be_chance(code: int, failures: int) -> bool:
    """Whether pytest ended with ``code`` for so few failed tests that they are worth a second try."""
    return code == pytest.ExitCode.TESTS_FAILED and 0 < failures <= HANDFUL


def numbers_differ(failure: str) -> bool:
    """Whether the failed line of a test, or the error that it shows, compares numbers, and nothing came too late."""
    lines = [line for line in failure.splitlines() if line.startswith((">", "E "))]
    return any(map(COMPARES.search, lines)) and not any(map(_TOO_LATE.search, lines))


def _run(arguments: Sequence[str], record: _Record) -> int:
    """Run what may stand beside other tests, then what is timed, and return the worse exit code."""
    beside = ["-p", "xdist", "-n", str(WORKERS), "--dist", "loadscope", "--no-loadscope-reorder"]
    os.environ.setdefault(*LARGE_PAGES)
    os.environ[TIMED] = "later"
    code = int(pytest.main([*beside, *arguments], plugins=[record]))
    del os.environ[TIMED]
    if files := _timed_files([Path(argument) for argument in arguments if Path(argument).exists()]):
        print("\nwhat is timed, alone:", flush=True)
        os.environ[TIMED] = "alone"
        alone = [argument for argument in arguments if not Path(argument).exists()]
        timed = int(pytest.main([*alone, *map(str, files)], plugins=[record]))
        del os.environ[TIMED]
        code = max(code, 0 if timed == pytest.ExitCode.NO_TESTS_COLLECTED else timed)
    return code


def _timed_files(among: list[Path]) -> list[Path]:
    """Return the files below `among`, or of this folder, that mark a test as `timed`."""
    files = [
        path for root in among or [Path("tests")] for path in ([root] if root.is_file() else root.rglob("test_*.py"))
    ]
    return sorted(path for path in files if "pytest.mark.timed" in path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
