"""Values that came back become variables: in place where the notebook has their like, else as new objects."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.base.quantities import amount
from nbaccel.namespace.install import Arrival, install

SIZES = {"model": 1000}


def trained(*objects: Any) -> tuple[Any, ...]:
    """Copies, as they come out of one pickle, of a model and its optimizer that took a step."""
    came = pickle.loads(pickle.dumps(objects))
    model, optimizer = came[0], came[1]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return tuple(came)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def hows(arrivals: list[Arrival]) -> dict[str, str]:
    return {arrival.name: arrival.how for arrival in arrivals}


def test_a_model_of_the_same_structure_is_loaded_into_the_same_object() -> None:
    model, optimizer = model_and_optimizer()
    came, _ = trained(model, optimizer)
    names = {"model": model}
    weight = model.weight
    assert [str(arrival) for arrival in install({"model": came}, names, SIZES)] == ["model (updated in place, 1 kB)"]
    assert names["model"] is model
    assert model.weight is weight
    assert torch.equal(weight, came.weight)


def test_a_model_and_its_optimizer_go_on_as_if_they_had_never_left() -> None:
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    reference, reference_optimizer = trained(*trained(model, optimizer))
    names = {"model": model, "optimizer": optimizer}
    for _ in range(2):
        came = trained(model, optimizer)
        arrivals = install(dict(zip(["model", "optimizer"], came, strict=True)), names, {})
    assert hows(arrivals) == {"model": "updated in place", "optimizer": "updated in place"}
    assert names == {"model": model, "optimizer": optimizer}
    assert torch.equal(model.weight, reference.weight)
    assert str(optimizer.state_dict()) == str(reference_optimizer.state_dict())


@pytest.mark.parametrize(
    "came",
    [nn.Linear(3, 1), nn.Linear(2, 1, bias=False), nn.Linear(2, 1).double()],
    ids=["shape", "names", "dtype"],
)
def test_a_model_whose_structure_changed_is_a_new_object_and_that_is_said(came: nn.Module) -> None:
    model = nn.Linear(2, 1)
    weight = model.weight.clone()
    names: dict[str, Any] = {"model": model}
    (arrival,) = install({"model": came}, names, SIZES)
    assert str(arrival) == "model (new object: its structure changed, 1 kB)"
    assert names["model"] is came
    assert torch.equal(model.weight, weight)


def test_the_optimizer_of_a_new_model_is_new_too() -> None:
    names: dict[str, Any] = dict(zip(["model", "optimizer"], model_and_optimizer(), strict=True))
    wider = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(wider.parameters())
    arrivals = install({"optimizer": optimizer, "model": wider}, names, {})
    assert hows(arrivals) == {"optimizer": "new object: its parameters changed", "model": ""}
    assert names["optimizer"].param_groups[0]["params"][0] is names["model"][0].weight


def test_an_optimizer_whose_shapes_fit_by_chance_does_not_stay_with_the_old_model() -> None:
    _, old_optimizer = model_and_optimizer()
    names: dict[str, Any] = {"optimizer": old_optimizer}
    model, optimizer = model_and_optimizer()
    install({"model": model, "optimizer": optimizer}, names, {})
    assert names["optimizer"] is optimizer
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_new_optimizer_steps_the_model_that_the_notebook_kept(kind: Any) -> None:
    model = nn.Linear(2, 1)
    names: dict[str, Any] = {"model": model}
    copied = copy.deepcopy(model)
    came = trained(copied, kind(copied.parameters(), lr=0.1))
    install(dict(zip(["model", "optimizer"], came, strict=True)), names, {})
    optimizer = names["optimizer"]
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert set(optimizer.state) <= set(model.parameters())
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.filterwarnings("ignore:Seems like")  # an unpickled scheduler did not see its optimizer step
def test_a_scheduler_is_loaded_in_place_and_keeps_its_optimizer() -> None:
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    came = trained(model, optimizer, scheduler)
    came[2].step()
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    arrivals = install(dict(zip(names, came, strict=True)), names, {})
    assert set(hows(arrivals).values()) == {"updated in place"}
    assert scheduler.last_epoch == 1
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_new_scheduler_drives_the_optimizer_that_the_notebook_kept() -> None:
    model, optimizer = model_and_optimizer()
    came = trained(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(came[1], 1)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    install({"scheduler": scheduler, "optimizer": came[1], "model": came[0]}, names, {})
    assert names["scheduler"].optimizer is optimizer


def test_a_scheduler_of_a_new_optimizer_is_new_too() -> None:
    _, optimizer = model_and_optimizer()
    names: dict[str, Any] = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "optimizer": optimizer}
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    arrivals = install({"scheduler": scheduler, "optimizer": sgd}, names, {})
    assert hows(arrivals) == {"scheduler": "new object: its state did not fit", "optimizer": ""}
    assert names["scheduler"].optimizer is names["optimizer"] is sgd


def test_modes_and_frozen_parameters_come_along() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    came = copy.deepcopy(model)
    came[1].eval()
    came[0].weight.requires_grad_(False)
    install({"model": came}, {"model": model}, {})
    assert [module.training for module in model.modules()] == [True, True, False]
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]


def test_two_names_of_one_object_stay_two_names_of_one_object() -> None:
    model, optimizer = model_and_optimizer()
    came, _ = trained(model, optimizer)
    names: dict[str, Any] = {"model": model}
    install({"best": came, "model": came}, names, {})
    assert names["best"] is names["model"] is model


def test_parameters_that_modules_share_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    install({"model": copy.deepcopy(model)}, {"model": model}, {})
    assert model[1].weight is model[0].weight


def test_a_compiled_model_of_the_notebook_is_loaded_inside() -> None:
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    names: dict[str, Any] = {"model": compiled}
    came = nn.Linear(2, 1)
    (arrival,) = install({"model": came}, names, {})
    assert arrival.how == "updated in place"
    assert names["model"] is compiled
    assert torch.equal(model.weight, came.weight)


def test_a_state_that_does_not_fit_after_all_makes_a_new_object() -> None:
    class Meter:
        def __init__(self, size: int) -> None:
            self.size = size

        def state_dict(self) -> dict[str, int]:
            return {"size": self.size}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if state["size"] != self.size:
                raise ValueError

    names: dict[str, Any] = {"meter": Meter(1)}
    came = Meter(2)
    (arrival,) = install({"meter": came}, names, {"meter": 12})
    assert str(arrival) == "meter (new object: its state did not fit, 12 bytes)"
    assert names["meter"] is came


def test_data_replaces_what_had_the_name() -> None:
    names: dict[str, Any] = {"history": [1], "other": 0}
    arrivals = install({"history": [1, 2], "Net": nn.Linear}, names, {"history": 2100})
    assert [str(arrival) for arrival in arrivals] == ["history (2 kB)", "Net (0 bytes)"]
    assert names == {"history": [1, 2], "Net": nn.Linear, "other": 0}


def test_amounts_are_what_people_say() -> None:
    assert [amount(n) for n in (0, 999, 2_100, 44_700_000, 1_500_000_000)] == [
        "0 bytes",
        "999 bytes",
        "2 kB",
        "44.7 MB",
        "1.5 GB",
    ]


def test_an_object_whose_attributes_are_keys_becomes_a_variable() -> None:
    class Bunch(dict[str, Any]):
        __getattr__ = dict.__getitem__

    namespace: dict[str, Any] = {"settings": Bunch(rate=1)}
    install({"settings": Bunch(rate=2)}, namespace, {})
    assert namespace["settings"] == {"rate": 2}


def test_a_layer_that_has_no_shape_yet_replaces_the_notebooks() -> None:
    names: dict[str, Any] = {"layer": nn.LazyLinear(3), "after": None}
    came = nn.LazyLinear(3)
    arrivals = install({"layer": came, "after": [1]}, names, {})
    assert hows(arrivals) == {"layer": "new object: its structure changed", "after": ""}
    assert names == {"layer": came, "after": [1]}
