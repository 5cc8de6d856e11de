"""Cells that are run twice in one process: once undisturbed, and once from a checkpoint."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from nbaccel.features.cell_checkpoints.difference import CellDifference, Restored, StoredDifference
from nbaccel.features.cell_checkpoints.head_state import HeadState

__all__ = ["continued", "executed", "saved"]


def executed(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the source of a cell in `namespace`, or in a new notebook; return it."""
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), namespace)
    return namespace


def saved(folder: Path, above: str, loop: str) -> dict[str, Any]:
    """Run the cells above and the rounds of a loop; save the difference in `folder`; return the notebook."""
    notebook = executed(above)
    head = HeadState(notebook)
    executed(loop, notebook)
    CellDifference.between(head, notebook).write(folder)
    return notebook


def continued(folder: Path, above: str) -> tuple[dict[str, Any], Restored]:
    """Run the cells above in a new notebook, and write the difference in `folder` into it."""
    notebook = executed(above)
    restored = StoredDifference.read(folder).apply(HeadState(notebook), _no_iterator)
    for name in restored.deleted:
        del notebook[name]
    notebook.update(restored.names)
    return notebook, restored


def _no_iterator(*_: Any) -> Any:
    raise AssertionError("no loader's iterator is in these cells")
