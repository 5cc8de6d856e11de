"""`forward_backward` of sharded models: a batch that did not fit on one rank is repeated by all of them."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.errors import CannotSplit, PeerFailed
from nbaccel.testing import Faults, run_ranks
from nbaccel.utils import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__.partition("+")[0]) < "2.10",
    reason="an older torch cannot abandon a step, which is said",
)

BATCH = 12
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def batches(ranks: int, rank: int, window: int = 1) -> list[Tensor]:
    words = torch.randint(0, 11, (STEPS * window, BATCH, 5), generator=torch.Generator().manual_seed(1))
    own = BATCH // ranks
    return [batch[rank * own : (rank + 1) * own] for batch in words]


def alone(window: int = 1) -> dict[str, Tensor]:
    """What plain PyTorch trains in one process."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, words in enumerate(batches(1, 0, window)):
        (loss_of(model, words) / window).backward()
        if (number + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def sharded(faults: Faults, inside: str | None = None, window: int = 1, **fields: Any) -> Callable[[], Any]:
    """Return the same training in a rank.  inside: the block in which the faults happen; None: around the model."""

    def train() -> Any:
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(**fields), gradient_accumulation_steps=window
        )
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        place = model if inside is None else model.blocks.get_submodule(inside)
        own = batches(accelerator.num_processes, accelerator.process_index, window)
        with faults, faults.in_model(place):
            for faults.step, words in enumerate(own):
                with accelerator.accumulate(model):
                    accelerator.forward_backward(lambda part: loss_of(model, part), words)
                    optimizer.step()
                    optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return {name: value.clone() for name, value in state.items()}, len(faults.fired)

    return train


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


FAULTS: dict[str, Callable[[], tuple[Faults, str | None]]] = {
    "none": lambda: (Faults(), None),
    "forward": lambda: (Faults().oom_at("forward", rank=1, step=2), "1"),
    "backward": lambda: (Faults().oom_at("backward", rank=1, step=2), "1"),
    "backward of the last block": lambda: (Faults().oom_at("backward", rank=1, step=2), "2"),
    "within a block": lambda: (Faults().oom_at("backward", rank=1, step=2), "1.1"),
    "both": lambda: (Faults().oom_at("forward", rank=1, step=2).oom_at("backward", rank=1, step=2), "0"),
    "the second part": lambda: (
        Faults().oom_at("forward", rank=1, step=2).oom_at("backward", rank=1, step=2, passing=1),
        "1",
    ),
    "first step": lambda: (Faults().oom_at("output", rank=1, step=0), None),
    "both ranks": lambda: (Faults().oom_at("backward", step=2), "1"),
    "one after the other": lambda: (Faults().oom_at("backward", rank=1, step=1).oom_at("forward", rank=0, step=2), "1"),
}


@pytest.mark.parametrize(
    ("window", "names"), [(1, tuple(FAULTS)), (3, ("forward", "within a block", "both"))], ids=["no window", "window"]
)
def test_a_step_that_did_not_fit_is_repeated_on_all_ranks(window: int, names: tuple[str, ...]) -> None:
    wanted = alone(window)
    for name in names:
        faults, inside = FAULTS[name]()
        began = time.monotonic()
        results = run_ranks(2, sharded(faults, inside, window))
        assert furthest(wanted, results[0][0]) < 1e-6, name
        assert sum(fired for _, fired in results) == (2 if name == "both ranks" else len(faults.pending)), name
        assert time.monotonic() - began < 60, f"{name}: peers waited for a time limit"


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(3, {}), (2, {"reshard_after_forward": False}), (2, {"activation_checkpointing": True})],
    ids=["three ranks", "ZeRO-2", "recomputed"],
)
def test_it_is_repeated_whatever_is_sharded(ranks: int, fields: dict[str, Any]) -> None:
    faults = Faults().oom_at("forward", rank=1, step=1).oom_at("backward", rank=1, step=2)
    results = run_ranks(ranks, sharded(faults, "1.1", **fields))
    assert furthest(alone(), results[0][0]) < 1e-6
    assert results[1][1] == 2


