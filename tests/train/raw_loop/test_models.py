"""What a backward reaches for the first time is rank 0's in all ranks, with all of its model; nothing is kept alive."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel.base.events import Loss, outlet
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.raw_loop import trained_tensors
from nbaccel.train.raw_loop.loop import RawLoopTraining


def watched(loop: Any, *args: Any) -> Any:
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        values = loop(*args)
        watch.end()
        return values
    finally:
        watch.stop()


def points() -> DataLoader[Any]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def train(seed: int) -> list[torch.Tensor]:
    """A model from its own seed, with statistics in it that no rank shares."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    model[1].eval()  # its statistics are used, and do not change
    with torch.no_grad():
        model[1].running_mean += seed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [value.detach() for value in model.state_dict().values()]


def test_a_model_is_not_looked_for_in_objects_that_serve_the_kernel() -> None:
    traitlets = pytest.importorskip("traitlets")

    class Trainer(traitlets.HasTraits):  # type: ignore[misc]  # a class of the program's
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    shell = traitlets.HasTraits()
    shell.everything, model = [*range(1000)], nn.Linear(2, 2)
    assert trained_tensors._inside(shell, type(shell)) == []
    trainer = Trainer(model)
    assert any(each is model for each in trained_tensors._Around().modules)
    assert any(part is trainer.model for part in trained_tensors._inside(trainer, Trainer))


def searches(count: int, wraps: bool) -> tuple[int, list[str]]:
    """Train `count` models in one loop; return how often objects were searched, and the classes of what is known.

    One search of them is for optimizers, of which there are none.
    """
    found: list[None] = []

    class Counted(trained_tensors._Around):
        def __init__(self) -> None:
            found.append(None)
            super().__init__()

    trained_tensors._Around = Counted  # type: ignore[misc]
    models: list[nn.Module] = [nn.Linear(4, 1).double() for _ in range(count)]
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    for x, y in points():
        for at in range(count):
            if wraps and at and type(models[at]) is nn.Linear:
                models[at] = nn.Sequential(nn.BatchNorm1d(4).double(), models[at])
            nn.functional.mse_loss(models[at](x), y).backward()
            with torch.no_grad():
                for parameter in models[at].parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    known = [model.name for model in watch._averaging.models.models]
    watch.end()
    watch.stop()
    return len(found), known


def test_many_models_of_one_loop_are_looked_for_once() -> None:
    assert run_ranks(2, searches, 12, False)[0] == (1 + 1, ["Linear"] * 12)


def test_a_model_that_was_wrapped_since_is_known_with_all_that_is_in_it() -> None:
    assert run_ranks(2, searches, 3, True)[0] == (3 + 1, ["Linear", "Sequential", "Sequential"])


def by_rank() -> list[torch.Tensor]:
    return train(int(os.environ["RANK"]))


def in_an_order_of_its_own() -> list[torch.Tensor]:
    """Whose graph another rank goes through in another order, as autocast makes it for a part of one sample."""
    weights = nn.ParameterList([torch.full((), value, dtype=torch.float64) for value in (1e17, 18.0, -1e17)])
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.05)
    for x, _ in points():
        optimizer.zero_grad()
        terms = [(x[:, 0] * weight).mean() for weight in weights]
        sum(terms if os.environ["RANK"] == "0" else reversed(terms)).backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_weights_are_compared_in_one_order_whatever_the_order_of_the_graph() -> None:
    first, second = run_ranks(2, watched, in_an_order_of_its_own)
    assert first == second


def begun_in_an_order_of_ones_own(width: int) -> list[torch.Tensor]:
    """Two models that the second batch trains first, of which each rank has a part, and reaches another one first."""
    torch.manual_seed(0)
    body, one, other = nn.Linear(4, 1).double(), nn.Linear(4, 1).double(), nn.Linear(4, width).double()
    optimizer = torch.optim.SGD([*body.parameters(), *one.parameters(), *other.parameters()], lr=0.05)
    for at, (x, y) in enumerate(points()):
        optimizer.zero_grad()
        models = [one, other] if os.environ["RANK"] == "0" else [other, one]
        losses = [nn.functional.mse_loss(model(x).sum(1, keepdim=True), y) for model in (models if at else [body])]
        sum(losses).backward()
        optimizer.step()
    return [value.detach() for model in (body, one, other) for value in model.parameters()]


def test_models_that_ranks_reach_in_another_order_are_told_apart_by_their_shapes() -> None:
    first, second = run_ranks(2, watched, begun_in_an_order_of_ones_own, 2)
    assert all(map(torch.equal, first, second))


def test_models_of_the_same_shapes_that_one_rank_reaches_otherwise_are_refused() -> None:
    with pytest.raises(RanksFailed, match="began to train different parameters in the same backward"):
        run_ranks(2, watched, reached_by_one_rank)


