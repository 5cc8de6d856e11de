"""Facts: what a run on a card has found, one line of JSON each, also when it ends red; and the table of them.

A line is a fact (of a program, while it runs) or an outcome (of a test, at its end). Programs append by themselves:
what they knew before they hung or died is in the file. This module loads neither torch nor nbaccel.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ABOUT", "ENDS_AT", "FAILED", "FILE", "append", "fact", "read", "table", "tell_cases"]

FILE = "NBACCEL_GPU_FACTS"
"""The variable that names the file; without it a fact is printed."""

ENDS_AT = "NBACCEL_GPU_ENDS_AT"
"""The variable with the time, by `time.time`, at which tests should be done; without it they may take any time."""

ABOUT = "NBACCEL_GPU_ABOUT"
"""The variable with what stands beside every fact of a program, as JSON: its group, its test, torch, driver, cards."""

FAILED = "raised"
"""The key under which the traceback of a case stands that raised."""

_LONGEST = 100
_BEGAN = time.monotonic()


def fact(name: str, value: Any, unit: str = "") -> None:
    """Tell one fact now; the seconds are since this process loaded this module.

    A rank that was forked goes on with its parent's clock.
    """
    line = {"name": name, "value": value, "unit": unit, "seconds": round(time.monotonic() - _BEGAN, 3)}
    path = os.environ.get(FILE)
    if path is None:
        print(json.dumps(line, default=str), flush=True)
        return
    append(Path(path), json.loads(os.environ.get(ABOUT, "{}")) | line)


def tell_cases(cases: Mapping[str, Callable[[str], Any]], arguments: Sequence[str]) -> None:
    """The main function of a program: run the cases that are asked for, on a device, and print what each has found.

    One that raises does not keep the next from running.  arguments: the device, and names of `cases`.
    """
    device, *names = arguments
    told: dict[str, Any] = {}
    for name in names:
        try:
            told[name] = cases[name](device)
        except Exception:
            told[name] = {FAILED: traceback.format_exc()}
            fact(f"{name} {FAILED}", told[name][FAILED])
        print(json.dumps(told), flush=True)  # after each: the last line is what is known when the next one hangs


def append(path: Path, line: Mapping[str, Any]) -> None:
    """One write of one line, so that those of several processes stay apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(told, (json.dumps(line, default=str) + "\n").encode())
    finally:
        os.close(told)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; one that a dying process left half is passed over."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Each test with its outcome, its seconds beside those it was expected to take, and below it what it found.

    >>> print(table([{"test": "t", "group": "G0", "name": "uvm", "value": True, "unit": ""},
    ...              {"test": "t", "group": "G0", "outcome": "failed", "seconds": 2.0, "expected_s": 1, "why": "no"}]))
    G0 failed     2.0 s (1)  t
         uvm = True
         no
    1 failed, 2 s
    """
    told: list[str] = []
    outcomes = [line for line in lines if "outcome" in line]
    for outcome in outcomes:
        expected = outcome.get("expected_s")
        beside = f" ({expected:g})" if expected is not None else ""
        told.append(f"{outcome['group']} {outcome['outcome']:8}{outcome['seconds']:6.1f} s{beside}  {outcome['test']}")
        for line in lines:
            if "name" in line and line.get("test") == outcome["test"]:
                value = json.dumps(line["value"]) if isinstance(line["value"], str) else str(line["value"])
                value = value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"
                told.append(f"     {line['name']} = {value} {line['unit']}".rstrip())
        if why := outcome.get("why"):
            told.append(f"     {why.strip().splitlines()[0]}")
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome["outcome"]] = counts.get(outcome["outcome"], 0) + 1
    total = sum(outcome["seconds"] for outcome in outcomes)
    told.append(f"{', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}, {total:.0f} s")
    return "\n".join(told)
