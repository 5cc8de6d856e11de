"""What a cell with `--free-kernel` says and does, and what one without it says of the flag."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

import nbaccel.launching.kernel_holdings
from features.free_kernel.cards import FakeCards
from nbaccel.base.hardware import MemoryInfo, Survey
from nbaccel.features.free_kernel import models_on_host
from nbaccel.features.free_kernel.models_on_host import ModelsOnHost
from nbaccel.launching.kernel_holdings import KernelHolding
from planned_cells import GB, MAKES_IT, TWO_T4, on_a_device, said, survey, with_gpus

__all__ = ["on_a_device", "survey"]


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


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    cards = FakeCards()
    monkeypatch.setattr(models_on_host, "CudaMemory", lambda numbers: cards)
    monkeypatch.setattr(models_on_host, "_PAUSE_S", 0.0)
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
    monkeypatch.setattr(nbaccel.launching.kernel_holdings, "held_here", lambda names: [held])
    monkeypatch.setattr(
        nbaccel.launching.gpu_trouble, "before_a_run", lambda gpus, freed_on: []
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
