"""A check before each `%%accelerate` cell of our notebooks: none of them is called red that ends well."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from environments import NEWEST, REPOSITORY
from headless import execute
from stored_notebooks import NOTEBOOKS as EXECUTED

NOTEBOOKS = REPOSITORY / "notebooks"

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

MAGIC = "%%accelerate"

ENDED_EARLY = {("06_never_lose_a_run.ipynb", "and --time-limit ends it after 4 s")}
"""Red lines on cells that show what they say: by notebook, with words of the line."""

REFUSED = {("05_watch_and_steer.ipynb", "ranks stay in this notebook, and a check needs its own")}

SWEPT = re.compile(r" --sweep (.+) --slots \d+")


def is_run(cell: Any) -> bool:
    """Return whether a cell runs on several ranks of this machine, and is no check itself."""
    line = cell.source.partition("\n")[0]
    return bool(
        cell.cell_type == "code"
        and line.startswith(MAGIC)
        and not {"--check", "--speed", "--nodes"} & set(line.split())
    )


NAMES = sorted(path.name for path in EXECUTED if any(map(is_run, nbformat.read(path, as_version=4).cells)))


def checked(cell: Any) -> Any:
    """Return a copy of a cell that checks it instead of running it."""
    line, _, body = cell.source.partition("\n")
    line = line.replace(" --bg", "")
    if swept := SWEPT.search(line):  # a check is of one run
        line = SWEPT.sub("", line)
        firsts = [re.sub(r"(?<==)(\d+)-.*|,.*", r"\1", pair) for pair in swept[1].split()]
        body = f"{'; '.join(firsts)}; {body}"
    check = copy.deepcopy(cell)
    check.pop("id", None)
    check.metadata["tags"] = ["raises-exception"]
    check.source = f"{MAGIC} --check{line.removeprefix(MAGIC)}\n{body}"
    return check


def report_of(cell: Any) -> str:
    """Return the report that a cell shows, or the error that it ended with."""
    shown = [output.data.get("text/plain", "") for output in cell.outputs if output.output_type == "display_data"]
    errors = [f"{output.ename}: {output.evalue}" for output in cell.outputs if output.output_type == "error"]
    return "\n".join([*shown, *errors])


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_that_ends_well_is_called_red(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    cells, pairs = [], []
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = "num_processes = 2"
        if is_run(cell):
            pairs.append((checked(cell), cell))
            cells.append(pairs[-1][0])
        cells.append(cell)
    notebook.cells = cells
    execute(notebook, NEWEST, tmp_path, timeout_s=300)
    reports = [(report_of(check), run) for check, run in pairs]
    wrong = []
    for report, run in reports:
        ends_well = not any(output.output_type == "error" for output in run.outputs)
        if any(words in report for known, words in REFUSED if known == name):
            continue
        is_shown = any(words in report for known, words in ENDED_EARLY if known == name)
        if not report.startswith(("red: ", "yellow: ", "ok: ")) or ("red: " in report and ends_well and not is_shown):
            wrong.append(f"{run.source[:300]}\n{report}")
    assert not wrong, "\n\n".join(wrong)
    print("\n\n".join(report for report, _ in reports))
