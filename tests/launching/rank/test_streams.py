"""The output of a rank is a pipe, whatever that of the notebook is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nbaccel.launching.api import launch


def test_the_output_of_a_rank_cannot_seek_where_that_of_the_notebook_is_a_file(tmp_path: Path) -> None:
    def can_seek() -> list[bool]:
        return [stream.seekable() for stream in (sys.stdout, sys.stderr)]

    before = os.dup(1)
    try:
        with open(tmp_path / "jupyter.log", "wb") as log:
            os.dup2(log.fileno(), 1)
        assert launch(can_seek, 1, start_method="fork").value == [False, False]
    finally:
        os.dup2(before, 1)
        os.close(before)
