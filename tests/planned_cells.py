"""Cells on made-up cards, of which the launch is only planned: for tests of what is said before a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import nbaccel.launching.earlier_models
from nbaccel.base.hardware import Gpu, MemoryInfo, Survey
from nbaccel.launching.preflight import ProcessState

__all__ = ["GB", "MAKES_IT", "TWO_T4", "on_a_device", "said", "survey", "with_gpus"]

GB = 10**9


TWO_T4 = tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 15 * GB, 9 * GB, (7, 5)) for number in range(2))


@pytest.fixture
def survey(request: pytest.FixtureRequest) -> Survey:
    return getattr(request, "param", Survey(cpu_count=4, ram=MemoryInfo(30 * GB, 20 * GB)))


with_gpus = pytest.mark.parametrize("survey", [Survey(TWO_T4, 4, MemoryInfo(30 * GB, 20 * GB))], indirect=True)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the notebook one that has used CUDA, and whose names hold so many bytes by device."""

    def pretend(**sizes: dict[str, int]) -> None:
        monkeypatch.setattr(ProcessState, "now", staticmethod(lambda: ProcessState(True, True)))

        def by_device(values: Any) -> dict[str, Counter[str]]:
            found: dict[str, Counter[str]] = {}
            for name in values:
                for device, nbytes in sizes.get(name, {}).items():
                    found.setdefault(device, Counter())[name] = nbytes
            return found

        monkeypatch.setattr(nbaccel.launching.earlier_models, "sizes_on_devices", by_device)

    return pretend


def said(notebook: Any, cell: str) -> list[str]:
    """The lines of a cell whose launch is recorded, without those that say what will run."""
    lines = notebook.run(cell).stdout.splitlines()
    assert lines[-1] == "LaunchRefused: recorded"
    return [line for line in lines[1:-1] if not line.startswith("zygote, not fork: ")]


MAKES_IT = "import torch\nmodel = torch.nn.Linear(2, 1)"
