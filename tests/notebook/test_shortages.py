"""What is said, or refused, before a run starts: devices, host memory, cores for loader workers, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nbaccel.launching.earlier_models
import nbaccel.launching.kernel_holdings
import nbaccel.launching.plan
from nbaccel.base.hardware import MemoryInfo, Survey
from nbaccel.errors import LaunchRefused
from nbaccel.launching.kernel_holdings import KernelHolding
from nbaccel.launching.made_in_cells import MadeAt, where_made
from nbaccel.namespace.names import made_before_read
from nbaccel.notebook.shortages import loaders_in
from planned_cells import GB, MAKES_IT, TWO_T4, on_a_device, said, survey, with_gpus

__all__ = ["on_a_device", "survey"]


def loader(rows: int, workers: int) -> DataLoader[Any]:
    made = DataLoader(TensorDataset(torch.zeros(rows, 250, dtype=torch.float64)))
    made.num_workers = workers  # afterwards: torch warns of more workers than this machine has cores
    return made


def test_more_workers_than_cores_are_one_line_before_the_start(planned: Any) -> None:
    planned.names["loader"] = loader(1000, 4)
    assert said(planned, "%%accelerate -n 2\nfor batch in loader: pass") == [
        "loader has 4 workers in each of 2 ranks, 8 processes on 4 cores; each may come to hold a copy of its data set "
        "(2.0 MB x 8 = 16.0 MB, 20.0 GB available): num_workers=2 is what this machine has room for"
    ]


@pytest.mark.parametrize("workers", ["4", "n"])
def test_a_loader_that_the_cell_makes_is_seen_in_its_text(planned: Any, workers: str) -> None:
    planned.names.update({"n": 4, "data": [1, 2, 3]})
    cell = f"%%accelerate -n 2\nimport torch\nloader = torch.utils.data.DataLoader(data, num_workers={workers})"
    (line,) = said(planned, cell)
    assert line.startswith("the DataLoader of line 3 has 4 workers in each of 2 ranks, 8 processes on 4 cores: num")


def test_workers_that_have_cores_and_memory_are_no_line(planned: Any) -> None:
    planned.names["loader"] = loader(1000, 2)
    assert said(planned, "%%accelerate -n 2\nfor batch in loader: pass") == []


@pytest.mark.parametrize("survey", [Survey(cpu_count=64, ram=MemoryInfo(GB, 12_000_000))], indirect=True)
def test_workers_whose_copies_of_the_data_do_not_fit_are_a_line(planned: Any) -> None:
    planned.names["loader"] = loader(1000, 4)
    (line,) = said(planned, "%%accelerate -n 2\nfor batch in loader: pass")
    assert "(2.0 MB x 8 = 16.0 MB, 12.0 MB available): num_workers=2 is what" in line


def test_a_loader_that_the_cell_makes_anew_is_not_judged_by_the_old_one(planned: Any) -> None:
    planned.names.update({"loader": loader(10, 8), "data": [1, 2, 3]})
    cell = "%%accelerate -n 2\nfrom torch.utils.data import DataLoader\nloader = DataLoader(data)\nlist(loader)"
    assert said(planned, cell) == []


@with_gpus
def test_a_device_that_the_notebook_holds_is_said_with_names_and_the_line_that_frees(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = KernelHolding("cuda:0", 12 * GB, 15 * GB, (("model", 8 * GB), ("Out[3]", GB)))
    monkeypatch.setattr(nbaccel.launching.kernel_holdings, "held_here", lambda names: [held])
    assert said(planned, "%%accelerate -n 2\nx = 1") == [
        "the notebook itself holds 12.0 of 15.0 GB on cuda:0 (model 8.0 GB, Out[3] 1.0 GB), and 6.0 GB are free there "
        "for rank 0: nbaccel.free_memory(model) in a cell before this one gives it back"
    ]
    assert said(planned, "%%accelerate -n 1 -d 1\nx = 1") == [], "the rank is elsewhere"


@with_gpus
@pytest.mark.parametrize(("nbytes", "is_said"), [(600_000_000, False), (700_000_000, True)])
def test_what_the_notebook_holds_is_weighed_against_what_is_free(
    planned: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int, is_said: bool
) -> None:
    held = KernelHolding("cuda:0", nbytes, 15 * GB, (("data", nbytes),))
    monkeypatch.setattr(nbaccel.launching.kernel_holdings, "held_here", lambda names: [held])
    assert bool(said(planned, "%%accelerate -n 2\nx = 1")) is is_said, "6 GB are free"


UNTOLD = Survey((replace(TWO_T4[0], total_bytes=0, used_bytes=0),), 4, MemoryInfo(30 * GB, 20 * GB))


@pytest.mark.parametrize("survey", [UNTOLD], indirect=True)
def test_a_card_whose_memory_the_driver_does_not_tell_is_neither_full_nor_too_small(
    planned: Any, on_a_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.run(MAKES_IT)
    held = KernelHolding("cuda:0", 12 * GB, 15 * GB, (("data", 8 * GB),))
    monkeypatch.setattr(nbaccel.launching.kernel_holdings, "held_here", lambda names: [held])
    assert said(planned, "%%accelerate -n 1\nx = 1") == []
    on_a_device(model={"cuda:0": 8 * GB})
    (line,) = said(planned, TRAINS.replace("-n 2", "-n 1"))
    assert line.startswith("model lies on cuda:0 (8.0 GB): each rank gets a copy")


TRAINS = "%%accelerate -n 2\nmodel, = accelerator.prepare(model),"


@with_gpus
def test_a_model_that_lies_on_a_device_is_carried_and_said(planned: Any, on_a_device: Any) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": 2 * GB})
    (line,) = said(planned, TRAINS)
    assert line.startswith("model lies on cuda:0 (2.0 GB): each rank gets a copy on its own device")
    assert "move line 2 of Cell In[" in line
    assert line.endswith("], `model = torch.nn.Linear(2, 1)` into this cell")


@with_gpus
def test_a_model_that_does_not_fit_beside_the_notebooks_own_is_refused(planned: Any, on_a_device: Any) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": 8 * GB})
    error = planned.run(TRAINS).error
    assert isinstance(error, LaunchRefused)
    assert "rank 0's device, GPU 0 Tesla T4, has 6.0 GB of 15.0 GB left beside what the notebook holds: " in str(error)


@with_gpus
def test_a_quantised_model_and_one_on_several_devices_are_refused_with_the_line_to_move(
    planned: Any, on_a_device: Any
) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": GB, "cuda:1": GB})
    assert str(planned.run(TRAINS).error).startswith(
        "model is spread over cuda:0 and cuda:1 (2.0 GB): 2 ranks need it whole, each on one device. Move line 2 of "
    )
    on_a_device(model={"cuda:0": GB})
    planned.names["model"].is_loaded_in_4bit = True
    error = str(planned.run(TRAINS).error)
    assert error.startswith("model was loaded quantised and lies on cuda:0 (1.0 GB): ")
    assert "into this cell, onto accelerator.device:\n  accelerator = Accelerator()\n  model = torch.nn.Lin" in error
    assert "Nothing was copied or started." in error
    (line,) = planned.session.launcher.specs or ["none"]
    assert line == "none"


QUANTISED = """
import torch
class Params4bit(torch.nn.Parameter):
    pass
