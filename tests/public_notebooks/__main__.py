"""Public notebooks with nbaccel: ``make public-notebooks FOLDER=...`` runs this.

    make public-notebooks FOLDER=/tmp/others                  each training cell with --check, and then for real
    make public-notebooks FOLDER=/tmp/others MODE=run         each in two ranks, and plainly
    make public-notebooks FOLDER=/tmp/others MODE=speed       some with --speed, and what it advises, pasted
    make public-notebooks FOLDER=/tmp/others PART=2/4         the second of four parts, when time is short
    make public-notebooks FOLDER=/tmp/others NAMES=rasbt_vae  some of them, again

`notebooks.toml` says what they are and which of their cells train. They are not ours and no part of this repository:
FOLDER has `repositories`, with their clones, and `packages`, which they import beside nbaccel[dev]. Where something is
missing, the tool prints the lines that fetch it, and runs nothing:

    PYTHONPATH=tests .venv/bin/python -m public_notebooks ../others | sh

Each notebook gets a kernel of its own. Its cells run from the first one to the last one that trains, on CPUs; data sets
of torchvision are made up. A cell that takes longer than `--limit-s` is interrupted, and counts for what it has shown.

- check: fine, true alarm (a red line, and the run fails), false alarm (a red line, and the run does not fail), missed
  (the run fails, without a red line), refused (by a sentence, as the run is), crash (no report).
- run: right, refused (by a sentence of ours), fails alike (the plain cell fails too), wrong, crash.
- speed: the median of the seconds before pasting over the one after it, in turns; nothing else should run meanwhile.

The result of every cell is added to `results/MODE-COMMIT.json` in FOLDER as soon as it is there. A cell that has a
result is not repeated: an interrupted call goes on where it stopped, and each commit has results of its own.

Ends with 1 where a cell crashes, is wrong or is missed, where there is more than one false alarm per 25 cells, or where
a training is slower than 0.98 after pasting; and with 2 where something is to be fetched.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from public_notebooks.catalogue import Catalogue, Notebook, read_catalogue
from public_notebooks.checks import cell_keys, check_notebook, run_notebook
from public_notebooks.speeds import measure_notebook
from public_notebooks.verdicts import JUDGES, Row, is_failure, table
from public_repositories import KeptResults, name_of_checkout

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    catalogue = read_catalogue(options.folder.resolve())
    notebooks = _chosen(catalogue, options)
    commit = options.commit or name_of_checkout()
    results = KeptResults(catalogue.folder / "results" / f"{options.mode}-{commit}.json")
    if not options.table:
        if _say_missing(catalogue, notebooks):
            return 2
        for notebook in notebooks:
            if options.names or any(row.word == "" for row in _rows(options.mode, [notebook], results)):
                _carry_out(catalogue, notebook, results, options)
    rows = _rows(options.mode, notebooks, results)
    print("\n".join(table(options.mode, rows)))
    return int(is_failure(rows))


def _chosen(catalogue: Catalogue, options: argparse.Namespace) -> list[Notebook]:
    """Return the notebooks of the mode and the part, or those that are named."""
    notebooks = [notebook for notebook in catalogue.notebooks if options.mode != "speed" or notebook.speed is not None]
    if options.names:
        names = options.names.split(",")
        if unknown := set(names) - {notebook.name for notebook in notebooks}:
            raise SystemExit(f"--names: no notebook for --mode {options.mode} is called {', '.join(sorted(unknown))}")
        return [notebook for notebook in notebooks if notebook.name in names]
    index, _, parts = options.part.partition("/")
    return notebooks[int(index) - 1 :: int(parts)]


def _say_missing(catalogue: Catalogue, notebooks: Sequence[Notebook]) -> bool:
    """Print the lines that fetch what the folder lacks; whether there are any."""
    clones = catalogue.clone_lines(notebooks)
    installs = catalogue.install_lines(notebooks, sys.executable)
    if clones or installs:
        print("mkdir -p", shlex.quote(str(catalogue.folder / "repositories")))
        print("\n".join([*clones, *installs]))
        said = f"{len(clones)} repositories and {len(installs)} packages are missing: `| sh` fetches them"
        print(said, file=sys.stderr)
    return bool(clones or installs)


def _carry_out(catalogue: Catalogue, notebook: Notebook, results: KeptResults, options: argparse.Namespace) -> None:
    def add(key: str, result: dict[str, Any]) -> None:
        results.add(key, result)
        row = JUDGES[options.mode](key, result)
        print(f"{key}: {row.word} {row.said}".rstrip(), file=sys.stderr, flush=True)

    try:
        if options.mode == "speed":
            add(notebook.name, measure_notebook(catalogue, notebook, options.budget, options.rounds))
        elif options.mode == "run":
            run_notebook(catalogue, notebook, add, options.limit_s)
        else:
            check_notebook(catalogue, notebook, add, options.limit_s)
    except (RuntimeError, AssertionError) as error:  # of this notebook: the others are run
        print(f"{notebook.name}: {error}", file=sys.stderr, flush=True)


def _rows(mode: str, notebooks: Sequence[Notebook], results: KeptResults) -> list[Row]:
    rows = []
    for notebook in notebooks:
        for key in [notebook.name] if mode == "speed" else cell_keys(notebook):
            result = results.get(key, notebook.call)
            rows.append(JUDGES[mode](key, result) if result else Row(key, ""))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m public_notebooks", description="Public notebooks with nbaccel.")
    parser.add_argument("folder", type=Path, help="where the repositories of the notebooks lie")
    parser.add_argument("--mode", choices=list(JUDGES), default="check", help="what is tried; default check")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="the I-th of N parts of the notebooks")
    parser.add_argument("--names", help="these notebooks, comma-separated; they are repeated")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one run of a training cell; default 60")
    parser.add_argument("--budget", default="60s", help="of --speed; default 60s")
    parser.add_argument("--rounds", type=int, default=3, help="runs before and after pasting; default 3")
    parser.add_argument("--commit", help="name of the results; default this checkout's commit")
    parser.add_argument("--table", action="store_true", help="print the table of what was run, and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
