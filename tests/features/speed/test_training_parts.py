"""Changes of loaders, models and optimizers in a rank, and what is said of them."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.training_parts import TrainingParts, change_loader, change_optimizer

DATA = TensorDataset(torch.arange(40.0)[:, None])


@contextmanager
def parts(change: SpeedChange | None = None, **namespace: Any) -> Iterator[TrainingParts]:
    found = TrainingParts(change or SpeedChange(), namespace)
    found.begin()
    try:
        yield found
    finally:
        found.end()


def trained(found: TrainingParts, loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for batch in loader:
        found.note_model(model)
        model(batch[0]).mean().backward()
        optimizer.step()
        found.note_step(optimizer)
    return found.facts()


def test_the_parts_of_a_training_are_described() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(DATA, 8)
    with parts(net=model, optimizer=optimizer, loader=loader) as found:
        facts = trained(found, loader, model, optimizer)
    assert facts["loader"] == {
        "name": "loader",
        "file": "",
        "line": 0,
        "num_workers": 0,
        "batch_size": 8,
        "can_grow": True,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "samples": 40,
    }
    assert facts["model"] == {
        "name": "net",
        "file": "",
        "line": 0,
        "kind": "Linear",
        "has_convolutions": False,
        "is_random": False,
        "is_compiled": False,
    }
    assert (facts["optimizer"]["name"], facts["optimizer"]["kind"]) == ("optimizer", "Adam")
    assert (facts["optimizer"]["can_fuse"], facts["optimizer"]["tensors"]) == (True, 2)
    assert not facts["draws"]


def test_what_the_program_makes_is_known_by_its_line() -> None:
    model = nn.Linear(1, 1)
    with parts() as found:
        loader = DataLoader(DATA, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        facts = trained(found, loader, model, optimizer)
    assert facts["loader"]["file"] == facts["optimizer"]["file"] == __file__
    assert facts["optimizer"]["line"] == facts["loader"]["line"] + 1


@pytest.mark.parametrize("is_made_before", [True, False])
def test_loaders_are_changed_wherever_they_are(is_made_before: bool) -> None:
    change = SpeedChange(loader={"pin_memory": True}, batch_factor=2)
    before = [DataLoader(DATA, 8)]  # no name leads to it
    gc.freeze()  # as before a fork
    with parts(change):
        assert gc.get_freeze_count(), "collections would copy what the notebook has, page by page"
        loader = before[0] if is_made_before else DataLoader(DATA, 8)
        assert (loader.batch_size, loader.pin_memory, len(loader)) == (16, True, 3)
        loader.pin_memory = False
        assert [len(batch[0]) for batch in loader] == [16, 16, 8]


def test_afterwards_classes_are_as_before() -> None:
    before = DataLoader.__init__, torch.optim.Optimizer.__init__
    with parts():
        assert DataLoader.__init__ is not before[0]
    assert (DataLoader.__init__, torch.optim.Optimizer.__init__) == before


def test_workers_bring_and_take_along_what_belongs_to_them() -> None:
    loader = DataLoader(DATA, 8)
    change_loader(loader, SpeedChange(loader={"num_workers": 2, "persistent_workers": True}))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 2, True)
    change_loader(loader, SpeedChange(loader={"num_workers": 0}))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)


def test_batches_of_the_programs_own_sampler_stay() -> None:
    class Own(BatchSampler): ...

    loader = DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 8, False))
    change_loader(loader, SpeedChange(batch_factor=2))
    assert [len(batch[0]) for batch in loader] == [8] * 5


def test_an_optimizer_that_has_stepped_steps_on_as_a_fused_one() -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), foreach=True) for model in models]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
        if not number:
            change_optimizer(optimizers[1], {"fused": True})
    torch.testing.assert_close(models[0].weight, models[1].weight)
    assert optimizers[1].param_groups[0]["fused"]


class Drawing(Dataset[torch.Tensor]):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._kind == "torch":
            return torch.rand(1)
        return torch.tensor([random.random() if self._kind == "python" else float(index)])


@pytest.mark.parametrize(("kind", "draws"), [("torch", True), ("python", True), ("none", False)])
def test_a_data_set_that_draws_random_numbers_is_known(kind: str, draws: bool) -> None:
    with parts() as found:
        loader = DataLoader(Drawing(kind), 8, shuffle=True)
        for _ in range(2):
            list(loader)
    assert found.facts()["draws"] is draws


def test_the_model_is_changed_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda model: setattr(model, "_compiled_call_impl", model._call_impl))
    model = nn.Conv2d(3, 2, 1)
    with parts(SpeedChange(channels_last=True)) as found:
        assert found.note_model(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert found.facts()["model"]["has_convolutions"]
    with parts(SpeedChange(compiles=True)) as found:
        assert not found.note_model(model)
    assert found.facts()["model"]["is_compiled"]


class Wrapped(nn.Module):
    """A model of the program's own, which torch compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_which_torch_compiles_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``model.compile()`` torch compiles the forward of no class of its own, as of 2.13."""
    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model: real(model, backend="eager"))
    with parts(SpeedChange(compiles=True)) as found:
        model = Wrapped()
        found.note_model(model)
        assert found.facts()["compiles_nothing"]
        model(torch.ones(2, 3))
        assert not found.facts()["compiles_nothing"]
    with parts() as found:
        found.note_model(model)
        assert not found.facts()["compiles_nothing"]
    torch._dynamo.reset()
