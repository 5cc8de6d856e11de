"""Models of the notebook leave its cards for a run, and come back as they were. The cards are made up."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from features.free_kernel.cards import FakeCards
from nbaccel.base.hardware import MemoryInfo
from nbaccel.features.free_kernel import models_on_host
from nbaccel.features.free_kernel.models_on_host import CudaMemory, ModelsOnHost, kernel_freed
from nbaccel.launching import api
from nbaccel.launching.run import Run
from nbaccel.namespace import pickling
from nbaccel.namespace.payload import pack, unpack, unpack_what_can_be_rebuilt
from nbaccel.namespace.tensor_devices import InFile, away_from, device_there


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_on_host, "_PAUSE_S", 0.0)


def trained() -> tuple[Any, Any]:
    """A model with tied weights, a buffer and gradients, and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _cuda_graph() -> Any:
    kind = torch.cuda.CUDAGraph
    return kind.__new__(kind) if torch.version.cuda else object.__new__(kind)  # a placeholder in builds for the CPU


def tensors_of(model: Any, optimizer: Any) -> list[Any]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*model.parameters(), *model.buffers(), *gradients, *states]


def test_a_model_and_its_optimizer_are_on_the_host_in_the_block_and_train_on_after_it_as_if_nothing_had_been() -> None:
    cards, (model, optimizer), (other, others) = FakeCards(), trained(), trained()
    tensors = tensors_of(model, optimizer)
    cards.put(*tensors)
    identities = [id(tensor) for tensor in tensors]
    names: Mapping[str, Any] = {"net": model, "optimizer": optimizer, "same": model, "lr": 0.1}
    freed = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    with ModelsOnHost(names, cards) as aside:
        assert not any(cards.device_of(tensor.untyped_storage()) for tensor in tensors)
        assert not any(reference() is not None for reference in freed)
        assert cards.released == 1
        assert all(map(torch.equal, tensors, tensors_of(other, others)))
    after = tensors_of(model, optimizer)
    assert [id(tensor) for tensor in after] == identities
    assert model[2].weight is model[0].weight
    assert all(cards.device_of(tensor.untyped_storage()) for tensor in after)
    assert (aside.trouble, aside.left) == ("", {})
    for net, steps in ((model, optimizer), (other, others)):
        net(torch.ones(3, 4)).sum().backward()
        steps.step()
    assert all(map(torch.equal, after, tensors_of(other, others)))


def test_what_moves_is_said_by_name_and_counted_once() -> None:
    cards, (model, optimizer) = FakeCards(), trained()
    tensors = tensors_of(model, optimizer)
    cards.put(*tensors)
    aside = ModelsOnHost({"net": model, "same": model, "optimizer": optimizer}, cards)
    nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    assert sum(aside.names.values()) == aside.bytes_on("cuda:0") == nbytes
    assert set(aside.names) == {"net", "optimizer"}
    assert str(aside) == "on the host until the run is over: net 0.0 GB, optimizer 0.0 GB"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_comes_back_also_after_an_error_or_an_interrupt(error: type[BaseException]) -> None:
    cards, (model, _) = FakeCards(), trained()
    cards.put(*model.parameters())
    said: list[str] = []
    with pytest.raises(error), kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        raise error
    assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert said == ["on the host until the run is over: model 0.0 GB"]


def test_where_the_card_is_full_all_of_it_stays_on_the_host_and_that_is_said() -> None:
    cards, (model, _) = FakeCards(room=2), trained()
    cards.put(*model.parameters())
    values = [parameter.clone() for parameter in model.parameters()]
    said: list[str] = []
    with kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        cards.there.clear()
    assert not any(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), values))
    assert said[1:] == [
        "cuda:0 has no room any more for what was moved to the host, and it stays there: model. When there is room, "
        "model.to('cuda:0') moves a model back, and then optimizer.load_state_dict(optimizer.state_dict()) what its "
        "optimizer keeps."
    ]


class FailingCards(FakeCards):
    """Something happens on the way.

    fails: what happens, by the method in which it does.
    """

    def __init__(self, **fails: Callable[[], None]) -> None:
        super().__init__()
        self.fails = fails

    def back(self, storage: Any, device: str) -> Any:
        self.fails.get("back", nothing)()
        return super().back(storage, device)

    def release(self) -> None:
        self.fails.get("release", nothing)()
        super().release()


