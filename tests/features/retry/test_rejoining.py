"""How an optimizer's state gets from rank 0 to the others: by itself, to where each rank has its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs
from nbaccel.errors import PeerFailed
from nbaccel.features.retry import outside_retry as outside
from nbaccel.features.retry.outside_retry import _share_state
from nbaccel.testing import run_ranks


class Plain(torch.optim.SGD):
    """An optimizer that loads a state as it is, whatever types it has."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for parameter, entry in zip(self.param_groups[0]["params"], state_dict["state"].values(), strict=True):
            self.state[parameter] = entry


_STATES: dict[str, Callable[[], Any]] = {
    "rows": lambda: torch.arange(6.0).reshape(2, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "with gaps": lambda: torch.arange(12.0).reshape(3, 4)[:, :2],
    "repeated": lambda: torch.ones(1).expand(5),
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: torch.tensor([True, False]),
    "int16": lambda: torch.tensor([1, -2], dtype=torch.int16),
    "float8": lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "complex": lambda: torch.tensor([1j, 2.0]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "number": lambda: torch.tensor(5.0),
    "nested": lambda: {"past": [torch.ones(2), "text", 7, None]},
}


def _shared() -> tuple[bool, bool, int]:
    rank = Accelerator().process_index
    torch.manual_seed(0)
    first = {name: make() for name, make in _STATES.items()}
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = Plain(parameters, lr=0.1)
    for parameter in parameters:
        optimizer.state[parameter] = first if rank == 0 else {"rows": torch.zeros(2, 3)}
    _share_state(optimizer, 0)
    got = [optimizer.state[parameter] for parameter in parameters]
    is_equal = all(str(entry) == str(first) for entry in got)
    has_layout = all(
        entry[name].stride() == first[name].stride() for entry in got for name in ("rows", "channels last")
    )
    return is_equal, has_layout, len(got)


def test_every_kind_of_state_arrives_as_it_is_on_rank_0() -> None:
    assert run_ranks(2, _shared) == [(True, True, 2)] * 2


class Wire:
    """Stands in for the collectives of two ranks: what rank 0 sends object by object, and tensor by tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.object: Any = None
        self.devices: list[str] = []
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "broadcast_object_list", self._objects)
        monkeypatch.setattr(dist, "broadcast", lambda tensor, source: self.devices.append(str(tensor.device)))

    def _objects(self, objects: list[Any], source: int) -> None:
        if self.rank == 0:
            (self.object,) = objects
        objects[0] = self.object


def _adam(device: str) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(1000, device=device))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
    return optimizer


@pytest.mark.parametrize(("of_rank_0", "of_rank_1"), [("cpu", "meta"), ("meta", "cpu")])
def test_tensors_of_a_device_are_received_on_the_ranks_own_and_are_in_no_pickle(
    monkeypatch: pytest.MonkeyPatch, of_rank_0: str, of_rank_1: str
) -> None:
    wire = Wire(monkeypatch)
    _share_state(_adam(of_rank_0), 0)  # a tensor of the meta device could not be pickled by way of the host
    assert wire.devices == [of_rank_0] * 2
    assert len(wire.object) < 2000
    wire.rank, wire.devices = 1, []
    optimizer = _adam(of_rank_1)
    _share_state(optimizer, 0)
    assert wire.devices == [of_rank_1] * 2
    (entries,) = optimizer.state.values()
    assert [str(entries[name].device) for name in ("exp_avg", "exp_avg_sq", "step")] == [of_rank_1, of_rank_1, "cpu"]
    assert float(entries["step"]) == 3.0


def test_a_rank_gives_its_own_state_up_before_it_receives_another(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    _share_state(_adam("cpu"), 0)
    wire.rank, optimizer = 1, _adam("cpu")
    held: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: held.append(len(optimizer.state)))
    _share_state(optimizer, 0)
    assert held == [0, 0]


def test_an_optimizer_and_what_was_prepared_of_it_have_one_state_to_share() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared = Accelerator().prepare(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (found,) = outside._optimizers_of(_Holder(model))  # type: ignore[arg-type]
    assert found in (optimizer, prepared)


class _Folded(torch.nn.Module):
    """A model with a parameter and a buffer that do not lie in memory as they are read."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("scale", torch.ones(2, 3)[:, :2])
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum() * self.scale.sum()  # type: ignore[no-any-return]


def _rejoin_over_a_device(fails: int) -> tuple[list[str], list[float], bool]:
    """What as many forwards as fail raise, the numbers after one more, and whether the module waits still."""
    devicelike.install()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=devicelike.NAME)])
    rank = accelerator.process_index
    model = DistributedDataParallel(_Folded())
    with torch.no_grad():
        for tensor in [*model.module.parameters(), *model.module.buffers()]:
            tensor.add_(rank)
    outside.rejoin_at_next_forward(model, 1)
    raised: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside, "_agreed_optimizers", _refuse)
        for _ in range(fails):
            with pytest.raises(PeerFailed) as refused:
                model(torch.ones(1, 3))
            raised.append(str(refused.value))
    model(torch.ones(1, 3))
    numbers = [tensor.detach() for tensor in [*model.module.parameters(), *model.module.buffers()]]
    return raised, torch.cat([number.reshape(-1) for number in numbers]).tolist(), "forward" in vars(model)


def _refuse(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    raise PeerFailed("other optimizers")


@pytest.mark.parametrize("fails", [0, 1])
def test_weights_of_any_layout_are_taken_and_nobody_trains_on_before_they_are(fails: int) -> None:
    """NCCL sends no tensor that is not in one piece."""
    one, other = run_ranks(2, _rejoin_over_a_device, fails)
    assert one == other
    assert one[0] == ["other optimizers"] * fails
    assert one[1] == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0, *[2.0] * 4]
    assert not one[2]


class _Holder:
    """What is asked of a DDP module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def _rejoin_after_a_step_on_rank_0(source: int, makes_all: bool) -> list[float] | str:
    """The sums of moments that an optimizer has whose first step was taken by rank 0 alone."""
    rank = Accelerator().process_index
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizers = [torch.optim.Adam(model.parameters())]
    if rank:
        dropped = torch.optim.Adagrad(model.parameters())
        dropped.itself = dropped  # type: ignore[attr-defined]
        del dropped
    if makes_all or rank == 0:
        optimizers.append(torch.optim.SGD([model.module.bias], lr=0.1))
    if rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
    outside.rejoin_at_next_forward(model, source)
    try:
        model(torch.ones(1, 2))
    except PeerFailed as error:
        return str(error)
    return [float(entry["exp_avg"].sum()) for entry in optimizers[0].state.values()]


@pytest.mark.parametrize(("source", "moments"), [(0, [pytest.approx(0.2), pytest.approx(0.1)]), (1, [])])
def test_an_optimizer_that_has_stepped_on_one_rank_only_has_one_state_again(source: int, moments: list[float]) -> None:
    assert run_ranks(2, _rejoin_after_a_step_on_rank_0, source, True) == [moments] * 2


def test_ranks_with_other_optimizers_are_told_which_before_anything_is_sent() -> None:
    for rank, text in enumerate(run_ranks(2, _rejoin_after_a_step_on_rank_0, 0, False)):
        assert text == (
            f"rank {rank} of 2 cannot go on with its Linear: the ranks do not have the same optimizers of its "
            "parameters, whose states they would take from one of them.\n"
            "  rank 0: Adam of 2 parameters; SGD of 1 parameters\n"
            "  rank 1: Adam of 2 parameters\n"
            "  Make them on every rank, beside the model."
        )
