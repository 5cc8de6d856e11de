"""An operation along the batch keeps it whole, and so does one that no table knows; layers of samples do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.sample_independence import obstacle_below
from nbaccel.train.raw_loop.terms import read

ROWS = 12

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _wave(out: Tensor) -> Tensor:
    """The samples as steps of one series."""
    return out.T[None]


def pooled(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(F.avg_pool1d(_wave(model(x)), 3, 1, 1)[0].T, t)


def convolved(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(F.conv1d(_wave(model(x)), torch.ones(1, 1, 3).to(x) / 3), _wave(t)[..., 1:-1])


def convolved_first(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.conv1d(x.T[None], model.weight.unsqueeze(2), padding=1).square().mean()  # no graph below it


def largest_of_three(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(F.max_pool1d(_wave(model(x)), 3, 1, 1)[0].T, t)


def spectrum(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(torch.fft.rfft(model(x), dim=0).abs(), torch.fft.rfft(t, dim=0).abs())


def interpolated(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.interpolate(_wave(model(x)), scale_factor=2, mode="linear").square().mean()


def windows(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(x).unfold(0, 3, 1).std(-1).mean()


def padded(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.pad(_wave(model(x)), (1, 1), mode="reflect").square().mean()


def sampled_along(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    grid = torch.linspace(-1, 1, 2 * len(x)).view(1, 1, -1, 2).to(x)
    return F.grid_sample(_wave(model(x))[None], grid, align_corners=False).square().mean()


def times_a_constant_on_the_left(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(torch.ones(len(x), len(x)).tril().to(x) @ model(x), t)


def times_a_constant_on_the_right(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss((model(x).T @ torch.ones(len(x), len(x)).tril().to(x)).T, t)


def in_no_table(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(torch.rot90(model(x), 2), t)


ALONG = [
    pooled, convolved, convolved_first, largest_of_three, spectrum, interpolated, windows, padded, sampled_along,
    times_a_constant_on_the_left, times_a_constant_on_the_right, in_no_table,
]  # fmt: skip


def _images(*layers: nn.Module) -> Tensor:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers)(torch.randn(ROWS, 3, 10, 10)).square().mean()


def _words(length: int = 7) -> Tensor:
    return nn.Embedding(10, 8)(torch.arange(ROWS * length).view(ROWS, length) % 10)


def _frames() -> Tensor:
    return nn.Conv2d(3, 2, 3)(torch.randn(ROWS * 5, 3, 8, 8)).view(ROWS, -1).square().mean()


OF_SAMPLES: dict[str, Callable[[], Tensor]] = {
    "classifier": lambda: _images(
        nn.GELU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Dropout()
    ),
    "decoder": lambda: _images(nn.ReflectionPad2d(1), nn.Upsample(scale_factor=2), nn.PixelShuffle(2), nn.Hardswish()),
    "transposed": lambda: _images(nn.ConvTranspose2d(4, 2, 2), nn.InstanceNorm2d(2), nn.PReLU(), nn.BatchNorm2d(2)),
    "frames": _frames,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)(_words()).square().mean(),
    "recurrent": lambda: nn.GRU(8, 4, batch_first=True)(_words())[0].square().mean(),
    "spectrum of each": lambda: torch.fft.rfft(_words(), dim=1).abs().mean(),
    "windows of each": lambda: _words().unfold(1, 3, 1).mean(),
    "times of each": lambda: nn.Conv1d(8, 4, 3)(_words().transpose(1, 2)).square().mean(),
    "matrices of each": lambda: (
        torch.linalg.inv(torch.eye(8) * 50 + _words().transpose(1, 2) @ _words()).square().mean()
    ),
    "gathered": lambda: nn.Linear(8, 3)(_words()[:, -1]).gather(1, torch.zeros(ROWS, 1, dtype=torch.long)).mean(),
    "of two": lambda: nn.Bilinear(8, 8, 2)(_words()[:, 0], _words()[:, 1]).square().mean(),
}


def _obstacle(loss: Tensor) -> str:
    reading = read(loss, lambda node: False)
    return reading.obstacle or obstacle_below(reading, ROWS)


@pytest.mark.parametrize("loss", ALONG, ids=lambda loss: loss.__name__)
def test_an_operation_along_the_batch_is_seen(loss: Loss) -> None:
    assert _obstacle(loss(nn.Linear(4, 1), torch.randn(ROWS, 4), torch.randn(ROWS, 1)))


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_layers_that_compute_each_sample_by_itself_are_no_obstacle(name: str) -> None:
    torch.manual_seed(0)
    assert not _obstacle(OF_SAMPLES[name]())


def test_a_gradient_in_a_loss_is_no_operation_of_its_own() -> None:
    x = torch.randn(ROWS, 4, requires_grad=True)
    out = torch.tanh(nn.Linear(4, 1)(x))
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert not _obstacle(gradient.square().sum(1).mean())


def _train(loss: Loss) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, t in DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=ROWS):
        optimizer.zero_grad()
        loss(model, x, t).backward()
        optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def _in_a_rank(loss: Loss) -> tuple[list[float], bool]:
    torch.set_default_dtype(torch.float64)
    training = RawLoopTraining(World.from_env(), RunSettings())
    training.begin(None)
    try:
        weights = _train(loss)
        training.end()
    finally:
        training.stop()
    return weights, training.has_split


def _cases() -> Iterator[Any]:
    for at, loss in enumerate(ALONG):
        for world_size in (2, 3):
            marks = [] if at == 0 and world_size == 2 else [pytest.mark.full]
            yield pytest.param(loss, world_size, marks=marks, id=f"{loss.__name__}-{world_size}")


@pytest.mark.parametrize(("loss", "world_size"), [*_cases()])
def test_ranks_keep_such_batches_whole(loss: Loss, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        expected = _train(loss)
    finally:
        torch.set_default_dtype(torch.float32)
    for weights, was_split in run_ranks(world_size, _in_a_rank, loss):
        assert not was_split
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)
