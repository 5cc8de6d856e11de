"""What is said, or refused, before a run starts: devices, host memory, cores for loader workers, checkpoints."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nbaccel.launching.earlier_models
import nbaccel.launching.kernel_models
import nbaccel.launching.plan
import nbaccel.notebook.session
from fakes import FakeCards
from nbaccel.base.hardware import Gpu, MemoryInfo, Survey
from nbaccel.errors import LaunchRefused
from nbaccel.launching.earlier_models import MadeAt, where_made
from nbaccel.launching.kernel_models import KernelHolding, ModelsOnHost
from nbaccel.launching.preflight import ProcessState
from nbaccel.namespace.names import made_before_read
from nbaccel.notebook.shortages import loaders_in

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
    monkeypatch.setattr(nbaccel.notebook.session, "held_here", lambda names: [held])
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
    monkeypatch.setattr(nbaccel.notebook.session, "held_here", lambda names: [held])
    assert bool(said(planned, "%%accelerate -n 2\nx = 1")) is is_said, "6 GB are free"


FULL = Survey((replace(TWO_T4[0], used_bytes=15 * GB),), 4, MemoryInfo(30 * GB, 20 * GB))


@pytest.mark.parametrize("survey", [FULL], indirect=True)
@pytest.mark.parametrize(("nbytes", "has_room"), [(GB, True), (GB // 10, False)])
def test_a_card_is_not_full_where_the_flag_makes_room(
    planned: Any, cards: FakeCards, monkeypatch: pytest.MonkeyPatch, nbytes: int, has_room: bool
) -> None:
    monkeypatch.setattr(ModelsOnHost, "bytes_on", lambda aside, device: nbytes if device == "cuda:0" else 0)
    (line,) = said(planned, "%%accelerate -n 1\nx = 1")
    assert line.startswith("GPU 0 Tesla T4 is full: 0.0 GB of 15.0 GB are free")
    assert said(planned, "%%accelerate -n 1 --free-kernel\nx = 1") == ([] if has_room else [line])


UNTOLD = Survey((replace(TWO_T4[0], total_bytes=0, used_bytes=0),), 4, MemoryInfo(30 * GB, 20 * GB))


@pytest.mark.parametrize("survey", [UNTOLD], indirect=True)
def test_a_card_whose_memory_the_driver_does_not_tell_is_neither_full_nor_too_small(
    planned: Any, on_a_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.run(MAKES_IT)
    held = KernelHolding("cuda:0", 12 * GB, 15 * GB, (("data", 8 * GB),))
    monkeypatch.setattr(nbaccel.notebook.session, "held_here", lambda names: [held])
    assert said(planned, "%%accelerate -n 1\nx = 1") == []
    on_a_device(model={"cuda:0": 8 * GB})
    (line,) = said(planned, TRAINS.replace("-n 2", "-n 1"))
    assert line.startswith("model lies on cuda:0 (8.0 GB): each rank gets a copy")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    cards = FakeCards()
    monkeypatch.setattr(nbaccel.notebook.session, "CudaMemory", lambda numbers: cards)
    monkeypatch.setattr(nbaccel.launching.kernel_models, "_PAUSE_S", 0.0)
    return cards


@with_gpus
def test_a_model_that_can_leave_the_card_is_said_with_the_flag_and_nothing_with_it(
    planned: Any, monkeypatch: pytest.MonkeyPatch, cards: FakeCards
) -> None:
    planned.run(MAKES_IT)
    model = planned.names["model"]
    cards.put(*model.parameters())
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    survey = Survey(
        tuple(replace(gpu, total_bytes=100, used_bytes=80) for gpu in TWO_T4), 4, MemoryInfo(30 * GB, 20 * GB)
    )
    planned.session.survey = lambda: survey
    held = KernelHolding("cuda:0", nbytes + 30, 100, (("data", 30), ("model", nbytes)))
    monkeypatch.setattr(nbaccel.notebook.session, "held_here", lambda names: [held])
    monkeypatch.setattr(
        nbaccel.notebook.session, "before_a_run", lambda gpus, freed_on: []
    )  # of a card with some bytes only
    assert said(planned, "%%accelerate -n 2\nx = 1")[0].endswith(
        "and 20 bytes are free there for rank 0: --free-kernel moves model to the host for the run; "
        "nbaccel.free_memory(data) in a cell before this one gives it back"
    )
    of_the_flag = said(planned, "%%accelerate -n 2 --free-kernel\nx = 1")
    assert of_the_flag[0].endswith(": nbaccel.free_memory(data) in a cell before this one gives it back")
    assert of_the_flag[1] == "on the host until the run is over: model 0.0 GB"
    held = KernelHolding("cuda:0", nbytes, 100, (("model", nbytes),))
    assert said(planned, "%%accelerate -n 2 --free-kernel\nx = 1") == of_the_flag[1:]


@with_gpus
def test_a_model_that_fits_once_the_notebooks_own_has_left_is_refused_with_the_flag_that_does_it(
    planned: Any, on_a_device: Any, cards: FakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.run(MAKES_IT)
    on_a_device(model={"cuda:0": 8 * GB})
    monkeypatch.setattr(ModelsOnHost, "bytes_on", lambda aside, device: 8 * GB if device == "cuda:0" else 0)
    error = planned.run("%%accelerate -n 1\nmodel, = accelerator.prepare(model),").error
    assert "beside what the notebook holds: add --free-kernel, or move line 2 of Cell" in str(error)
    monkeypatch.setattr(ModelsOnHost, "names", {"model": 8 * GB})
    assert said(planned, "%%accelerate -n 1 --free-kernel\nmodel, = accelerator.prepare(model),")[:1] == [
        "on the host until the run is over: model 8.0 GB"
    ]


@with_gpus
def test_models_that_cannot_be_read_are_no_error_of_a_cell_and_named_with_the_flag_alone(
    planned: Any, cards: FakeCards
) -> None:
    planned.names.update({"lazy": torch.nn.LazyLinear(2), "hollow": torch.nn.Linear.__new__(torch.nn.Linear)})
    assert said(planned, "%%accelerate -n 2\nx = 1") == []
    assert said(planned, "%%accelerate -n 2 --free-kernel\nx = 1") == [
        "hollow stays where it is: it cannot be read",
    ]


@pytest.mark.parametrize(
    ("flags", "survey", "looks"),
    [
        ("", Survey(TWO_T4, 4), True),
        ("--cpu", Survey(TWO_T4, 4), False),
        ("--cpu --free-kernel", Survey(TWO_T4, 4), True),
        ("", Survey((), 4), False),
    ],
    indirect=["survey"],
)
def test_models_of_the_notebook_are_looked_at_where_a_run_uses_cards_or_the_flag_asks_for_it(
    planned: Any, cards: FakeCards, monkeypatch: pytest.MonkeyPatch, flags: str, looks: bool
) -> None:
    planned.names["model"] = torch.nn.Linear(2, 2)
    found: list[Any] = []
    monkeypatch.setattr(ModelsOnHost, "_find", lambda aside, values: found.append(values))
    said(planned, f"%%accelerate -n 2 {flags}\nx = 1")
    assert any("model" in values for values in found) is looks


TRAINS_RAW = """
before = cards.device_of(model.weight.untyped_storage())
with torch.no_grad():
    model.weight += 1
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('at the end')"])
def test_a_run_finds_the_card_free_and_leaves_the_notebooks_model_on_it_trained(
    notebook: Any, cards: FakeCards, end: str
) -> None:
    notebook.run(MAKES_IT)
    model = notebook.names["model"]
    notebook.names["cards"] = cards
    cards.put(*model.parameters())
    weight = model.weight.detach().clone()
    ran = notebook.run(f"%%accelerate -n 1 --free-kernel{TRAINS_RAW}{end}")
    assert (ran.error is None) is (not end)
    assert notebook.names["before"] == "", "as the rank saw it"
    assert notebook.names["model"] is model
    assert torch.equal(model.weight, weight + 1)
    assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())


def test_an_interrupt_while_models_come_back_is_raised_after_all_of_the_run_is_in_the_notebook(
    notebook: Any, cards: FakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run(MAKES_IT)
    model = notebook.names["model"]
    notebook.names["cards"] = cards
    cards.put(*model.parameters())
    weight, back = model.weight.detach().clone(), cards.back

    def interrupted(storage: Any, device: str) -> Any:
        signal.raise_signal(signal.SIGINT)
        return back(storage, device)

    monkeypatch.setattr(cards, "back", interrupted)
    ran = notebook.run(f"%%accelerate -n 1 --free-kernel{TRAINS_RAW}")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert ran.stdout.splitlines()[-1] == "KeyboardInterrupt: interrupted while no rank was running."
    assert torch.equal(model.weight, weight + 1)
    assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert str(notebook.session.last_run.end) == "done"
    ran = notebook.run(f"%%accelerate -n 1 --free-kernel{TRAINS_RAW}raise ValueError('of the run')")
    assert str(ran.error) == "of the run"
    assert torch.equal(model.weight, weight + 1 + 1)


MAKES_IT = "import torch\nmodel = torch.nn.Linear(2, 1)"
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