def test_ranks_with_other_numbers_of_samples_and_units_run_equally_many_parts() -> None:
    """Rank 0 has two samples, of which one counts, and rank 1 six: in four parts rank 0 has nothing to add to two."""

    def train() -> tuple[dict[str, Tensor], int]:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.0), nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        model[1].eval()
        x, y = _rows()
        mine = slice(0, 2) if accelerator.process_index == 0 else slice(2, 8)
        parts = []

        def loss(batch: dict[str, Tensor]) -> Tensor:
            parts.append(len(batch["labels"]))
            if accelerator.process_index and len(batch["labels"]) > 2:
                raise torch.OutOfMemoryError("on purpose")
            return F.cross_entropy(model(batch["x"]), batch["labels"])

        for _ in range(2):
            accelerator.forward_backward(loss, {"x": x[mine], "labels": y[mine]}, weight=_known)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}, len(parts)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.0), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = _rows()
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run_ranks(2, train)
    assert furthest(dict(model.state_dict()), results[0][0]) < 1e-6
    assert results[0][1] >= 2 + 4  # all parts of the peer


def _rows() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, generator=numbers), torch.tensor([-100, 1, 0, 1, 1, 0, 0, 1])


def _known(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def test_dropout_and_statistics_are_those_of_one_pass() -> None:
    def train(fails: bool) -> Any:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        model = accelerator.prepare(model)
        rank = accelerator.process_index
        faults = Faults()
        if fails:  # after the forward, which counted the samples and drew
            faults.add(_once_larger(rank))
        seen = []

        def loss(x: Tensor) -> Tensor:
            out = model(x)
            seen.append((x.shape[0], torch.rand(1).item()))
            return faults.at("loss", out.square().mean())

        with faults, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.forward_backward(loss, torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)))
        return seen, int(model[1].num_batches_tracked), len(faults.fired)

    whole, repeated = run_ranks(2, train, False), run_ranks(2, train, True)
    assert [fired for *_, fired in repeated] == [0, 1]
    assert all(tracked == 1 for _, tracked, _ in whole)
    assert all(tracked == 2 for _, tracked, _ in repeated)  # two parts, and not the pass that was given up
    assert [seen[0][0] for seen, *_ in repeated] == [4, 4]
    assert [[size for size, _ in seen] for seen, *_ in repeated] == [[4, 2, 2]] * 2


def _once_larger(rank: int) -> Any:
    from nbaccel.testing.faults import Fault

    def refuse(value: Any, where: str) -> Any:
        raise torch.OutOfMemoryError(where)

    return Fault("loss", refuse, rank=1)


def test_what_does_not_fit_at_all_is_an_error_of_all_ranks_after_which_they_go_on() -> None:
    def train() -> Any:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        own = batches(2, accelerator.process_index)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def too_much(words: Tensor) -> Tensor:
            loss = loss_of(model, words)
            if accelerator.process_index == 1:
                raise torch.OutOfMemoryError("on purpose")
            return loss

        with pytest.raises(torch.OutOfMemoryError, match="rank 1 of 2 cannot run forward and backward on 1 sample"):
            accelerator.forward_backward(too_much, own[0])
        is_as_before = all(
            torch.equal(before[name].to_local(), value.to_local()) for name, value in model.state_dict().items()
        )
        assert all(parameter.grad is None for parameter in model.parameters())
        for words in own:
            accelerator.forward_backward(lambda part: loss_of(model, part), words)
            optimizer.step()
            optimizer.zero_grad()
        return is_as_before, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    results = run_ranks(2, train)
    assert [is_as_before for is_as_before, _ in results] == [True, True]
    assert furthest(alone(), results[0][1]) < 1e-6