def reached_by_one_rank() -> None:
    """Two models alike, of which rank 1 has reached none in the second batch."""
    body, one, other = (nn.Linear(4, 1).double() for _ in range(3))
    optimizer = torch.optim.SGD([*body.parameters(), *one.parameters(), *other.parameters()], lr=0.05)
    for at, (x, y) in enumerate(points()):
        models = [body, one, other] if at and os.environ["RANK"] == "0" else [body]
        sum(nn.functional.mse_loss(model(x), y) for model in models).backward()
        optimizer.step()


def test_ranks_with_other_models_train_rank_0s() -> None:
    expected = train(0)
    for values in run_ranks(2, watched, by_rank):
        for value, right in zip(values, expected, strict=True):
            assert torch.allclose(value.double(), right.double(), rtol=0, atol=1e-12)


def folds() -> int:
    """How many of three models that were trained one after the other are still there."""
    gone = []
    for fold in range(3):
        torch.manual_seed(fold)
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in points():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        gone.append(weakref.ref(model))
        del model, optimizer
    gc.collect()
    return sum(each() is not None for each in gone)


class OnDisk(Mapping[str, Any]):
    """What reads a file for each value that is asked for, as h5py and IPython do, and may not be able to."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield "a history that another Python has written"

    def __len__(self) -> int:
        return 1


def among_mappings_on_disk() -> list[torch.Tensor]:
    store = OnDisk()
    assert store  # named where the model is looked for, as the notebook's own may be
    return by_rank()


def test_mappings_that_read_files_are_not_read_for_models() -> None:
    expected = train(0)
    for values in run_ranks(2, watched, among_mappings_on_disk):
        for value, right in zip(values, expected, strict=True):
            assert torch.allclose(value.double(), right.double(), rtol=0, atol=1e-12)


def test_models_of_folds_are_let_go_of() -> None:
    assert run_ranks(2, watched, folds) == [0, 0]


def of_other_sizes() -> None:
    model = nn.Linear(4, 1 + int(os.environ["RANK"])).double()
    for x, _ in points():
        model(x).sum().backward()


def test_ranks_with_models_of_other_sizes_are_refused_in_a_sentence() -> None:
    with pytest.raises(RanksFailed, match="began to train different parameters in the same backward"):
        run_ranks(2, watched, of_other_sizes)


def caught() -> None:
    """Rank 1 runs out of memory within a backward, and its loop goes on."""
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(points()):
        optimizer.zero_grad()
        guess = model(x)
        if step == 1 and os.environ["RANK"] == "1":
            guess.register_hook(fail)
        loss = nn.functional.mse_loss(guess, y)
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            continue
        optimizer.step()


def fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_a_loop_that_goes_on_after_a_failed_backward_is_stopped() -> None:
    with pytest.raises(RanksFailed, match=r"goes on after an exception .OutOfMemoryError: out of memory"):
        run_ranks(2, watched, caught)


def losses_of_a_scaler() -> tuple[list[float], list[float]]:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    printed: list[float] = []
    events: list[Any] = []

    def loop() -> None:
        for x, y in points():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                printed.append(float(loss))

    with outlet(events.append):
        watched(loop)
    return printed, [float(event.value) for event in events if isinstance(event, Loss)]


def test_the_loss_of_a_scaler_is_reported_without_its_factor() -> None:
    for printed, reported in run_ranks(2, losses_of_a_scaler):
        assert len(printed) == 3
        assert reported == pytest.approx(printed, abs=1e-12)


def zeroed_in_place() -> list[torch.Tensor]:
    """As fastai zeroes gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    for x, y in points():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    return [parameter.detach() for parameter in model.parameters()]


def test_gradients_may_be_detached_and_zeroed_in_place() -> None:
    expected = zeroed_in_place()
    for values in run_ranks(2, watched, zeroed_in_place):
        for value, right in zip(values, expected, strict=True):
            assert torch.allclose(value, right, rtol=0, atol=1e-12)


def plain_tensors(size: int) -> list[torch.Tensor]:
    """A second phase trains tensors of no model that are as long as a part of a batch, from its first step on."""
    optimizers: list[torch.optim.Optimizer] = []
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    scale = torch.ones(1, dtype=torch.float64)
    for phase in range(2):
        if phase:
            scale = torch.ones(size, dtype=torch.float64, requires_grad=True)
        optimizers.append(torch.optim.SGD([scale] if phase else model.parameters(), lr=0.05))
        for x, y in points():
            loss = nn.functional.mse_loss(model(x) * scale.mean(), y)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    return [*model.parameters(), scale]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_what_an_optimizer_was_given_before_the_batch_is_trained_also_if_it_is_as_long_as_a_part(size: int) -> None:
    expected = plain_tensors(size)
    for values in run_ranks(2, watched, plain_tensors, size):
        for value, right in zip(values, expected, strict=True):
            torch.testing.assert_close(value.detach(), right.detach(), rtol=0, atol=1e-12)


