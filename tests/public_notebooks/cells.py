"""The code cells of a public notebook, read from a clone at a commit, as they are run here.

Lines stay where they are, so that a line of a report is one of the notebook.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from public_notebooks.catalogue import Notebook

__all__ = ["changed", "code_cells", "copy_files", "with_epochs"]

_LEFT_OUT = re.compile(r"^([ \t]*)(?:!|%[a-zA-Z_%]|(?:from|import) +google\.colab|drive\.mount).*", re.MULTILINE)
"""Commands, magics and Colab's disk. The `%` of a format that begins a line is followed by no letter."""

_EPOCHS = re.compile(r"\b(n_epochs?|EPOCHS?|NUM_EPOCHS|num_epochs|epochs) *= *\d+")


def code_cells(repository: Path, notebook: Notebook) -> list[str]:
    """Return the cells of `notebook`, edited; those that are left out are `pass`."""
    text = _read(repository, notebook.commit, notebook.path).decode()
    if not notebook.path.endswith(".ipynb"):
        return [changed(text, notebook.edits)]
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [
        "pass" if any(words in cell for words in notebook.skip_cells) else changed(cell, notebook.edits)
        for cell in cells
    ]


def changed(cell: str, edits: Sequence[Sequence[str]]) -> str:
    """Return `cell` without what only IPython or Colab understands, edited."""
    cell = _LEFT_OUT.sub(r"\1pass", cell)
    for pattern, instead in edits:
        cell = re.sub(pattern, instead, cell)
    return cell


def with_epochs(cell: str, epochs: int) -> str:
    """Return `cell` with another number of epochs, wherever it gives one a name."""
    return _EPOCHS.sub(rf"\1 = {epochs}", cell)


def copy_files(repository: Path, notebook: Notebook, folder: Path) -> None:
    """Write what the notebook needs of its repository into `folder`, at the same paths."""
    if not notebook.files:
        return
    listed = _git(repository, "ls-tree", "-r", "-z", "--name-only", notebook.commit, "--", *notebook.files)
    for path in filter(None, listed.decode().split("\0")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(_read(repository, notebook.commit, path))


def _read(repository: Path, commit: str, path: str) -> bytes:
    return _git(repository, "show", f"{commit}:{path}")


def _git(repository: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)} in {repository}: {done.stderr.decode().strip()}")
    return done.stdout
