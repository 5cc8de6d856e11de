"""Tensors of a device: on which they arrive, and that they do so as they were. The devices are made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbaccel.base.world import World
from nbaccel.namespace import pickling, tensor_devices
from nbaccel.namespace.arrays import Values
from nbaccel.namespace.inventory import Inventory
from nbaccel.namespace.payload import pack, pack_what_can_travel, unpack
from nbaccel.namespace.tensor_devices import away_from, device_here, device_there

CPU, META = torch.device("cpu"), torch.device("meta")


# Which device ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``cards(count)``: a process that sees so many, and has used them or not; ``rank=1``: it is a rank."""
    monkeypatch.setattr(tensor_devices, "_notebooks", {})

    def be(count: int, is_used: bool = False, rank: int | None = None, own: int = 1) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        world = World() if rank is None else World(rank, 2, rank, 2, launch_id="this", own_devices=own)
        monkeypatch.setattr(World, "from_env", lambda: world)

    return be


@pytest.mark.parametrize(
    ("seen", "own", "device"),
    [(2, 1, "cuda:1"), (1, 1, "cuda:0"), (2, 2, "cuda:0"), (0, 1, "cpu")],
    ids=["each sees all", "each sees its own, or they share one", "each has two", "ranks on the host"],
)
def test_in_a_rank_it_is_the_ranks_own(cards: Callable[..., None], seen: int, own: int, device: str) -> None:
    cards(seen, rank=1, own=own)
    assert device_here("cuda:0") == torch.device(device)
    assert device_here("cuda:3") == torch.device(device)
    assert device_here("mps:0") == CPU


@pytest.mark.parametrize(("is_used", "device"), [(True, "cuda:1"), (False, "cpu")])
def test_in_a_notebook_it_is_the_named_one_if_the_notebook_uses_cuda(
    cards: Callable[..., None], is_used: bool, device: str
) -> None:
    cards(2, is_used)
    assert device_here("cuda:1") == torch.device(device)
    assert device_there(torch.device("cuda", 1)) == "cuda:1"


def test_what_a_rank_sends_goes_to_the_device_that_its_tensors_came_from(cards: Callable[..., None]) -> None:
    cards(2, rank=1)
    own = torch.device("cuda", 1)
    assert device_there(own) == "cpu"  # the notebook may not have used CUDA
    device_here("cuda:0")
    assert device_there(own) == "cuda:0"
    assert device_there(torch.device("cuda", 0)) == "cpu"
    assert device_there(CPU) == "cpu"


# On the way -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lies_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], None]:
    """``lies_on(here)``: what is sent lies on a card, and that is `here` on the other side."""

    def lie(here: torch.device) -> None:
        monkeypatch.setattr(pickling, "device_there", lambda device, address=0: "cuda:7")
        monkeypatch.setattr(pickling, "device_here", {"cuda:7": here}.__getitem__)

    return lie


def travel(values: dict[str, Any]) -> dict[str, Any]:
    payload = pack(values)
    try:
        return unpack(payload.fd)
    finally:
        os.close(payload.fd)