def nothing() -> None:
    """As it should be."""


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported")


def test_an_interrupt_while_models_come_back_waits_for_the_last_of_them() -> None:
    cards, (model, optimizer) = FailingCards(back=interrupt), trained()
    tensors = tensors_of(model, optimizer)
    cards.put(*tensors)
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt), ModelsOnHost({"model": model, "optimizer": optimizer}, cards) as aside:
        ended.append("the run")
    assert ended
    assert all(cards.device_of(tensor.untyped_storage()) for tensor in tensors)
    assert not aside.trouble


@pytest.mark.parametrize("method", ["back", "release"])
def test_an_error_while_models_come_back_leaves_all_on_the_host_and_is_said_and_not_raised(method: str) -> None:
    cards, (model, _) = FailingCards(), trained()
    cards.put(*model.parameters())
    said: list[str] = []
    with kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        cards.fails[method] = fail
        cards.room = 2 if method == "release" else 1000
        cards.there.clear()
    assert not any(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert said[1:] == [
        "cuda:0 does not take back what was moved to the host (RuntimeError: CUDA error: an illegal memory access was "
        "encountered), and it stays there: model. When there is room, model.to('cuda:0') moves a model back, and then "
        "optimizer.load_state_dict(optimizer.state_dict()) what its optimizer keeps."
    ]


def test_an_interrupt_that_cannot_wait_leaves_all_on_the_host_and_that_is_said() -> None:
    """As one that another thread sends."""
    cards, (model, _) = FailingCards(), trained()
    cards.put(*model.parameters())
    said: list[str] = []

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        cards.fails["back"] = stop
    assert not any(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert "cuda:0 does not take back what was moved to the host (KeyboardInterrupt), and it stays" in said[1]


def test_a_tensor_that_cannot_be_moved_takes_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cards, model = FakeCards(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    cards.put(*model.parameters())

    def copies() -> Iterator[Any]:
        yield from [parameter.untyped_storage().clone() for parameter in list(model.parameters())[1:]]
        yield torch.frombuffer(bytearray(1), dtype=torch.uint8).untyped_storage()  # and it cannot grow

    made = copies()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not resizable"):
        patch.setattr(cards, "to_host", lambda storage: next(made))
        with ModelsOnHost({"model": model}, cards):
            pytest.fail("it has moved")
    assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    with ModelsOnHost({"model": model}, cards) as aside:
        made = copies()
        monkeypatch.setattr(cards, "back", lambda storage, device: next(made))
        there = [parameter.data_ptr() for parameter in model.parameters()]
    assert [parameter.data_ptr() for parameter in model.parameters()] == there
    assert "cuda:0 does not take back what was moved to the host (RuntimeError: Trying to resize" in aside.trouble


@pytest.mark.parametrize(("happens", "error"), [(interrupt, KeyboardInterrupt), (fail, RuntimeError)])
@pytest.mark.parametrize("where", ["release", "away_from"])
def test_what_happens_after_the_move_brings_models_back_and_forgets_where_they_were(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None], error: type[BaseException], where: str
) -> None:
    cards, (model, _) = FailingCards(), trained()
    cards.put(*model.parameters())
    hosts: list[int] = []

    def away(homes: Mapping[int, str], places: Mapping[int, InFile]) -> Any:
        hosts.extend(homes)
        if where == "away_from":
            happens()
        return away_from(homes, places)

    monkeypatch.setattr(models_on_host, "away_from", away)
    cards.fails = {"release": happens} if where == "release" else {}
    said: list[str] = []
    with pytest.raises(error), kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        pytest.fail("the run began")
    assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
    assert said == []
    assert {device_there(torch.device("cpu"), address) for address in hosts} == {"cpu"}
    cards.fails["back"] = fail
    with pytest.raises(error), kernel_freed(ModelsOnHost({"model": model}, cards), said.append):
        pytest.fail("the run began")
    assert "cuda:0 does not take back what was moved to the host (RuntimeError: " in said[0]


class OfALibrary(torch.nn.Parameter):
    """As `Params4bit` of bitsandbytes."""


def quantised() -> Any:
    model = torch.nn.Linear(2, 2)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def of_a_class() -> Any:
    model = torch.nn.Linear(2, 2)
    model.weight = OfALibrary(torch.zeros(2, 2))
    return model


def spread() -> Any:
    model = torch.nn.Linear(2, 2)
    model.hf_device_map = {"embed": 0, "head": "cpu"}  # type: ignore[assignment]
    return model


def hooked() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0]._hf_hook = object()
    return model


def of_inference() -> Any:
    with torch.inference_mode():
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (of_inference, "its tensors are of a kind of their own"),
        (quantised, "it was loaded quantised"),
        (of_a_class, "its tensors are of a kind of their own"),
        (spread, "it is spread over devices"),
        (hooked, "it is spread over devices"),
    ],
)
def test_a_model_that_cannot_be_moved_by_its_tensors_is_left_alone_and_named(make: Any, why: str) -> None:
    cards, other = FakeCards(), torch.nn.Linear(3, 3)
    model = make()
    cards.put(*model.parameters(), *other.parameters())
    with ModelsOnHost({"big": model, "other": other}, cards) as aside:
        assert all(cards.device_of(parameter.untyped_storage()) for parameter in model.parameters())
        assert not cards.device_of(other.weight.untyped_storage())
        assert str(aside).endswith(f"; big stays on the card: {why}")


