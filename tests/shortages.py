"""Models that run out of memory on purpose: above a number of samples, on some ranks, in forward or in backward."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nbaccel import Accelerator
from nbaccel.train.step.kwargs_handlers import DistributedDataParallelKwargs


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 2.00 GiB.\nOn purpose.")


@dataclass(frozen=True)
class Shortage:
    """Forwards of more than `above` samples fail on `ranks`.

    phase: "forward"; or "backward", when the gradients of the last layers are complete and those of the first not.
    call: only the forward of this number in the step; None for every one.
    """

    phase: str = "forward"
    above: int = 0
    ranks: tuple[int, ...] = (0,)
    call: int | None = None


class Net(torch.nn.Module):
    """A classifier in double precision whose parameters take several buckets of 1 MiB.

    shortage: what happens in the forwards to come.  forwards: samples of each forward so far.
    """

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, width)
        self.middle = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 3)
        self.double()
        self.shortage: Shortage | None = None
        self.rank = 0
        self.forwards: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        self.forwards.append(count)
        hidden = self.first(x).tanh()
        if self._is_short(count):
            if self.shortage is not None and self.shortage.phase == "forward":
                out_of_memory()
            hidden.register_hook(lambda gradient: out_of_memory())
        return self.last(self.middle(hidden).tanh())

    def _is_short(self, count: int) -> bool:
        shortage = self.shortage
        if shortage is None or self.rank not in shortage.ranks or count <= shortage.above:
            return False
        return shortage.call is None or len(self.forwards) - 1 == shortage.call


class Collected(TorchDispatchMode):
    """Counts the collectives that torch launches in the block, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Training:
    """A prepared `Net`, stepped by `forward_backward` on data that each rank draws for itself."""

    accelerator: Accelerator
    net: Net
    model: Any
    optimizer: Any

    @classmethod
    def start(cls, optimizer: str = "AdamW", lr: float = 1e-2, **options: Any) -> Training:
        torch.manual_seed(0)
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=1), *options.pop("kwargs_handlers", ())]
        accelerator = Accelerator(kwargs_handlers=handlers, **options)
        if accelerator.num_processes > 1:
            gc.freeze()  # as in the ranks of a launch: collecting garbage looks at this training only
        net = Net()
        net.rank = accelerator.process_index
        made = getattr(torch.optim, optimizer)(net.parameters(), lr=lr)
        return cls(accelerator, net, *accelerator.prepare(net, made))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y, ignore_index=-100)

    def step(self, batch: Any, shortage: Shortage | None = None, **options: Any) -> float:
        self.net.shortage, self.net.forwards = shortage, []
        with self.accelerator.accumulate(self.model):
            loss = self.accelerator.forward_backward(self.loss, batch, **{"weight": labelled, **options})
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None]

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])


def batch_of(count: int, seed: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and labels; every fourth label or so does not count."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=generator)
    y[torch.rand(count, generator=generator) < 0.25] = -100
    y[0] = 1
    return x, y


def labelled(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The weight of a batch whose loss is the mean over labels that count."""
    return float((batch[1] != -100).sum())


def relative_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of gradients, each in units of the largest entry of its tensor."""
    return max(
        ((one - other).abs().max() / other.abs().max()).item() for one, other in zip(actual, expected, strict=True)
    )


def whole_gradients(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """What one process gets from one backward over everything at once."""
    torch.manual_seed(0)
    net = Net()
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    torch.nn.functional.cross_entropy(net(x), y, ignore_index=-100).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
