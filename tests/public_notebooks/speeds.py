"""One training cell with --speed; the lines that it shows are pasted, and both notebooks timed beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from public_notebooks.catalogue import Catalogue, Notebook
from public_notebooks.cells import code_cells, with_epochs
from public_notebooks.kernels import Ended, NotebookKernel
from public_notebooks.pasting import Advice, CannotPaste, advice_of, pasted, samples_per_s

__all__ = ["measure_notebook"]

_ENDLESS_EPOCHS = 1000
_RUN_S = 14.0
"""The time that the cell as it is is to take, by its number of epochs: a start of ranks is a second of it."""

_LIMIT_S = 300.0


def measure_notebook(catalogue: Catalogue, notebook: Notebook, budget: str, rounds: int) -> dict[str, Any]:
    """Return the gain of what `--speed` advises, with the seconds of each run before and after.

    Keys: "call"; "report"; "advice", "" where nothing helps; "foretold", "epochs", "before" and "after" with advice;
    "error", which begins "not measured", "not pasted" or "failed".
    """
    assert notebook.speed is not None
    cells = code_cells(catalogue.repository(notebook), notebook)[: notebook.speed + 1]
    result: dict[str, Any] = {"call": notebook.call, "advice": "", "error": "", "before": [], "after": []}
    endless = [with_epochs(cell, _ENDLESS_EPOCHS) for cell in cells]
    with NotebookKernel(catalogue, notebook, one_thread=False) as kernel:
        counts = _run_before(kernel, notebook, endless)
        ended = kernel.run(f"%%accelerate --speed {budget} -n 2\n{endless[-1]}", _LIMIT_S)
        counts[ended.number] = notebook.speed
    report = ended.shown[-1] if ended.shown else ""
    result["report"] = report.splitlines()
    speed = samples_per_s(report)
    if ended.how != "well" or speed is None:
        return result | {"error": f"not measured: {ended.error or 'no speed in the report'}"}
    try:
        advice = advice_of(report)
        if advice is None:
            return result
        short = [with_epochs(cell, _epochs(notebook, speed)) for cell in cells]
        changed, flags = pasted(short, advice.lines, counts, notebook.speed)
    except CannotPaste as error:
        return result | {"advice": "?", "error": f"not pasted: {error}"}
    result |= {"advice": advice.change, "foretold": advice.foretold, "epochs": _epochs(notebook, speed)}
    return result | _timed(catalogue, notebook, short, changed, flags, rounds, advice)


def _epochs(notebook: Notebook, speed: float) -> int:
    return max(1, math.ceil(_RUN_S * speed / notebook.samples))


def _run_before(kernel: NotebookKernel, notebook: Notebook, cells: Sequence[str]) -> dict[int, int]:
    """Run the cells before the last one that do not train; returns their indexes by execution count."""
    kernel.begin()
    indexes = [index for index in range(len(cells) - 1) if index not in notebook.training]
    ends = kernel.run_before([cells[index] for index in indexes])
    return {ended.number: index for ended, index in zip(ends, indexes, strict=True)}


def _timed(
    catalogue: Catalogue,
    notebook: Notebook,
    short: Sequence[str],
    changed: Sequence[str],
    flags: str,
    rounds: int,
    advice: Advice,
) -> dict[str, Any]:
    """Return the seconds of the cell, before and after pasting in turns, since the machine is not always as fast."""
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    with (
        NotebookKernel(catalogue, notebook, one_thread=False) as one,
        NotebookKernel(catalogue, notebook, one_thread=False) as other,
    ):
        _run_before(one, notebook, short)
        _run_before(other, notebook, changed)
        pair = (("before", one, f"%%accelerate -n 2\n{short[-1]}"),
                ("after", other, f"%%accelerate -n 2 {flags}".rstrip() + f"\n{changed[-1]}"))  # fmt: skip
        for _ in range(rounds):
            for when, kernel, text in pair:
                ended: Ended = kernel.run(text, _LIMIT_S)
                if ended.how != "well":
                    return {**seconds, "error": f"failed {when} pasting {advice.change}: {ended.error or 'cut'}"}
                seconds[when].append(ended.seconds)
    return {**seconds}
