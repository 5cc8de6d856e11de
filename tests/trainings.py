"""Small trainings in which everything that a checkpoint holds matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator


class Tied(torch.nn.Module):
    """Two layers that are one, a buffer, and dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


class Tally:
    """An object of the program's own with a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Trained:
    """A prepared training: AdamW, a schedule, shuffled data, dropout."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    @classmethod
    def start(cls, samples: int = 16, batch_size: int = 4, **options: Any) -> Trained:
        torch.manual_seed(0)
        accelerator = Accelerator(**options)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
        loader = DataLoader(TensorDataset(torch.randn(samples, 3)), batch_size, shuffle=True)
        return cls(accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))

    def batch(self, x: torch.Tensor) -> float:
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def epoch(self) -> list[float]:
        return [self.batch(x) for (x,) in self.loader]

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.flatten().tolist()]
