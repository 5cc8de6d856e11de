"""A trainer class: batches by `next` from an endless iterator, inside `accumulate`; an average of the weights."""

import copy
import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def cycle(loader):
    while True:
        yield from loader


class Trainer(torch.nn.Module):
    def __init__(self, model, dataset, batch_size, accumulate_every):
        super().__init__()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate_every)
        self.ema = copy.deepcopy(model) if self.accelerator.is_main_process else None
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(dataset, batch_size=batch_size, drop_last=True)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, self.optimizer, loader)
        self.batches = cycle(loader)
        self.epoch = len(loader)

    @torch.no_grad()
    def update_average(self):
        model = self.accelerator.unwrap_model(self.model)
        for average, now in zip(self.ema.parameters(), model.parameters(), strict=True):
            average.lerp_(now, 0.1)

    def forward(self, steps):
        losses, synced = [], []
        for _ in range(steps):
            self.model.train()
            with self.accelerator.accumulate(self.model):
                x, noise = next(self.batches)
                loss = (self.model(x + noise) - x).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            synced.append(self.accelerator.sync_gradients)
            losses.append(loss.item())
            if self.ema is not None and self.accelerator.sync_gradients:
                self.update_average()
            self.accelerator.wait_for_everyone()
        return losses, synced


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    dataset = TensorDataset(torch.randn(48, 4), 0.3 * torch.randn(48, 4))
    trainer = Trainer(model, dataset, batch_size=4, accumulate_every=2)
    losses, synced = trainer(steps=trainer.epoch)
    average = sum(p.sum().item() for p in trainer.ema.parameters()) if trainer.ema is not None else None
    _, after_the_end = trainer(steps=3)
    trainer.accelerator.end_training()
    return {"losses": losses, "synced": synced, "average": average, "after_the_end": after_the_end}


if __name__ == "__main__":
    print(json.dumps(main()))
