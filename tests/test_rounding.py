"""The imitation of a processor that rounds by rows does so, here and in programs, and computes the right numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from environments import REPOSITORY
from rounding import VARIABLE, is_asked_for, round_by_rows_in_programs

PROGRAM = """
from nbaccel.testing import run_ranks
from test_rounding import which_round_by_rows

print(which_round_by_rows(), *run_ranks(2, which_round_by_rows))
"""


def which_round_by_rows() -> list[bool]:
    """Return for each kind of product if a row of it depends on how many there are. Called in programs and ranks."""
    torch.manual_seed(0)
    x, images = torch.randn(8, 64).double(), torch.randn(8, 6, 5, 5).double()
    others = torch.randn(64, 16).double()
    products = [
        (nn.Linear(64, 16).double(), x),
        (lambda x: x @ others, x),
        (lambda x: x.view(-1, 1, 64) @ others.expand(len(x), 64, 16), x),
        (nn.Conv2d(6, 4, 3).double(), images),
        (nn.ConvTranspose2d(6, 4, 3, stride=2).double(), images),
    ]
    found = []
    for product, values in products:
        with torch.no_grad():
            whole, part = product(values), product(values[:4])
            assert torch.equal(whole, product(values)), "the same call gives the same bits"
        torch.testing.assert_close(whole[:4], part, rtol=0, atol=1e-12)
        found.append(not torch.equal(whole[:4], part))
    return found


@pytest.mark.slow
def test_programs_and_ranks_round_by_rows_and_compute_the_right_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    round_by_rows_in_programs(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == " ".join(3 * [str(5 * [True])]), done.stderr


def test_pytest_itself_rounds_by_rows_where_it_is_asked_to_as_make_processors_does() -> None:
    settings = re.search(r"^amx := (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)
    assert settings is not None
    assert f"{VARIABLE}=rows" in settings[1].split()
    if is_asked_for():  # else it depends on the processor
        assert all(which_round_by_rows())