def hollow() -> Any:
    """A module whose `__init__` has not run, as of a class that forgets `super().__init__()`."""
    return torch.nn.Linear.__new__(torch.nn.Linear)


class WithoutState(torch.optim.SGD):
    @property
    def state(self) -> Any:  # type: ignore[override]
        raise ValueError("no step was made")

    @state.setter
    def state(self, state: Any) -> None:
        """For torch's constructor."""


def test_what_cannot_be_read_is_left_alone_and_named_and_the_others_move() -> None:
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    parallel = torch.nn.DataParallel.__new__(torch.nn.DataParallel)
    optimizer = WithoutState(model.parameters(), 0.1)
    names = {"parallel": parallel, "hollow": hollow(), "model": model, "optimizer": optimizer}
    with ModelsOnHost(names, cards) as aside:
        assert not cards.device_of(model.weight.untyped_storage())
    assert (aside.names.keys(), aside.left) == ({"model"}, {})
    assert str(aside) == (
        "on the host until the run is over: model 0.0 GB; parallel stays where it is: it cannot be read; hollow stays "
        "where it is: it cannot be read; optimizer stays where it is: it cannot be read"
    )
    graph = _cuda_graph()
    assert ModelsOnHost(names | {"graph": graph}, cards).left.keys() == {"model"}


def test_a_model_with_a_parameter_that_has_no_memory_yet_stays_and_is_named_if_it_is_on_a_card() -> None:
    cards, lazy = FakeCards(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))
    assert not str(ModelsOnHost({"lazy": lazy}, cards))
    cards.put(*lazy[0].parameters())
    assert ModelsOnHost({"lazy": lazy}, cards).left == {"lazy": "its tensors are of a kind of their own"}


def test_memory_of_no_bytes_stays_where_it_is() -> None:
    """Its copy on the host would have the address of all that has no memory."""
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    model.register_buffer("nothing", torch.empty(0))
    cards.put(*model.parameters(), *model.buffers())
    before = model.get_buffer("nothing").untyped_storage()._cdata
    with ModelsOnHost({"model": model}, cards):
        assert not cards.device_of(model.weight.untyped_storage())
        assert model.get_buffer("nothing").untyped_storage()._cdata == before
        assert device_there(torch.device("cpu"), 0) == "cpu"


def test_a_model_whose_memory_others_use_is_left_alone_with_its_optimizer() -> None:
    """A tensor that looked at a weight would look at another one afterwards."""
    cards, (model, optimizer) = FakeCards(), trained()
    tensors = tensors_of(model, optimizer)
    cards.put(*tensors)
    first_row = model[0].weight.detach()[0]
    aside = ModelsOnHost({"model": model, "optimizer": optimizer}, cards)
    assert aside.names == {}
    assert aside.left == {"model": "other tensors, or the graph of a loss, use its memory"}
    del first_row
    assert set(ModelsOnHost({"model": model, "optimizer": optimizer}, cards).names) == {"model", "optimizer"}