def test_an_error_of_one_rank_ends_the_step_of_all_at_once() -> None:
    def train() -> str:
        accelerator = Accelerator(strategy="fsdp")
        model = accelerator.prepare(Net())

        def loss(words: Tensor) -> Tensor:
            if accelerator.process_index == 1:
                raise KeyError("label")
            return loss_of(model, words)

        try:
            accelerator.forward_backward(loss, batches(2, accelerator.process_index)[0])
        except (KeyError, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    began = time.monotonic()
    zero, one = run_ranks(2, train)
    assert "rank 1 of 2 failed in forward_backward with KeyError: 'label'; rank 0 was stopped with it" in zero
    assert one == "KeyError: 'label'"
    assert time.monotonic() - began < 60


def test_a_batch_that_cannot_be_read_is_an_error_of_all_ranks_after_which_they_go_on() -> None:
    def train() -> tuple[str, int]:
        accelerator = Accelerator(strategy="fsdp")
        model = accelerator.prepare(Net())
        words = batches(2, accelerator.process_index)[0]
        try:
            accelerator.forward_backward(
                lambda part: loss_of(model, part), words if accelerator.process_index else "no samples"
            )
        except Exception as error:
            said = type(error).__name__
        accelerator.forward_backward(lambda part: loss_of(model, part), words)
        return said, sum(parameter.grad is not None for parameter in model.parameters())

    zero, one = run_ranks(2, train)
    assert one[0] == "PeerFailed"
    assert zero[0] != "PeerFailed"
    assert zero[1] == one[1] > 0


def test_gradients_that_no_sync_would_hold_back_are_exchanged_and_kept() -> None:
    """Whole gradients, which `no_sync` leaves, would be lost with the batch that is repeated."""

    def train() -> dict[str, Tensor]:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        faults = Faults().oom_at("backward", rank=1, step=4)
        own = batches(2, accelerator.process_index, 3)
        with faults, faults.in_model(model.blocks[1]):
            for faults.step, words in enumerate(own):
                is_last = faults.step % 3 == 2
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    accelerator.forward_backward(lambda part: loss_of(model, part) / 3, words)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        assert len(faults.pending) == (accelerator.process_index == 0)
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    assert furthest(alone(3), run_ranks(2, train)[0]) < 1e-6


def test_an_optimizer_that_ran_out_of_memory_takes_its_step_in_smaller_pieces() -> None:
    def train() -> tuple[dict[str, Tensor], int]:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        faults = Faults().oom_at("optimizer", rank=1, step=1)
        with faults, faults.in_optimizer(optimizer.optimizer):
            for faults.step, words in enumerate(batches(2, accelerator.process_index)):
                accelerator.forward_backward(lambda part: loss_of(model, part), words)
                optimizer.step()
                optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return {name: value.clone() for name, value in state.items()}, len(faults.fired)

    results = run_ranks(2, train)
    assert [fired for _, fired in results] == [0, 1]
    assert furthest(alone(), results[0][0]) < 1e-6


def test_it_works_within_a_search_for_the_batch_size() -> None:
    def train() -> tuple[int, int]:
        accelerator = Accelerator(strategy="fsdp")
        faults = Faults().oom_at("backward", rank=1, step=1)

        @find_executable_batch_size(starting_batch_size=4)
        def fit(batch_size: int) -> int:
            accelerator.free_memory()
            model = Net()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            if batch_size == 4 and accelerator.process_index == 0:
                raise torch.OutOfMemoryError("on purpose")
            with faults, faults.in_model(model):
                for faults.step, words in enumerate(batches(2, accelerator.process_index)):
                    accelerator.forward_backward(lambda part: loss_of(model, part), words[:batch_size])
                    optimizer.step()
                    optimizer.zero_grad()
            return batch_size

        return fit(), len(faults.fired)

    assert run_ranks(2, train) == [(2, 0), (2, 1)]


def test_what_cannot_be_repeated_is_refused_with_the_reason() -> None:
    def refused() -> list[str]:
        from torch.distributed.fsdp import fully_shard

        accelerator = Accelerator(strategy="fsdp")
        own = fully_shard(nn.Linear(3, 2))
        said = []
        x = torch.ones(2, 3)

        def attempt(model: nn.Module) -> None:
            with pytest.raises(CannotSplit) as caught:
                accelerator.forward_backward(lambda x: model(x).mean(), x)
            said.append(str(caught.value))

        own = accelerator.prepare(own)
        attempt(own)
        accelerator.free_memory()
        model = accelerator.prepare(nn.Linear(3, 2))
        with mock.patch.object(torch, "__version__", "2.9.1"):
            attempt(model)
        return said

    for foreign, older in run_ranks(2, refused):
        assert "Linear was sharded by the program itself, in process groups of its own" in foreign
        assert "torch 2.9.1 cannot abandon a step of a sharded model" in older


def test_batch_norm_gets_two_samples_at_least() -> None:
    def train() -> list[int]:
        accelerator = Accelerator(strategy="fsdp")
        model = accelerator.prepare(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        sizes: list[int] = []

        def loss(x: Tensor) -> Tensor:
            sizes.append(len(x))
            if accelerator.process_index == 1 and len(x) > 2:
                raise torch.OutOfMemoryError("on purpose")
            return model(x).square().mean()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.forward_backward(loss, torch.randn(3 if accelerator.process_index == 0 else 8, 3))
        return sizes

    zero, one = run_ranks(2, train)
    assert min(zero) >= 2
    assert min(one) == 2
