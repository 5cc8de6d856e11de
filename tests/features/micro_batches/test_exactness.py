"""Micro-batches change no number: gradients are those of one step on all samples of all ranks at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from shortages import Net, Shortage, Training, batch_of, labelled, relative_error, whole_gradients


def _gradients(counts: list[int], micro_batch_size: int, weight: Any) -> list[torch.Tensor]:
    training = Training.start("SGD")
    batch = batch_of(counts[training.net.rank], 3, training.net.rank)
    training.accelerator.forward_backward(training.loss, batch, weight, micro_batch_size=micro_batch_size)
    return training.gradients()


@pytest.mark.parametrize(
    ("counts", "micro_batch_size"),
    [([37, 37], 16), ([50, 50], 50), ([64, 64], 1), ([1, 1], 1), ([37, 5], 8), ([3, 64], 10), ([9, 20, 1, 30], 7)],
)
def test_c08_gradients_equal_one_unsplit_step_whatever_each_rank_has(counts: list[int], micro_batch_size: int) -> None:
    expected = whole_gradients([batch_of(count, 3, rank) for rank, count in enumerate(counts)])
    for gradients in run_ranks(len(counts), _gradients, counts, micro_batch_size, labelled):
        assert relative_error(gradients, expected) <= 1e-12


def _single(dtype: torch.dtype, counts: list[int]) -> float:
    """The error of micro-batches in one process, in `dtype`, against one backward."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    net = Net().to(dtype)
    expected = copy.deepcopy(net)
    model = accelerator.prepare(net)
    x, y = batch_of(sum(counts), 1)
    x = x.to(dtype)
    torch.nn.functional.cross_entropy(expected(x), y, ignore_index=-100).backward()
    accelerator.forward_backward(
        lambda batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-100),
        (x, y),
        labelled,
        micro_batch_size=counts[0],
    )
    gradients = ([parameter.grad for parameter in module.parameters()] for module in (net, expected))
    return relative_error(*gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_c08_one_process_alone_is_exact_too(dtype: torch.dtype, bound: float) -> None:
    assert _single(dtype, [16, 16, 5]) <= bound


class Speaker(torch.nn.Module):
    """A language model that shifts labels in its own loss, as those of transformers do."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.head = torch.nn.Linear(8, 11)
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _sentences(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 11, (10, 7), generator=generator)
    lengths = torch.randint(2, 8, (10,), generator=generator)
    lengths[0] = 1  # one sample has no token to predict: alone its mean loss is NaN
    labels = ids.masked_fill(torch.arange(7)[None] >= lengths[:, None], -100)
    return {"ids": ids, "labels": labels}


def _spoken() -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = accelerator.prepare(Speaker())
    batch = _sentences(accelerator.process_index)
    loss = accelerator.forward_backward(lambda part: model(**part), batch, "tokens", micro_batch_size=1)
    return [parameter.grad for parameter in model.parameters()], float(loss)


def test_c08_tokens_are_counted_as_a_causal_language_model_does() -> None:
    torch.manual_seed(0)
    model = Speaker()
    both = [_sentences(rank) for rank in range(2)]
    model(**{name: torch.cat([batch[name] for batch in both]) for name in both[0]}).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for rank, (gradients, loss) in enumerate(run_ranks(2, _spoken)):
        assert relative_error(gradients, expected) <= 1e-12  # type: ignore[arg-type]
        assert loss == pytest.approx(model(**both[rank]).item(), rel=1e-12)


def test_the_loss_is_that_of_the_whole_batch() -> None:
    training = Training.start()
    batch = batch_of(37, 0)
    with torch.no_grad():
        expected = float(training.loss(batch))
    loss = training.accelerator.forward_backward(training.loss, batch, labelled, micro_batch_size=8)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(expected, rel=1e-14)


def test_a_batch_that_fits_gives_the_very_numbers_of_backward() -> None:
    def weights(recovers: bool) -> torch.Tensor:
        training = Training.start()
        for number in range(3):
            batch = batch_of(8 + number, number)
            if recovers:
                training.accelerator.forward_backward(training.loss, batch, labelled)
            else:
                training.accelerator.backward(training.loss(batch))
            training.optimizer.step()
            training.optimizer.zero_grad()
        return training.weights()

    assert torch.equal(weights(True), weights(False))


# -- c14: dropout and BatchNorm


class Noisy(torch.nn.Module):
    """Dropout, BatchNorm and random numbers of other libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, 1)
        self.double()
        self.above = 10**6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)))
        if len(x) > self.above:
            hidden.register_hook(self._run_out)
        return self.last(hidden)

    def _run_out(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def _noisy(above: int, micro_batch_size: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    accelerator = Accelerator()
    net = Noisy()
    model = accelerator.prepare(net)
    torch.manual_seed(50 + accelerator.process_index)
    x = torch.randn(32, 6, dtype=torch.float64)
    is_last_rank = accelerator.process_index == accelerator.num_processes - 1
    net.above = above if is_last_rank else 10**6
    size = micro_batch_size if is_last_rank else None
    accelerator.forward_backward(lambda part: model(part).square().mean(), x, micro_batch_size=size)
    return [parameter.grad for parameter in net.parameters()], list(net.buffers()), torch.rand(3)


@pytest.mark.filterwarnings("ignore:batches of 32 run in micro-batches:UserWarning")
@pytest.mark.parametrize("world_size", [1, 2])
def test_c14_a_repeated_batch_is_one_that_was_small_from_the_start(world_size: int) -> None:
    repeated = run_ranks(world_size, _noisy, 16, None)
    small = run_ranks(world_size, _noisy, 10**6, 16)
    for one, other in zip(repeated, small, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert all(map(torch.equal, ours, theirs))


def _statistics() -> tuple[float, float]:
    torch.manual_seed(0)
    accelerator = Accelerator()
    net = torch.nn.BatchNorm1d(3)
    model = accelerator.prepare(net)
    x = torch.full((4, 3), float(accelerator.process_index)) + torch.randn(4, 3)
    accelerator.forward_backward(lambda part: model(part).square().mean(), x)
    return net.running_mean.sum().item(), net.num_batches_tracked.item()


def test_all_ranks_have_rank_0s_running_statistics_as_under_ddp() -> None:
    first, second = run_ranks(2, _statistics)
    assert first == second
    assert first[1] == 1


def test_a_model_with_batch_norm_is_told_once_that_micro_batches_are_normalised_alone() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.BatchNorm1d(3))

    def step() -> None:
        accelerator.forward_backward(lambda x: model(x).square().mean(), torch.randn(9, 3), micro_batch_size=4)

    with pytest.warns(UserWarning, match="batches of 9 run in micro-batches of 3.*BatchNorm layers") as caught:
        step()
    assert caught[0].filename == __file__
    step()


# -- c15: the gradient scaler


def _scales(shortage: Shortage | None) -> list[float]:
    training = Training.start("SGD", mixed_precision="fp16")
    rank, history = training.net.rank, []
    for number in range(8):
        x, y = batch_of(20, number, rank)
        x = x.float()
        if number == 3 and rank == 1:
            x = x * float("inf")
        training.net.float()
        training.net.shortage = shortage if number in (1, 2, 5) else None
        training.accelerator.forward_backward(training.loss, (x, y), labelled)
        training.accelerator.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        history.append(training.accelerator.scaler.get_scale())  # type: ignore[union-attr]
    return history


@pytest.mark.filterwarnings("ignore:the loss is nan")
def test_c15_the_loss_scale_has_the_history_of_a_run_without_shortages() -> None:
    sound = run_ranks(2, _scales, None)
    assert run_ranks(2, _scales, Shortage("backward", 10, (1,))) == sound
    assert run_ranks(2, _scales, Shortage("forward", 10, (0, 1))) == sound
    assert len(set(sound[0])) == 2  # the infinite batch halved it


# -- c17: parameters of every kind


class Odd(torch.nn.Module):
    """A shared layer, a frozen one, one that is never used, and one that only one of two ranks uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.again = torch.nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.never = torch.nn.Linear(6, 6)
        self.sometimes = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        hidden = self.frozen(self.again(self.first(x).tanh()).tanh())
        return self.last(self.sometimes(hidden) if extra else hidden)


def _odd_weights(accumulation: int, clips: bool, set_to_none: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    net = Odd()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    rank = accelerator.process_index

    def loss(batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0], rank == 1), batch[1], ignore_index=-100)

    for number in range(2 * accumulation):
        with accelerator.accumulate(model):
            accelerator.forward_backward(loss, batch_of(9, number, rank), labelled, micro_batch_size=4)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                accelerator.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            if number < 2 * accumulation - 1:
                optimizer.zero_grad(set_to_none)
    return [*(parameter.detach() for parameter in net.parameters()), net.never.weight.grad]


def _odd_in_one_process(accumulation: int, clips: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Odd()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for start in range(0, 2 * accumulation, accumulation):
        losses, weight = torch.zeros((), dtype=torch.float64), 0.0
        for number in range(start, start + accumulation):
            for rank in range(2):
                x, y = batch_of(9, number, rank)
                losses = losses + torch.nn.functional.cross_entropy(
                    net(x, rank == 1), y, ignore_index=-100, reduction="sum"
                )
                weight += labelled((x, y))
        optimizer.zero_grad()
        (losses / weight).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.05)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c17_odd_parameters_train_as_in_one_process(accumulation: int, clips: bool, set_to_none: bool) -> None:
    expected = _odd_in_one_process(accumulation, clips)
    ranks = run_ranks(2, _odd_weights, accumulation, clips, set_to_none)
    for *weights, unused_gradient in ranks:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
        assert unused_gradient is None
    assert all(map(torch.equal, ranks[0][:-1], ranks[1][:-1]))
