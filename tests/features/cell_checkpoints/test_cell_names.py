"""The names of a notebook that decide how its cell runs."""

from __future__ import annotations

from typing import Any

from nbaccel.features.cell_checkpoints.cell_names import CellNames
from nbaccel.launching.tasks.cell_code import CellSource

NOTEBOOK = """
import torch
from torch.utils.data import DataLoader, Dataset, Subset

NOISE, MEAN, SCALE, DEPTH, other = 0.3, [1.0], 2.0, 3, [4]

class Samples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * NOISE - MEAN[0]

def joined(rows):
    return torch.tensor(rows) * SCALE

class Block(torch.nn.Module):
    def forward(self, x):
        return x * DEPTH

def unused():
    return other

loader = DataLoader(Subset(Samples(), [0, 1]), collate_fn=joined)
model = torch.nn.Sequential(Block())
rows = [loader] * 1_000_000
"""


def test_what_is_inside_of_loaders_and_models_reads_names_too() -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK, notebook)
    names = CellNames(CellSource("for x in loader:\n    model(x); len(rows)", "In [2]"), notebook)
    compared = names.compared({name: value for name, value in notebook.items() if not name.startswith("__")})
    read = {"NOISE", "MEAN", "Samples", "joined", "SCALE", "Block", "DEPTH"}
    assert compared - {"torch"} == {"loader", "model", "rows"} | read