def test_models_that_share_memory_move_or_stay_together() -> None:
    cards, one, two = FakeCards(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    two.weight = one.weight
    cards.put(*one.parameters(), *two.parameters())
    assert ModelsOnHost({"one": one, "two": two}, cards).names == {"one": 24, "two": 8}
    assert set(ModelsOnHost({"one": one}, cards).names) == {"one"}, "the other has the very same tensor"
    two.weight = torch.nn.Parameter(one.weight.detach())
    assert ModelsOnHost({"one": one, "two": two}, cards).names == {"one": 24, "two": 8}
    assert ModelsOnHost({"one": one}, cards).left.keys() == {"one"}
    two.is_quantized = True  # type: ignore[assignment]
    aside = ModelsOnHost({"one": one, "two": two}, cards)
    assert (aside.names, aside.left.keys()) == ({}, {"one", "two"})


def test_a_cuda_graph_of_the_notebook_keeps_models_where_it_knows_them() -> None:
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    graph = _cuda_graph()
    aside = ModelsOnHost({"model": model, "graph": graph}, cards)
    assert (aside.names, aside.left) == (
        {},
        {"model": "the CUDA graph graph knows the addresses of what it uses"},
    )


def test_a_host_without_room_keeps_models_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    monkeypatch.setattr(models_on_host, "usable_memory", lambda: MemoryInfo(10**9, 20))
    with ModelsOnHost({"model": model}, cards) as aside:
        assert cards.device_of(model.weight.untyped_storage())
        assert str(aside) == "model stays on the card: the host has 0.0 GB available"


def test_models_on_other_cards_and_on_the_host_do_not_matter() -> None:
    model = torch.nn.Linear(2, 2)
    assert not str(ModelsOnHost({"model": model}, FakeCards()))
    assert not str(ModelsOnHost({"model": model}, CudaMemory({0}))), "CUDA is not used"
    assert CudaMemory({1}).device_of(storage_on("cuda:0")) == ""
    assert CudaMemory({0}).device_of(storage_on("cuda:0")) == "cuda:0"


def test_memory_goes_to_a_device_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the host, the only device here."""
    storage = torch.arange(6.0).untyped_storage()
    back = CudaMemory({0}).back(CudaMemory({0}).to_host(storage), "cpu")
    assert torch.empty(0).set_(back).tolist() == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(torch.Tensor, "to", refuse_memory)
    assert CudaMemory({0}).back(storage, "cuda:0") is None


def refuse_memory(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def storage_on(device: str) -> Any:
    class Storage:
        """As far as it is asked."""

    storage: Any = Storage()
    storage.device = torch.device(device)
    return storage


def test_what_was_set_aside_is_sent_as_if_it_was_on_the_card_still(monkeypatch: pytest.MonkeyPatch) -> None:
    cards, (model, _) = FakeCards(), trained()
    cards.put(*model.parameters())
    asked: list[str] = []

    def here(there: str) -> torch.device:
        asked.append(there)
        return torch.device("cpu")

    monkeypatch.setattr(pickling, "device_here", here)

    def travel() -> Any:
        payload = pack({"model": model, "other": torch.ones(3)})
        try:
            asked.clear()
            return unpack(payload.fd)["model"]
        finally:
            os.close(payload.fd)

    with ModelsOnHost({"model": model}, cards):
        there = travel()
        assert asked.count("cuda:0") >= len(list(model.parameters()))
        assert torch.equal(there[0].weight, model[0].weight)
        assert there[2].weight is there[0].weight
        assert "cpu" in asked, "the others"
    travel()
    assert "cuda:0" not in asked


def test_the_copy_on_the_host_is_the_one_that_ranks_map(monkeypatch: pytest.MonkeyPatch) -> None:
    cards, model = FakeCards(), torch.nn.Linear(1000, 1000, bias=False)
    other = torch.nn.Linear(1000, 1000, bias=False)
    cards.put(model.weight, other.weight)
    value = model.weight.detach().clone()
    with ModelsOnHost({"model": model, "other": other}, cards):
        blocks, files = [], set()
        for text in ("first", "and the second, when ranks start again"):
            payload = pack({"text": text, "model": model, "data": torch.ones(100_000)})
            status = os.fstat(payload.fd)
            blocks.append(status.st_blocks * 512)
            files.add(status.st_ino)
            values = unpack(payload.fd)
            os.close(payload.fd)
            assert values["text"] == text
            assert torch.equal(values["data"], torch.ones(100_000))
        assert max(blocks) <= 8_000_000 + 400_000 + 100_000, "both models, the data and the pickle, each once"
        assert len(files) == 1, "the models are not written again"
        there = values["model"].weight
        with torch.no_grad():
            there += 1
        assert torch.equal(model.weight, value), "a rank's own pages"
        with torch.no_grad():
            other.weight.zero_()
            model.weight.zero_()
        assert torch.equal(there, value + 1)
        assert not pack_has_a_copy({"x": torch.ones(3)})
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: -1)
            payload = pack({"model": model})
        sent = unpack(payload.fd)["model"].weight
        os.close(payload.fd)
        assert not sent.any(), "what a fork has written is not in the file"
    assert torch.equal(there, value + 1), "the file is closed, and stays where it is mapped"
    assert cards.device_of(model.weight.untyped_storage())


def pack_has_a_copy(values: dict[str, Any]) -> bool:
    payload = pack(values)
    try:
        return os.fstat(payload.fd).st_size > 1_000_000
    finally:
        os.close(payload.fd)


def test_what_cannot_be_rebuilt_is_left_out_of_a_payload_behind_a_file_too() -> None:
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    with ModelsOnHost({"model": model}, cards):
        payload = pack({"model": model, "broken": Broken()})
        values, refused = unpack_what_can_be_rebuilt(payload.fd)
        os.close(payload.fd)
    assert torch.equal(values["model"].weight, model.weight)
    assert "on purpose" in refused["broken"]


class Broken:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("on purpose")

    def __getstate__(self) -> dict[str, Any]:
        return {"a": 1}


def test_launch_sets_models_of_the_script_aside_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards, model = FakeCards(), torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    monkeypatch.setattr(models_on_host, "CudaMemory", lambda numbers: cards)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "model", model)

    def where() -> str:
        return cards.device_of(model.weight.untyped_storage())

    assert api.launch(where, 1, cpu=True).value == "cuda:0"
    assert api.launch(where, 1, cpu=True, free_kernel=True).value == ""
    assert where() == "cuda:0"
    assert "on the host until the run is over: model 0.0 GB" in capsys.readouterr().out


def on_a_card(monkeypatch: pytest.MonkeyPatch, cards: FakeCards) -> Any:
    """A model of the script."""
    model = torch.nn.Linear(2, 2)
    cards.put(*model.parameters())
    monkeypatch.setattr(models_on_host, "CudaMemory", lambda numbers: cards)
    monkeypatch.setitem(vars(sys.modules["__main__"]), "model", model)
    return model


def test_a_run_whose_models_cannot_come_back_has_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_card(monkeypatch, FailingCards(back=fail))
    assert api.launch(pow, 1, (2, 5), cpu=True, free_kernel=True).value == 32
    assert "cuda:0 does not take back what was moved to the host (RuntimeError: CUDA" in capsys.readouterr().out


def test_an_interrupt_while_models_come_back_does_not_take_the_place_of_the_runs_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    concluded: list[Run] = []
    cards = FailingCards(back=interrupt)
    model = on_a_card(monkeypatch, cards)
    conclude = api._conclude

    def recorded(run: Run, *others: Any) -> None:
        conclude(run, *others)
        concluded.append(run)

    monkeypatch.setattr(api, "_conclude", recorded)
    with pytest.raises(KeyboardInterrupt):
        api.launch(pow, 1, (2, 5), cpu=True, free_kernel=True)
    assert concluded.pop().value == 32
    with pytest.raises(ZeroDivisionError):
        api.launch(divmod, 1, (2, 0), cpu=True, free_kernel=True)
    assert cards.device_of(model.weight.untyped_storage())


def test_launch_says_of_a_full_card_what_is_so_once_models_have_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    model = on_a_card(monkeypatch, FakeCards())

    def before_a_run(gpus: Any, freed_on: Callable[[str], int]) -> list[str]:
        told.append(freed_on("cuda:0"))
        return []

    monkeypatch.setattr(api, "before_a_run", before_a_run)
    for is_freed in (False, True):
        api.launch(pow, 1, (2, 5), cpu=True, free_kernel=is_freed)
    assert told == [0, sum(parameter.nbytes for parameter in model.parameters())]
