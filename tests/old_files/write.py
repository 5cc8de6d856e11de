"""Write the files of this folder. Ran once, with the version that the README names; it refuses to overwrite.

    PYTHONPATH=.:tests python tests/old_files/write.py [FOLDER]

What each program of `old_trainings` read from them, the same day, is kept with them in expected.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nbaccel
from nbaccel.cli import main
from nbaccel.testing import run_ranks
from old_trainings import (
    FOLDER,
    SETTINGS,
    Program,
    autosaved,
    continued_in,
    draws,
    found_size,
    log_numbers,
    numbered,
    save_exported,
    save_more_than_data,
    save_scaled,
)

_OTHERS = {"README.md", "write.py"}


def save(project: str | None, folder: str | None, batches: int) -> dict[str, Any]:
    """A checkpoint in the middle of the second epoch, and how the training would have gone on without an end."""
    program = Program.start(project_config=None if project is None else numbered(project))
    state: dict[str, Any] = {}
    drawn: dict[str, Any] = {}

    def then() -> None:
        program.accelerator.save_state(folder)
        state.update(program.state())
        drawn.update(draws())

    program.epoch()
    return program.rest(state, drawn, batches=batches, then=then)


def configure(folder: Path) -> str:
    """What `nbaccel config` says of the file that it has written."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["config", *(f"{key}={value}" for key, value in SETTINGS.items())]) == 0
        said.truncate(0)
        said.seek(0)
        assert main(["config"]) == 0
    return said.getvalue()


def write(folder: Path) -> None:
    if there := sorted(path.name for path in folder.iterdir() if path.name not in _OTHERS):
        sys.exit(f"{folder} holds files of an older version, which are never written again: {', '.join(there)}")
    expected: dict[str, Any] = {
        "written by": {"nbaccel": nbaccel.__version__, "torch": torch.__version__, "numpy": np.__version__}
    }
    one = [save(os.fspath(folder / "one_rank"), None, 4)]
    two = run_ranks(2, save, None, os.fspath(folder / "two_ranks"), 2)
    save_more_than_data(os.fspath(folder / "more_than_data"))
    expected["scaler"] = save_scaled(os.fspath(folder / "scaled"))
    (folder / "scaled" / "generators_0.json").unlink()  # 25 kB, of which there are enough
    first = autosaved(os.fspath(folder / "autosaved"), batches=3, checkpoint_every="7steps", keep=2, resume=True)
    expected["exported"] = save_exported(folder / "exported")
    expected["config"] = configure(folder)
    log_numbers(os.fspath(folder / "numbers"))
    size, passes = found_size(os.fspath(folder / "sizes"))
    expected["found size"] = {"size": size, "passes": passes, "passes when found": found_size(str(folder / "sizes"))[1]}

    with tempfile.TemporaryDirectory() as copies:
        copy = Path(shutil.copytree(folder, Path(copies, "copy")))
        for ranks in (1, 2):
            expected[f"one_rank in {ranks}"] = continued_in(ranks, os.fspath(copy / "one_rank"), None)
            expected[f"two_ranks in {ranks}"] = continued_in(ranks, None, os.fspath(copy / "two_ranks"))
        two[1]["state"]["tally"] = two[0]["state"]["tally"]  # what rank 0 had is what all ranks get
        assert expected["one_rank in 1"] == one, "it did not go on as it would have without an end"
        assert expected["two_ranks in 2"] == two, "it did not go on as it would have without an end"
        expected["autosaved"] = {
            "before": first,
            "after": autosaved(os.fspath(copy / "autosaved"), batches=None, resume=True),
        }
    written = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _OTHERS]
    files = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in written}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in expected.items()]
    lines.append(f'"files": {json.dumps(files, indent=1)}')
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve() if sys.argv[1:] else FOLDER)
