"""Training cells with --check, then for real, and plainly where that is to be compared: as facts, for `verdicts.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from public_notebooks.catalogue import Catalogue, Notebook
from public_notebooks.cells import code_cells
from public_notebooks.kernels import Ended, NotebookKernel

__all__ = ["cell_keys", "check_notebook", "run_notebook"]

_CHECK_LIMIT_S = 150.0
_REPORT = re.compile(r"(?:red|yellow|ok): ")
_RANKS = "%%accelerate -n 2"

Add = Callable[[str, dict[str, Any]], None]


def cell_keys(notebook: Notebook) -> list[str]:
    """Return the keys of the results of a notebook, in the order of its training cells."""
    return [f"{notebook.name} {number}" for number in notebook.training]


def check_notebook(catalogue: Catalogue, notebook: Notebook, add: Add, limit_s: float) -> None:
    """Check each training cell, run it in two ranks, and plainly where the ranks fail; `add` each result at once."""

    def examine(kernel: NotebookKernel, cell: str) -> dict[str, Any]:
        check = kernel.run(f"{_RANKS} --check\n{cell}", _CHECK_LIMIT_S)
        report = "\n".join(text for text in check.shown if _REPORT.match(text)).splitlines()
        ran = kernel.run(f"{_RANKS}\n{cell}", limit_s)
        plain = kernel.run(cell, limit_s) if ran.how == "error" else None
        return {"check": check.facts(), "report": report, **_compared(ran, plain)}

    _visit(catalogue, notebook, add, examine)


def run_notebook(catalogue: Catalogue, notebook: Notebook, add: Add, limit_s: float) -> None:
    """Run each training cell in two ranks, and then plainly; `add` each result at once."""

    def examine(kernel: NotebookKernel, cell: str) -> dict[str, Any]:
        ran = kernel.run(f"{_RANKS}\n{cell}", limit_s)
        return _compared(ran, kernel.run(cell, limit_s) if ran.how not in ("hangs", "died") else None)

    _visit(catalogue, notebook, add, examine)


def _compared(ran: Ended, plain: Ended | None) -> dict[str, Any]:
    return {"run": ran.facts(), "plain": plain and plain.facts()}


def _visit(
    catalogue: Catalogue, notebook: Notebook, add: Add, examine: Callable[[NotebookKernel, str], dict[str, Any]]
) -> None:
    """Run the cells of a notebook in order, up to the last one that trains.

    A notebook whose kernel is gone ends there: the training cells that follow have no result.

    Raises:
        KernelGone: a cell that does not train has not ended.
    """
    failed_before: list[str] = []
    with NotebookKernel(catalogue, notebook) as kernel:
        kernel.begin()
        cells = code_cells(catalogue.repository(notebook), notebook)
        for number, cell in enumerate(cells[: max(notebook.training) + 1]):
            if number not in notebook.training:
                [ended] = kernel.run_before([cell])
                if ended.how != "well":
                    failed_before.append(f"cell {number}: {ended.error or 'cut'}")
                continue
            result = examine(kernel, cell)
            add(f"{notebook.name} {number}", {"call": notebook.call, "before": [*failed_before], **result})
            if any(result[part] and result[part]["how"] in ("hangs", "died") for part in ("run", "plain")):
                return