def trained() -> dict[str, Any]:
    """A model with tied and frozen weights, and an optimizer with a state."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_model_and_its_optimizer_arrive_on_the_device_as_they_were(lies_on: Callable[..., None]) -> None:
    lies_on(META)
    here, there = trained(), travel(trained())
    model, optimizer = there["model"], there["optimizer"]
    assert {tensor.device for tensor in model.state_dict().values()} == {META}
    assert model[2].weight is model[0].weight
    assert not model[2].bias.requires_grad
    assert type(model[0].bias) is torch.nn.Parameter
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    state, before = optimizer.state[model[0].weight], here["optimizer"].state[here["model"][0].weight]
    assert {name: (value.device, value.shape) for name, value in state.items()} == {
        name: (META, value.shape) for name, value in before.items()
    }


def test_views_and_strides_stay_on_a_device(lies_on: Callable[..., None]) -> None:
    lies_on(META)
    whole = torch.randn(40_000, 2)
    there = travel({"whole": whole, "columns": whole.T[:, 5::2], "detached": whole.detach(), "empty": torch.empty(0)})
    columns = there["columns"]
    assert (columns.stride(), columns.storage_offset()) == (whole.T[:, 5::2].stride(), 10)
    assert columns.untyped_storage()._cdata == there["whole"].untyped_storage()._cdata
    assert there["detached"].untyped_storage()._cdata == there["whole"].untyped_storage()._cdata
    assert there["empty"].device == META


class OfAClass(torch.Tensor):
    """As of fastai."""


TENSORS = {
    "of a class": torch.randn(30_000).as_subclass(OfAClass),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "half": torch.randn(5).half(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_no_tensor_brings_the_name_of_its_device_along(lies_on: Callable[..., None], name: str) -> None:
    lies_on(CPU)
    payload = pack({"x": TENSORS[name]})
    there = unpack(payload.fd)["x"]
    saved_by_torch = b"_load_from_bytes" in os.pread(payload.fd, payload.nbytes, 0)
    os.close(payload.fd)
    assert type(there) is type(TENSORS[name])
    assert torch.equal(there.to_dense(), TENSORS[name].to_dense())
    assert not saved_by_torch


def test_a_tensor_of_a_class_shares_memory_with_a_plain_one(lies_on: Callable[..., None]) -> None:
    lies_on(CPU)
    plain = torch.zeros(30_000)
    there = travel({"plain": plain, "own": plain.as_subclass(OfAClass)})
    there["plain"][7] = 1
    assert there["own"][7] == 1


def test_a_generator_goes_on_on_the_device(lies_on: Callable[..., None]) -> None:
    lies_on(CPU)
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    there = travel({"generator": generator})["generator"]
    assert torch.equal(torch.rand(2, generator=there), torch.rand(2, generator=generator))


def test_values_that_are_written_into_a_tensor_take_no_room_on_the_device(
    lies_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_on(META)
    payload, _ = pack_what_can_travel({"x": Values(torch.ones(20_000))}, places=Inventory((), {}))
    there = unpack(payload.fd)["x"]
    os.close(payload.fd)
    assert there.device == CPU
    assert there.sum() == 20_000


def refuse_memory(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_has_no_room_on_the_notebooks_device_stays_on_the_host(
    lies_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_on(META)
    monkeypatch.setattr(torch.Tensor, "to", refuse_memory)
    there = travel({"x": torch.ones(3)})["x"]
    assert there.tolist() == [1, 1, 1]


def test_what_has_no_room_on_a_ranks_device_is_an_error(
    lies_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_on(META)
    monkeypatch.setattr(torch.Tensor, "to", refuse_memory)
    monkeypatch.setattr(World, "from_env", lambda: World(0, 1, launch_id="this"))
    with pytest.raises(torch.OutOfMemoryError):
        travel({"x": torch.ones(3)})


def test_memory_that_is_away_from_its_card_is_sent_as_if_it_was_there(cards: Callable[..., None]) -> None:
    cards(2, is_used=True)
    tensor, other = torch.ones(3), torch.ones(3)
    with away_from({tensor.data_ptr(): "cuda:1"}):
        assert device_there(CPU, tensor.data_ptr()) == "cuda:1"
        assert device_there(CPU, other.data_ptr()) == "cpu"
    assert device_there(CPU, tensor.data_ptr()) == "cpu"


def test_what_has_no_memory_is_not_taken_for_something_that_is_away(cards: Callable[..., None]) -> None:
    cards(2, is_used=True)
    nothing = torch.empty(0)
    assert nothing.data_ptr() == 0
    with away_from({nothing.data_ptr(): "cuda:1"}):
        assert device_there(CPU) == "cpu", "as a generator is sent"
