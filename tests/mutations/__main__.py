"""Planted faults, and whether a selection of tests notices them.

    PYTHONPATH=tests python -m mutations --folder . --check              does every fault still have its place?
    PYTHONPATH=tests python -m mutations --folder .                      plant them, one after the other
    PYTHONPATH=tests python -m mutations --folder . --part 1/4           every fourth of them
    PYTHONPATH=tests python -m mutations --folder . --names "a schedule,total_limit"     those that are called so
    PYTHONPATH=tests python -m mutations --folder . --select "not slow" --json build/quick.json    another selection

`faults.toml` lists the faults: mistakes that a user would feel, chosen by reading the package and not its tests. Each
is planted in a clone of the tree's commit, in a temporary folder; the tree itself stays as it is. The tests that are
nearest to the fault are run first, until one fails, then the others of the same top folders, as far as the selection
has them. A failed test is run again with the fault and without it: a fault counts as caught only by a test that fails
twice with it and passes without. Where no test fails, it has SURVIVED; "hung" is a run that reached its time limit,
with no test that had ended it by a limit of its own.

With --json the results are kept after each fault, and a second call goes on where the first one stopped, for the same
commit, selection and arguments. Ends with 1 where a fault was not caught, and with 2 where one has no place in the
package, or pytest does not run.

Not covered: tests that start a Python without the environment's PYTHONPATH use the package that is installed, which is
sound.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutations.faults import Fault, Package, read_faults
from mutations.runs import Copy, Hunt, Outcome, default_selection

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    tree = options.folder.resolve()
    faults = _chosen(read_faults(options.faults) if options.faults else read_faults(), options.names, options.part)
    package = Package(tree / "nbaccel")
    problems = [f"{fault.name} {problem}" for fault in faults if (problem := package.problem(fault))]
    print("".join(f"{line}\n" for line in problems), end="", file=sys.stderr)
    if problems or options.check:
        print(f"{len(faults) - len(problems)} of {len(faults)} faults can be planted")
        return 2 if problems else 0
    select = options.select or default_selection(tree)
    commit = _git(tree, "rev-parse", "--short=12", "HEAD")
    if _git(tree, "status", "--porcelain", "--untracked-files=no"):
        print(f"changes that are not committed are left out: this is about {commit}", file=sys.stderr)
    about = {"commit": commit, "select": select, "arguments": options.args, "only_near": options.only_near}
    results = _Results(options.json, about)
    with Copy(tree, select, shlex.split(options.args), options.limit * 60) as copy:
        hunt = Hunt(copy)
        for fault in faults:
            if results.get(fault) is None:
                try:
                    outcome = hunt.search(fault, only_near=options.only_near)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    return 2
                results.add(fault, outcome)
                print(_line(fault, outcome), file=sys.stderr, flush=True)
    outcomes = [(fault, outcome) for fault in faults if (outcome := results.get(fault)) is not None]
    print("\n".join(_table(outcomes, select)))
    return int(not all(outcome.test for _, outcome in outcomes))


class _Results:
    """What became of each fault, by its name, and in a file if there is one.

    about: what they are the results of; those of anything else in the file are dropped.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self._about = about
        self._of: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if {name: kept.get(name) for name in about} == about:
                self._of = kept["faults"]

    def get(self, fault: Fault) -> Outcome | None:
        found = self._of.get(fault.name)
        return None if found is None else Outcome(**found)

    def add(self, fault: Fault, outcome: Outcome) -> None:
        self._of[fault.name] = asdict(outcome)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({**self._about, "faults": self._of}, indent=1), encoding="utf-8")
            unfinished.replace(self._path)


def _line(fault: Fault, outcome: Outcome) -> str:
    """Return a row of the table."""
    remarks = [f"by {outcome.test}"] if outcome.test else []
    remarks += [f"once, and not again, by {test}" for test in outcome.chance]
    remarks += [f"{test} fails without it too" for test in outcome.broken]
    said = f": {'; '.join(remarks)}" if remarks else ""
    return f"{outcome.word:8}  {outcome.seconds:6.1f} s  {fault.name}{said}"


def _table(outcomes: Sequence[tuple[Fault, Outcome]], select: str) -> list[str]:
    caught = sum(bool(outcome.test) for _, outcome in outcomes)
    rows = sorted(outcomes, key=lambda pair: bool(pair[1].test))
    total_s = sum(outcome.seconds for _, outcome in outcomes)
    summary = f'{caught} of {len(outcomes)} faults caught by -m "{select}", {total_s / 60:.0f} minutes of tests'
    return [*(_line(fault, outcome) for fault, outcome in rows), summary]


def _chosen(faults: list[Fault], names: str | None, part: str) -> list[Fault]:
    """Return every n-th fault beginning with the i-th, of `part` "i/n", whose name has one of `names` in it."""
    index, _, parts = part.partition("/")
    wanted = [word.strip().lower() for word in (names or "").split(",")]
    return [fault for fault in faults if any(word in fault.name.lower() for word in wanted)][
        int(index) - 1 :: int(parts)
    ]


def _git(tree: Path, *words: str) -> str:
    command = ["git", "-C", str(tree), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mutations", description="Planted faults, and whether a selection of tests notices them."
    )
    parser.add_argument("--folder", metavar="TREE", type=Path, required=True, help="the checkout that is tested")
    parser.add_argument("--check", action="store_true", help="only see whether every fault has its place")
    parser.add_argument("--select", help="marker expression of the selection; default that of `make test`")
    parser.add_argument("--names", help="faults whose names have one of these words, comma-separated")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="the I-th of N parts of the faults")
    parser.add_argument("--args", metavar="ARGUMENTS", default="", help="more arguments for pytest, in one word")
    parser.add_argument("--only-near", action="store_true", help="run the nearest tests only")
    parser.add_argument("--limit", metavar="MINUTES", type=float, default=30, help="for one call of pytest; default 30")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the results there, and go on from them")
    parser.add_argument("--faults", metavar="FILE", type=Path, help="another list of faults")
    return parser


if __name__ == "__main__":
    sys.exit(main())
