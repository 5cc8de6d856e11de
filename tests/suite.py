"""The command behind ``make unit``: pytest, and a second try in a fresh process for a handful of tests that failed.

    python tests/suite.py -m "not gpu and not soak"        the arguments are pytest's

Thousands of tests that start kernels, browsers and ranks share two cores with whatever else the machine does; where
one of them fails by chance, the whole run would say nothing about the change that it was to judge. A defect fails
twice. What failed and then passed is printed as UNSTEADY, with its first failure above it: it is a defect too, of the
test or of nbaccel, but not of this change. Python's own suite does the same (``regrtest --rerun``).

More than `HANDFUL` failures, an error while collecting, or an interrupt get no second try.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

__all__ = ["HANDFUL", "main", "may_be_chance"]

HANDFUL = 5
"""Tests that may fail by chance in one run; so far it has been one of 6,000 in three runs, and none in others."""


class _Failed:
    """A plugin of pytest that keeps which tests failed, in their set-up, call or tear-down."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)


def main(arguments: Sequence[str]) -> int:
    """Run pytest with ``arguments``; its exit code, or that of the second try."""
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it: other processes import the tests' functions by name
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children
    failed = _Failed()
    code = int(pytest.main([*arguments], plugins=[failed]))
    if not may_be_chance(code, len(failed.tests)):
        return code
    print(f"\nonce more, in a fresh process: {len(failed.tests)} failed", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failed.tests]).returncode
    if again == pytest.ExitCode.OK:
        for test in failed.tests:
            print(f"UNSTEADY: {test} failed, and passed when it was run again")
    return again


def may_be_chance(code: int, failures: int) -> bool:
    """Whether pytest ended with ``code`` for so few failed tests that they are worth a second try."""
    return code == pytest.ExitCode.TESTS_FAILED and 0 < failures <= HANDFUL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
