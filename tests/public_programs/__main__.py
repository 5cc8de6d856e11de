"""Public programs with Accelerate and with nbaccel: ``make programs FOLDER=...`` runs this.

    make programs FOLDER=/tmp/programs                     every program with both libraries, and the table
    make programs FOLDER=/tmp/programs PART=2/4            the second of four parts, when time is short
    make programs FOLDER=/tmp/programs ONLY=accelerate     which programs work there: the table of names
    make programs FOLDER=/tmp/programs NAMES=ddpm,imagen   some of them, again

`programs.toml` says what they are and how each is called. They are not ours and no part of this repository: FOLDER has
`repositories`, with those that are called and what they need, and whatever is made of them.

From nothing, in a clone of nbaccel; a torch for CPUs is enough:

    python3.11 -m venv ../python
    ../python/bin/pip install -e '.[dev]' -r tests/public_programs/requirements.txt -c constraints.txt
    ../python/bin/pip install --no-deps dctorch==0.1.2
    PYTHONPATH=tests ../python/bin/python -m public_programs ../programs | sh      clones the repositories
    make programs FOLDER=../programs PROGRAMS_PYTHON=../python/bin/python

Where repositories are missing, the tool prints the lines that clone them at their commits, and runs nothing. Before the
first run it makes `hub` in FOLDER (`hub.py`): tiny models and data that the programs find in their working directories.

The result of every run is added to `results/accelerate.json` or `results/nbaccel-COMMIT.json` there as soon as it ends.
A run that has a result is not repeated: an interrupted call goes on where it stopped, several may run side by side, and
each commit has results of its own. They are comparable within one `hub` and one set of packages. What fails with
Accelerate is not tried with nbaccel. After the table of runs stands one of names: those of Accelerate's big-model API
that further programs use, which are read and not run (`big_model_names.py`).

Ends with 1 where a program that works with Accelerate does not work with nbaccel, and with 2 where a repository is
missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from public_programs.manifest import Manifest, Program, read_manifest
from public_programs.runs import Run, Runner, runs_of
from public_programs.table import Comparison, table
from public_repositories import KeptResults, name_of_checkout

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = options.folder.resolve()
    results = {
        "accelerate": KeptResults(folder / "results" / "accelerate.json"),
        "nbaccel": KeptResults(folder / "results" / f"nbaccel-{options.commit or name_of_checkout()}.json"),
    }
    manifest = read_manifest(folder)
    programs = _part(manifest.programs, options.part)
    if options.names:
        programs = [program for program in programs if program.name in options.names.split(",")]
    libraries = [options.only] if options.only else ["accelerate", "nbaccel"]
    read = [] if options.names else manifest.big_models
    if not options.table:
        if commands := manifest.clone_commands([*programs, *read]):
            print("mkdir -p", folder / "repositories")
            print("\n".join(commands))
            print(f"{len(commands)} repositories are missing: `| sh` fetches them", file=sys.stderr)
            return 2
        if not (folder / "hub").is_dir():
            from public_programs.hub import make_hub  # it imports what most programs import

            make_hub(folder / "hub")
        wanted = [run for program in programs for library in libraries for run in runs_of(program, library)]
        wanted.sort(key=lambda run: run.key != run.reference)  # every program before the other starters of some
        missing = [run for run in wanted if options.names or not results[run.library].get(run.key, run.program.call)]
        _carry_out(missing, manifest, results, again=bool(options.names))
    comparisons = [
        Comparison(
            run,
            results["accelerate"].get(run.reference, run.program.call),
            results["nbaccel"].get(run.key, run.program.call),
            results["nbaccel"].get(run.replicated, run.program.call) if run.replicated != run.key else None,
        )
        for program in programs
        for run in runs_of(program, "nbaccel")
    ]
    print("\n".join(table(comparisons)))
    if not options.names:
        from public_programs.big_model_names import names_table  # it imports Accelerate

        print("", *names_table(manifest), sep="\n")
    return int(any(comparison.is_defect for comparison in comparisons))


def _carry_out(runs: Sequence[Run], manifest: Manifest, results: dict[str, KeptResults], again: bool) -> None:
    with Runner(manifest) as runner:
        for run in runs:
            if results[run.library].get(run.key, run.program.call) and not again:  # by another call meanwhile
                continue
            reference = results["accelerate"].get(run.reference, run.program.call)
            if run.library == "nbaccel" and not (reference and reference["ok"]):
                continue
            result = runner.carry_out(run)
            results[run.library].add(run.key, result)
            said = "ended well" if result["ok"] else result["error"]
            print(f"{run.key} {run.library}: {said}, {result['seconds']} s", file=sys.stderr, flush=True)


def _part(programs: list[Program], part: str) -> list[Program]:
    """Every n-th program beginning with the i-th, of `part` "i/n"."""
    index, _, parts = part.partition("/")
    return programs[int(index) - 1 :: int(parts)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m public_programs", description="Public programs with both libraries."
    )
    parser.add_argument("folder", type=Path, help="where the programs lie")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="the I-th of N parts of the programs")
    parser.add_argument("--names", help="these programs, comma-separated; their runs are repeated")
    parser.add_argument("--only", choices=["accelerate", "nbaccel"], help="run with one library")
    parser.add_argument("--commit", help="name of nbaccel's results; default this checkout's commit")
    parser.add_argument("--table", action="store_true", help="print the table of what was run, and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