class Follower(nn.Module):
    """Keeps the mean of what it has seen, in a tensor that no gradient reaches; `keep` writes it."""

    def __init__(self, keep: Any, is_parameter: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.mean = nn.Parameter(torch.zeros(3))
        if not is_parameter:
            del self.mean
            self.register_buffer("mean", torch.zeros(3))
        self.last = nn.Linear(3, 1)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        guess: torch.Tensor = self.last(hidden - self.mean.detach())
        self.keep(self, 0.5 * self.mean.detach() + 0.5 * hidden.detach().mean(0))
        return guess


def assign(model: Any, value: torch.Tensor) -> None:
    model.mean = nn.Parameter(value)


def set_data(model: Any, value: torch.Tensor) -> None:
    model.mean.data = value


def write_data(model: Any, value: torch.Tensor) -> None:
    model.mean.data.copy_(value)


def followed(keep: Any, is_parameter: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Follower(keep, is_parameter).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for x, y in points():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [value.detach() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("keep", "is_parameter"), [(assign, True), (set_data, True), (write_data, True), (write_data, False)]
)
def test_what_a_forward_writes_and_no_gradient_reaches_is_averaged(
    keep: Any, is_parameter: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = followed(keep, is_parameter)
    for values in run_ranks(2, watched, followed, keep, is_parameter):
        for value, right in zip(values, expected, strict=True):
            assert torch.allclose(value, right, rtol=0, atol=1e-12)
    said = "nbaccel: Follower.mean: a forward changes it by what its batch is, and it is the ranks' average now"
    assert capfd.readouterr().out.count(said) == 1


def seldom() -> list[float]:
    """The values of a buffer that only rank 0's forward has written, after each backward."""
    seen = []
    model = nn.Linear(4, 1).double()
    model.register_buffer("count", torch.full((), 8.0))
    for x, _ in points():
        if os.environ["RANK"] == "0" and seen:
            model.count += 4
        model(x).sum().backward()
        seen.append(float(model.count))
    return seen


def test_a_buffer_that_one_ranks_forward_writes_counts_in_the_others_as_it_was() -> None:
    first, second = run_ranks(2, watched, seldom)
    assert first == second
    assert first[0] == 8
    assert 9 < first[1] < first[2] < 16


def alike() -> list[int]:
    """How many numbers each backward has exchanged, of a model that holds the average of its own weights."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Linear(4, 1), "average": nn.Linear(4, 1)}).double()
    optimizer = torch.optim.SGD(model["net"].parameters(), lr=0.05)
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    changed = []
    for _ in range(6):
        for x, y in points():
            optimizer.zero_grad()
            nn.functional.mse_loss(model["net"](x), y).backward()
            optimizer.step()
            for mean, parameter in zip(model["average"].parameters(), model["net"].parameters(), strict=True):
                mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
            changed.append(len(watch._averaging.models.changed_buffers(())))
    watch.end()
    watch.stop()
    return changed


def test_what_all_ranks_write_alike_is_averaged_no_more_after_some_times() -> None:
    for changed in run_ranks(2, alike):
        assert max(changed) == 2
        assert changed[-4:] == [0, 0, 0, 0]


def sharded() -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    PartialState()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model.register_parameter(
        "scale", nn.Parameter(torch.ones(3, dtype=torch.float64))
    )  # of the root, which stays whole
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in points():
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y) * model.scale.sum()).backward()
        optimizer.step()
    return [value.full_tensor() for value in model.state_dict().values()]


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 runs on devices with streams only"
)
def test_a_model_that_fully_shard_keeps_together_is_left_to_it() -> None:
    expected = run_ranks(2, sharded)
    for values, alone in zip(run_ranks(2, watched, sharded), expected, strict=True):
        assert all(map(torch.equal, values, alone))


def first_step(rank: int | None = None) -> list[torch.Tensor]:
    """The gradients of one backward over samples of this rank's own, below statistics of its samples."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    return [value.detach() for value in model.state_dict().values()]


def test_the_first_batch_of_a_model_with_statistics_may_be_another_one_in_each_rank() -> None:
    """As where a run goes on, or ranks have batches of their own: each rank's gradients count."""
    expected = [(mine.double() + other.double()) / 2 for mine, other in zip(first_step(0), first_step(1), strict=True)]
    for values in run_ranks(2, watched, first_step):
        for value, right in zip(values, expected, strict=True):
            assert torch.allclose(value.double(), right, rtol=0, atol=1e-12)


def _grows_behind_its_last_step() -> nn.Sequential:
    """A layer is put into the model after each third step, the last one too: nothing trains that one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for step, (x, _) in enumerate(points(), 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 3:
                model.append(nn.Linear(4, 4).double())
                optimizer.add_param_group({"params": model[-1].parameters()})
    return model


def test_a_layer_that_is_made_behind_the_last_step_is_the_same_in_all_ranks() -> None:
    first, second = run_ranks(2, watched, _grows_behind_its_last_step)
    assert len(first) == 3
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
