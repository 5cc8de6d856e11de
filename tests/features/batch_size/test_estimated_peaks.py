"""What `Accelerator.estimate` says against the bytes that torch's own tracker counts in ranks, for six models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nbaccel import Accelerator
from nbaccel.testing import MemLimit, run_ranks
from nbaccel.utils import FullyShardedDataParallelPlugin

MOST = 1.10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.embedding = nn.Embedding(100, 64)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class Block(nn.Module):
    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if rank:
            self.requires_grad_(False)
            self.before, self.after = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = x + self.down(functional.gelu(self.up(y)))
        return out + self.after(self.before(y)) if hasattr(self, "after") else out


class Language(nn.Module):
    """A tied language model."""

    def __init__(self, vocabulary: int = 500, width: int = 96, blocks: int = 6, rank: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, rank) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        if rank:
            self.embedding.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def images() -> Any:
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def vectors() -> Any:
    return torch.randn(32, 64), torch.randint(10, (32,))


def tokens(vocabulary: int, classes: int = 0) -> Any:
    x = torch.randint(vocabulary, (2, 16))
    return x, torch.randint(classes, (2,)) if classes else x


def classified(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "perceptron": (Perceptron, vectors),
    "convolutions": (Convolutions, images),
    "encoder": (Encoder, lambda: tokens(100, 10)),
    "tied language model": (Language, lambda: tokens(500)),
    "frozen base with adapters": (lambda: Language(200, 128, 6, rank=8), lambda: tokens(200)),
    "mostly embedding": (lambda: Language(8000, 64, 2), lambda: tokens(8000)),
}


def counted(strategy: str, name: str, mixed_precision: str = "no") -> tuple[int, int]:
    """Train two steps; return the bytes at the peak, and those that were estimated before. Runs in ranks."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.manual_seed(0)
    make, batches = MODELS[name]
    options: dict[str, Any] = {}
    if strategy.startswith("fsdp"):
        options = {"fsdp_plugin": FullyShardedDataParallelPlugin(reshard_after_forward=strategy == "fsdp")}
    accelerator = Accelerator(mixed_precision=mixed_precision, **options)
    net = make()
    batch = batches()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    estimate = accelerator.estimate(net, optimizer, batch, classified, ranks=[accelerator.num_processes])
    estimated = estimate.of(strategy, accelerator.num_processes).peak
    model, optimizer = accelerator.prepare(net, optimizer)
    tracker: Any = MemTracker()
    # MemTracker cannot follow a module whose output needs no gradient; DDP's buckets are made in the second step.
    is_seen = strategy.startswith("fsdp") or not name.startswith("frozen")
    if strategy.startswith("fsdp"):
        tracker = FSDPMemTracker(net, optimizer.optimizer)
        tracker.track_inputs((batch,))
    else:
        tracker.track_external(model, optimizer.optimizer, *batch)
    limit = MemLimit()
    limit.count(model, *batch)
    with tracker if is_seen else limit:
        for _ in range(3):
            accelerator.backward(classified(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if is_seen:
                tracker.reset_mod_stats()
    if not is_seen:
        return limit.peak_bytes, estimated
    [found] = tracker.get_tracker_snapshot("peak").values()
    return found["Total"], estimated


def check(found: list[tuple[int, int]]) -> None:
    peak, estimate = max(found)
    assert peak <= estimate <= MOST * peak, f"counted {peak:,}, estimated {estimate:,}, {estimate / peak:.3f}"


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_one_process_holds_what_was_estimated(name: str) -> None:
    check(run_ranks(1, counted, "single", name, timeout_s=300))


def test_two_sharded_ranks_hold_what_was_estimated() -> None:
    check(run_ranks(2, counted, "fsdp", "perceptron", timeout_s=300))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp zero2"])
def test_two_ranks_hold_what_was_estimated(strategy: str, name: str) -> None:
    check(run_ranks(2, counted, strategy, name, timeout_s=300))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["tied language model", "encoder"])
def test_half_precision_is_in_the_estimate(strategy: str, name: str) -> None:
    check(run_ranks(2, counted, strategy, name, "bf16", timeout_s=300))
