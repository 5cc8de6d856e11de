"""Tests on a real CUDA device: ``pytest -m gpu tests/gpu``. Each runs in a process of its own.

A process that has used CUDA cannot fork ranks any more, and memory that one test leaves would be missing in the next:
so pytest's process starts `programs/` and touches no device itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments import REPOSITORY
from nbaccel.hardware import Survey

PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them, with the reason, where there is no device. By NVML, which makes no CUDA context."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if here and not Survey.take().gpus:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and NVML finds none here"))


@pytest.fixture
def program() -> Callable[..., Any]:
    """``program("memory.py", "cycles", ranks=2, **environment)``: what it printed last, out of JSON."""

    def run(name: str, *arguments: object, ranks: int = 0, timeout_s: float = 540, **environment: str) -> Any:
        start = [sys.executable]
        if ranks:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ended = subprocess.run(
            [*start, str(PROGRAMS / name), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert ended.returncode == 0, f"{name} {arguments} ended with {ended.returncode}\n{ended.stderr[-4000:]}"
        return json.loads(ended.stdout.strip().splitlines()[-1])

    return run
