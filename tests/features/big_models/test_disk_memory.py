"""What a model on the disk takes in memory: two blocks at most, whatever the model's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import environ_of_scripts
from benchmarks.offloading import write

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")]

BLOCKS, WIDTH = 16, 512
"""134 MB in blocks of 8.4 MB."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write(folder, BLOCKS, WIDTH)


def measured(folder: Path) -> dict[str, Any]:
    code = "import json, pathlib, benchmarks.offloading as it; "
    code += f"print(json.dumps(it.measured('nbaccel', pathlib.Path({str(folder)!r}), {BLOCKS}, {WIDTH})))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**environ_of_scripts(), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_a_model_on_the_disk_takes_two_blocks_at_most_and_nothing_is_written(checkpoint: tuple[Path, int]) -> None:
    folder, block = checkpoint
    before = {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")}
    found = measured(folder)
    assert found["equal"]
    assert found["bytes"] <= 1.2 * 2 * block
    assert found["written"] == 0
    assert {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")} == before
