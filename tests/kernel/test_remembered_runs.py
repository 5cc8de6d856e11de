"""The runs of a notebook in a real kernel: their table, a resumed one, and what a later kernel knows of them."""

from __future__ import annotations

import re

import pytest

from fixtures.kernels import Kernels
from kernel.harness import Cell, accelerate

TRAINS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.arange(160) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for epoch in accelerator.epochs({epochs}):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def rows(cell: Cell) -> list[str]:
    """The lines of a table that a cell shows, without its head."""
    assert cell.result is not None, cell.text
    return str(cell.result["text/plain"]).splitlines()[1:]


@pytest.mark.slow
def test_cells_and_launches_are_in_one_table_and_can_be_compared(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel\nimport nbaccel")
    assert kernel.do("%accelerate runs").result == kernel.do("nbaccel.runs").result
    kernel.do(accelerate(TRAINS.format(epochs=1), flags="--seed 1"))
    kernel.do(accelerate(TRAINS.format(epochs=1), flags="--seed 2"))
    kernel.do("nbaccel.launch(pow, 1, (2, 5), cpu=True)")
    kernel.run(accelerate("raise ValueError('11 classes')"))
    shown = kernel.do("%accelerate runs")
    first, second, third, fourth = rows(shown)
    assert re.search(r"^ *1 .*Cell In\[\d+\] +--cpu -n 2 --start auto --seed 1 +1  loss \S+ .* done, 20 steps$", first)
    assert re.search(r" 2  loss \S+ .* done, 20 steps$", second)
    assert re.search(r" pow\(2, 5\) .* done$", third)
    assert re.search(r"failed: (rank \d, )?ValueError: 11 classes$", fourth)  # of both ranks, or one was faster
    assert shown.result is not None
    assert "<script" not in shown.result["text/html"]
    compared = kernel.do("%accelerate runs 1 2")
    assert compared.result is not None
    assert sorted(compared.result) == ["image/png", "text/plain"]
    assert compared.result["text/plain"].splitlines()[-1] == "different: seed (run 1: 1, run 2: 2)"
    assert kernel.do("%accelerate runs 1 2 loss").result is not None
    wrong = kernel.run("%accelerate runs f1")
    assert "%accelerate runs f1: no curve of these runs is called 'f1'; there is: loss." in wrong.text
    assert kernel.value("nbaccel.runs[-1] is nbaccel.last_run and len(nbaccel.runs)") == 4
    assert kernel.value("[run.number for run in nbaccel.runs[1:3]]") == [2, 3]
    assert kernel.value("nbaccel.runs.table()[0]['seed']") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_later_kernel_has_the_runs_that_were_kept_and_joins_one_that_goes_on(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel\nimport nbaccel")
    kernel.do("%accelerate config keep-runs=runs.jsonl --save")
    saves = "--checkpoint-every 10steps --checkpoint-dir saves"
    kernel.do(accelerate(TRAINS.format(epochs=1), flags=saves))
    kernel.kill()
    kernel.restart()
    kernel.do("%load_ext nbaccel\nimport nbaccel")
    assert kernel.value("(len(nbaccel.runs), nbaccel.runs[0].history.steps)") == [1, 20]
    kernel.do(accelerate(TRAINS.format(epochs=3), flags=f"{saves} --resume"))
    first, second = rows(kernel.do("%accelerate runs"))
    assert first.endswith("done, 20 steps, another kernel")
    assert re.search(r"done, (40|50) steps, goes on from run 1$", second)
    kernel.do("curve = nbaccel.runs._whole_curve(nbaccel.runs[-1], 'loss')")
    assert kernel.value("list(curve.step) == list(range(60))")
    assert kernel.do("%accelerate runs 1 2").result is not None
    assert kernel.value("len(open('runs.jsonl').readlines())") == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_kernels_beside_one_file_see_the_runs_of_each_other(new_kernel: Kernels) -> None:
    one, other = new_kernel(), new_kernel()
    for kernel in (one, other):
        kernel.do("%load_ext nbaccel\nimport nbaccel")
        kernel.do(f"%accelerate config keep-runs={one.folder}/both.jsonl")
    one.do("%%accelerate --cpu -n 1 --seed 11\n1")
    other.do("%%accelerate --cpu -n 1 --seed 22\n1")
    one.do("%%accelerate --cpu -n 1 --seed 12\n1")
    seeds = "[run.origin.seed for run in nbaccel.runs]"
    assert one.value(seeds) == [11, 22, 12]
    assert other.value(seeds) == [11, 22, 12]
    assert other.value("nbaccel.last_run.origin.seed") == 22
    assert "another kernel" in rows(other.do("%accelerate runs"))[2]
