"""A copy of a tree, in which faults are planted and tests are run by pytest.

For Linux: what a run of tests leaves behind is found in /proc, and ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from mutations.faults import Fault, Package

__all__ = ["Copy", "Hunt", "Outcome", "Run", "default_selection"]

_ENVIRONMENTS = (".venv", ".venv-colab", ".venv-kaggle")
_MARK = "NBACCEL_MUTATIONS"
"""A variable of all that is started for a run of tests, with our process id."""

_WITHOUT_FAILURES = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
_LAST_CHARACTERS = 2000
_SELECTION = re.compile(r'^PYTEST_ARGS \?= -m "(.+)"$', re.MULTILINE)


def default_selection(tree: Path) -> str:
    """Return the marker expression of `make test`.

    Raises:
        ValueError: the Makefile of `tree` has none.
    """
    found = _SELECTION.search((tree / "Makefile").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f'{tree / "Makefile"} has no line PYTEST_ARGS ?= -m "...": say --select')
    return found[1]


@dataclass(frozen=True, slots=True)
class Run:
    """One call of pytest that has ended.

    failed: the first test that failed, or a file that could not be collected; empty if none did.
    is_of_pytest: no test failed, and pytest was gone before its end; `failed` says how, and `output` is its last text.
    is_hung: it was ended at its time limit.
    """

    failed: str
    seconds: float
    is_of_pytest: bool = False
    is_hung: bool = False
    output: str = ""


class Copy:
    """A clone of the commit of `tree` in a temporary folder, with the environments of `tree`.

    select: the marker expression of every run.  arguments: more arguments for pytest.  limit_s: for one call of pytest.
    """

    def __init__(self, tree: Path, select: str, arguments: Sequence[str] = (), limit_s: float = 1800) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="nbaccel-mutations-"))
        self.folder = self._place / "tree"
        self._select = select
        self._arguments = list(arguments)
        self._limit_s = limit_s
        subprocess.run(["git", "clone", "--quiet", "--shared", tree, self.folder], check=True)
        for name in _ENVIRONMENTS:
            if (tree / name).exists():
                (self.folder / name).symlink_to((tree / name).resolve())
        self.package = Package(self.folder / "nbaccel")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def run(self, tests: Iterable[str], leave_out: Iterable[str] = ()) -> Run:
        """Run `tests` until one fails.  leave_out: files, folders or tests among them that are not run."""
        left_out = set(leave_out)
        wanted = [test for test in tests if test not in left_out]
        if not wanted:
            return Run("", 0.0)
        python = self.folder / ".venv" / "bin" / "python"
        memory = self._place / "cache"
        shutil.rmtree(memory, ignore_errors=True)
        command = [str(python) if python.exists() else sys.executable, "-m", "pytest", "-x", "-q", "-m", self._select]
        command += ["-o", f"cache_dir={memory}", *self._arguments]
        command += [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in sorted(left_out)]
        began = time.monotonic()
        output = self._place / "output.txt"
        with output.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [*command, *wanted],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(self.folder), _MARK: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_all()
                process.wait()
        seconds = time.monotonic() - began
        if code is None or code in _WITHOUT_FAILURES:
            return Run("", seconds, is_hung=code is None)
        if failed := _last_failed(memory):
            return Run(failed, seconds)
        last = output.read_text(encoding="utf-8", errors="replace")[-_LAST_CHARACTERS:]
        return Run(f"pytest itself, which ended with {code}", seconds, is_of_pytest=True, output=last)

    def others(self, tests: Iterable[str]) -> list[str]:
        """Return the folders right below the tests' own that hold one of `tests`; for a file there, all files there."""
        found: dict[str, None] = {}
        for test in tests:
            parts = Path(test).parts
            if len(parts) > 2 or (self.folder / test).is_dir():
                found["/".join(parts[:2])] = None
            else:
                beside = sorted((self.folder / "tests").glob("test_*.py"))
                found |= dict.fromkeys(path.relative_to(self.folder).as_posix() for path in beside)
        return list(found)


@dataclass(slots=True)
class Outcome:
    """What became of one fault.

    test: that noticed it; empty where none did.  is_hung: a run of tests reached its time limit, and no test's own.
    seconds: until it was noticed, or until all had been run; without those in which a failure was tried again.
    chance: tests that failed with the fault and did not when they were run again.  broken: that fail without it too.
    """

    test: str = ""
    is_hung: bool = False
    seconds: float = 0.0
    chance: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        return "caught" if self.test else "hung" if self.is_hung else "SURVIVED"


class Hunt:
    """The search for a test that notices a fault. A test counts that fails twice with the fault, and passes without."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._sound: set[str] = set()
        self._broken: set[str] = set()

    def search(self, fault: Fault, *, only_near: bool = False) -> Outcome:
        """Plant `fault`, and run the nearest tests; then, unless `only_near`, the others of the same top folders.

        Raises:
            RuntimeError: pytest comes to no end without the fault either.
        """
        outcome = Outcome()
        if not self._is_noticed(fault, outcome, fault.tests, []) and not only_near:
            self._is_noticed(fault, outcome, self._copy.others(fault.tests), fault.tests)
        return outcome

    def _is_noticed(self, fault: Fault, outcome: Outcome, tests: Sequence[str], before: Sequence[str]) -> bool:
        """Return whether one of `tests` notices `fault`, without those `before`; `outcome` has the rest."""
        while True:
            passed_over = [*before, *self._broken, *outcome.chance]
            with self._copy.package.planted(fault):
                run = self._copy.run(tests, passed_over)
            outcome.seconds += run.seconds
            if run.is_hung or not run.failed:
                outcome.is_hung |= run.is_hung
                return False
            failed = tests if run.is_of_pytest else [run.failed]
            if not self._passes_without(failed, passed_over):
                self._broken.add(run.failed)
                outcome.broken.append(run.failed)
                continue
            with self._copy.package.planted(fault):
                again = self._copy.run(failed, passed_over)
            if again.failed or again.is_hung:
                outcome.test = run.failed
                return True
            outcome.chance.append(run.failed)
            if run.is_of_pytest:
                return False

    def _passes_without(self, tests: Sequence[str], passed_over: Sequence[str]) -> bool:
        """Return whether `tests`, most often one, pass without a fault."""
        if not self._sound.issuperset(tests):
            run = self._copy.run(tests, passed_over)
            if run.is_of_pytest:
                raise RuntimeError(f"without a fault too it was {run.failed}:\n{run.output}")
            if run.failed or run.is_hung:
                return False
            self._sound.update(tests)
        return True


def _last_failed(memory: Path) -> str:
    """Return the test that pytest remembers as failed; an empty text where it had no time to."""
    try:
        failed = json.loads((memory / "v" / "cache" / "lastfailed").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    return next(iter(failed), "")


def _end_all() -> None:
    """Kill what a run of tests has started and left, by the mark that it inherited."""
    mark = f"{_MARK}={os.getpid()}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