def load(**how):
    made = torch.nn.Linear(2, 1)
    made.weight = Params4bit(made.weight.detach(), requires_grad=False)
    return made
model = load(device_map="auto")
def train():
    return model(torch.ones(2))
def work():
    return train()
held = {"a": [model]}
"""
BY_ZYGOTE = "%%accelerate --start zygote -n 2\n"


@pytest.mark.parametrize(
    ("cell", "is_refused"),
    [
        ("model", True),
        ("train()", True),
        ("work()", True),
        ("held['a']", True),
        ("print('model')", False),
        ("del model", False),
        ("del model\nmodel = load()\nmodel.train()", False),
        ("if 'model' in globals():\n    del model\nmodel = load()\ntrain()", False),
        ("model = load(device_map={'': accelerator.device})\ntrain()", False),
        ("train()\nmodel = load()", True),
        ("print(model)\ndel model", True),
        ("if held is None:\n    del model\nprint(model)", True),
        ("if held2:\n    model = load()\ntrain()", True),
        ("%time train()\nmodel = load()", True),
        ("x = 1", False),
    ],
)
def test_a_model_that_cannot_be_sent_is_refused_where_the_cell_needs_its_value(
    planned: Any, cell: str, is_refused: bool
) -> None:
    assert planned.run(QUANTISED).error is None
    planned.names["held2"] = []
    error = planned.run(f"{BY_ZYGOTE}{cell}").error
    assert isinstance(error, LaunchRefused)
    assert ("was loaded quantised" in str(error)) is is_refused, error
    assert bool(planned.session.launcher.specs) is not is_refused
    if is_refused:
        assert "\n  accelerator = Accelerator()\n  model = load(device_map={'': accelerator.device})\n" in str(error)


@with_gpus
def test_the_states_of_an_optimizer_count_for_the_room_that_ranks_need(
    planned: Any, on_a_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": 2 * GB}, optimizer={"cuda:0": 5 * GB})
    planned.names["optimizer"] = [1]
    monkeypatch.setattr(nbaccel.launching.plan, "sizes_on_devices", nbaccel.launching.earlier_models.sizes_on_devices)
    error = str(planned.run(f"{TRAINS}\noptimizer").error)
    assert error.startswith("model (2.0 GB, on cuda:0) and what lies there beside it (7.0 GB) would be copied to every")


@pytest.mark.parametrize("survey", [Survey(cpu_count=4, ram=MemoryInfo(GB, 2_000_000))], indirect=True)
@pytest.mark.parametrize(
    ("made", "is_refused"),
    [
        ("data = torch.zeros(300_000)", False),  # 60 % of the host, which all ranks share
        ("data = torch.zeros(600_000)", True),
        ("data = b'x' * 1_200_000", True),  # 60 % of it, in each rank
        ("data = b'x' * 400_000", False),
    ],
)
def test_what_ranks_share_is_weighed_once_and_what_each_builds_for_every_rank(
    planned: Any, made: str, is_refused: bool
) -> None:
    planned.run(f"import torch\n{made}")
    error = str(planned.run(f"{BY_ZYGOTE}len(data)").error)
    assert ("2.0 MB available. The largest is data: move line 2 of " in error) is is_refused, error
    assert is_refused or error == "recorded"


@with_gpus
def test_a_model_that_was_moved_into_the_cell_is_not_refused_for_the_old_one(planned: Any, on_a_device: Any) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": 14 * GB})
    planned.plan(f"%%accelerate -n 2\n{MAKES_IT}\nmodel = accelerator.prepare(model)")


@pytest.mark.parametrize("survey", [Survey(TWO_T4, 4, MemoryInfo(GB, 1000))], indirect=True)
def test_more_than_the_host_can_copy_is_refused(planned: Any, on_a_device: Any) -> None:
    planned.run("data = b'x' * 2000")
    on_a_device()
    error = planned.run("%%accelerate -n 2\nlen(data)").error
    assert isinstance(error, LaunchRefused)
    assert "the host has 1 kB available. The largest is data: move line 1 of " in str(error)


@pytest.mark.parametrize("survey", [Survey(cpu_count=4, ram=MemoryInfo(GB, 50_000))], indirect=True)
def test_a_model_that_would_fill_the_host_in_every_rank_is_said(planned: Any) -> None:
    planned.names["model"] = torch.nn.Linear(100, 100)
    (line,) = said(planned, "%%accelerate --cpu -n 2\nmodel = accelerator.prepare(model)")
    assert line.startswith("model 40 kB: each of 2 ranks that trains on the CPU comes to hold a copy")


def test_a_first_version_with_nothing_to_resume_begins_anew_and_says_so(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = "%%accelerate --resume /kaggle/input/last-version/nbaccel_checkpoints\nx = 1"
    spec = planned.plan(cell)
    assert spec.settings.resume == ""
    assert "nothing is attached there, so this training begins anew" in planned.run(cell).stdout
    (tmp_path / "nbaccel_checkpoints" / "checkpoint_5").mkdir(parents=True)
    assert "the newest checkpoint in nbaccel_checkpoints is taken" in planned.run(cell).stdout


def test_a_source_that_is_probably_misspelled_is_refused(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    error = planned.run("%%accelerate --resume chekpoints/checkpoint_5\nx = 1").error
    assert f"did you mean {tmp_path}/checkpoints/checkpoint_5?" in str(error)


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("x = 1\ny = x", {"x", "y"}),
        ("y = x\nx = 1", {"y"}),
        ("x += 1", set()),
        ("x = x + 1", set()),
        ("if a:\n    x = 1\nprint(x)", set()),
        ("with a as x:\n    y = x", {"x", "y"}),
        ("for x in a:\n    print(x)", set()),
        ("def f():\n    return x\nx = 1", {"f"}),
        ("def f():\n    x = 1\nx = 2", {"f", "x"}),
        ("import a.b, c as d\nfrom e import g", {"a", "d", "g"}),
        ("del x\nx = 1", set()),
        ("x.y = 1\nx = 2", set()),
        ("(", set()),
    ],
)
def test_only_names_that_are_bound_in_any_case_before_they_are_read_need_not_be_there(
    code: str, made: set[str]
) -> None:
    assert made_before_read(code) == made


def test_the_last_line_that_made_a_name_is_found_also_among_magics() -> None:
    history = [
        "",
        "x = 1",
        "%matplotlib inline\n!ls\na, (x, b) = 1, (2, 3)",
        "%%bash\nx=3",
        "y = x\nx.y = 2",
        "print(x",
    ]
    place = where_made("x", history)
    assert place is not None
    assert (place.cell, place.line, place.text) == (2, 3, "a, (x, b) = 1, (2, 3)")
    assert where_made("nowhere", history) is None
    inside = "x = 1\ndef f():\n    x = 2\nif x:\n    y = 3\nclass C:\n    y = 4"
    assert where_made("x", ["", inside]) == MadeAt(1, 1, "x = 1")
    assert where_made("y", ["", inside]) == MadeAt(1, 5, "y = 3")


def test_workers_of_other_calls_and_of_unknown_numbers_are_left_alone() -> None:
    code = "TrainingArguments(num_workers=4)\nDataLoader(data, num_workers=count())\nDataLoader(data, num_workers=0)"
    assert list(loaders_in(code, {"data": [1]})) == []
