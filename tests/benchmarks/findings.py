"""Findings: what a report measures, one number each, with a verdict; as a table for people, as JSON for notebooks.

A report is a script for what is not a ratio to raw: lines that arrived, megabytes, sizes that were tried. It yields
findings or prints a table of its own; the command runs it with ``--json FILE`` and puts its findings beside the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.targets import FALLS_SHORT

__all__ = ["Finding", "options_of", "tell", "write"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One number: `what` was measured of `who`.

    at_most, at_least: what it should hold, if anything.
    """

    what: str
    who: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        """NaN holds nothing."""
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def verdict(self) -> str:
        """
        >>> Finding("start of 2 ranks", "nbaccel", 25.0, "ms", at_most=20).verdict
        'FALLS SHORT of 20 ms'
        """
        target = next((target for target in (self.at_most, self.at_least) if target is not None), None)
        if target is None:
            return ""
        return f"{'holds' if self.holds else f'{FALLS_SHORT} of'} {target:g} {self.unit}".rstrip()


def options_of(doc: str | None, **defaults: float) -> argparse.Namespace:
    """The command line of a report: ``--json FILE``, and its own numbers."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="", help="file to write the findings to")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def tell(findings: Iterable[Finding], path: str = "") -> int:
    """Print each finding as it comes, write all to `path`; the exit status: 1 where a target was missed."""
    told: list[Finding] = []
    try:
        for finding in findings:
            if not told or finding.what != told[-1].what:
                print(f"  {finding.what}", flush=True)
            value = f"{finding.value:>12,.{_digits(finding.value)}f} {finding.unit}"
            print(f"    {finding.who:34}{value:22}{finding.verdict}".rstrip(), flush=True)
            told.append(finding)
    finally:  # what was found before an error is kept
        write(told, path)
    return 0 if all(finding.holds for finding in told) else 1


def write(findings: Iterable[Finding], path: str) -> None:
    """As JSON, unless `path` is empty; for reports that print a table of their own."""
    if path:
        told = [asdict(finding) | {"verdict": finding.verdict} for finding in findings]
        Path(path).write_text(json.dumps(told), encoding="utf-8")


def _digits(value: float) -> int:
    """Three significant digits, and no fraction for what was counted.

    >>> [_digits(value) for value in (4000, 123.4, 12.34, 0.1234)]
    [0, 0, 1, 3]
    """
    if float(value).is_integer() or abs(value) >= 100:
        return 0
    return 1 if abs(value) >= 10 else 3 if abs(value) < 1 else 2
