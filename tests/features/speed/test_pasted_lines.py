"""Statements to paste: they are found in the notebook's cells, and rewritten."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.pasted_lines import NotebookCells, lines_to_paste

WORKERS = SpeedChange(loader={"num_workers": 2})
LOADER = {"name": "", "file": "", "line": 0, "batch_size": 32, "num_workers": 0}
ADAM = {"name": "optimizer", "file": "", "line": 0, "kind": "Adam"}


def lines(change: SpeedChange, cells: dict[int, str], running: int = 9, **facts: Any) -> list[str]:
    def number_of(file: str) -> int | None:
        match = re.fullmatch(r"Cell In\[(\d+)\]", file)
        return int(match[1]) if match else None

    return [str(line) for line in lines_to_paste(change, facts, NotebookCells(cells, running, number_of))]


def of_loader(change: SpeedChange, *cells: str, **place: Any) -> list[str]:
    return lines(change, dict(enumerate(cells, 1)), loader={**LOADER, **place})


def test_a_loader_of_the_notebook_is_rewritten_where_it_was_assigned_last() -> None:
    cells = "loader = DataLoader(old)", "import torch\n\nloader = torch.utils.data.DataLoader(data, 32, shuffle=True)"
    assert of_loader(WORKERS, *cells, name="loader") == [
        "Cell In[2], line 3: loader = torch.utils.data.DataLoader(data, 32, shuffle=True, num_workers=2)"
    ]


def test_a_loader_that_the_run_has_made_is_found_by_its_line() -> None:
    cell = "%%accelerate\ndef train():\n    for x in DataLoader(\n        data, 32\n    ):\n        step(x)\ntrain()"
    assert of_loader(WORKERS, cell, "other = DataLoader(x)", file="Cell In[1]", line=3) == [
        "Cell In[1], line 3: for x in DataLoader(data, 32, num_workers=2):"
    ]


@pytest.mark.parametrize(
    ("call", "change", "expected"),
    [
        ("DataLoader(data, num_workers=8)", WORKERS, "DataLoader(data, num_workers=2)"),
        ("DataLoader(data, 32)", SpeedChange(batch_factor=4), "DataLoader(data, 128)"),
        ("DataLoader(data, batch_size=SIZE)", SpeedChange(batch_factor=4), "DataLoader(data, batch_size=128)"),
        (
            "DataLoader(data, num_workers=2, prefetch_factor=4, persistent_workers=True)",
            SpeedChange(loader={"num_workers": 0}),
            "DataLoader(data, num_workers=0)",
        ),
        ("DataLoader(data, **options)", WORKERS, "DataLoader(data, **{**options, 'num_workers': 2})"),
        ("DataLoader(*parts)", WORKERS, "DataLoader(*parts, num_workers=2)"),
    ],
)
def test_arguments_are_replaced_or_added(call: str, change: SpeedChange, expected: str) -> None:
    (line,) = of_loader(change, f"loader = {call}", name="loader")
    text, _, remark = line.removeprefix("Cell In[1], line 1: ").partition("  # ")
    assert text == f"loader = {expected}"
    assert remark == ("changes the training: 4 times fewer steps" if change.batch_factor > 1 else "")


def test_of_two_loaders_in_one_statement_the_right_one_is_changed() -> None:
    cell = "train, test = DataLoader(a, shuffle=True), DataLoader(b)"
    assert of_loader(WORKERS, cell, name="train") == [
        "Cell In[1], line 1: train, test = (DataLoader(a, shuffle=True, num_workers=2), DataLoader(b))"
    ]


def test_a_name_of_a_function_is_not_that_of_the_notebook() -> None:
    cells = "loader = DataLoader(data)", "def f():\n    loader = DataLoader(other)"
    assert of_loader(WORKERS, *cells, name="loader")[0].startswith("Cell In[1], line 1: loader = DataLoader(data, ")


def test_a_loader_that_is_not_found_is_described() -> None:
    assert of_loader(WORKERS, "loader = make(data)", name="loader") == ["where loader is made: num_workers=2"]
    assert of_loader(WORKERS, "loader = make()", "def make():\n    return DataLoader(data)", name="loader") == [
        "Cell In[2], line 2: return DataLoader(data, num_workers=2)"
    ]


def test_a_fused_optimizer_is_no_foreach_one() -> None:
    found = lines(
        SpeedChange(optimizer={"fused": True}),
        {1: "model, optimizer = accelerator.prepare(model, optimizer)", 2: "optimizer = Adam(p, foreach=False)"},
        optimizer=ADAM,
    )
    assert found == ["Cell In[2], line 1: optimizer = Adam(p, fused=True)"]


def test_changes_of_one_statement_are_one_line() -> None:
    change = SpeedChange(loader={"num_workers": 2}, optimizer={"fused": True})
    cell = "loader, optimizer = DataLoader(data), Adam(p)"
    found = lines(change, {1: cell}, loader={**LOADER, "name": "loader"}, optimizer=ADAM)
    assert found == ["Cell In[1], line 1: loader, optimizer = (DataLoader(data, num_workers=2), Adam(p, fused=True))"]


def test_a_model_is_changed_behind_the_statement_that_makes_it() -> None:
    change = SpeedChange(compiles=True, channels_last=True)
    cells = {1: "x = 1\nnet = Net()", 9: "net, optimizer = accelerator.prepare(net, optimizer)"}
    assert lines(change, cells, model={"name": "net"}) == [
        "after Cell In[1], line 2: net.to(memory_format=torch.channels_last)",
        "after Cell In[1], line 2: net.compile()",
    ]
    assert lines(SpeedChange(compiles=True), {}, model={"name": ""}) == [
        "where the model is made, after it: model.compile()"
    ]


def test_threads_and_precision_belong_to_the_running_cell() -> None:
    assert lines(SpeedChange(threads=1, precision="bf16"), {}) == [
        "Cell In[9], as its first line: torch.set_num_threads(1)",
        "Cell In[9], in its %%accelerate line: -p bf16",
    ]
