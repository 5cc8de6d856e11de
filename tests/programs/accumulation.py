"""Gradient accumulation over a loader whose last window is short, a scheduler, and bf16."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def train(batches, precision="no"):
    """Trains on `batches` batches per rank in windows of four."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision=precision)
    torch.manual_seed(0)
    samples = 4 * batches * accelerator.num_processes
    inputs = torch.randn(samples, 3)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    synced, norms, dtypes = [], [], set()
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                logits = model(x)
                dtypes.add(str(logits.dtype))
                accelerator.backward(F.cross_entropy(logits, y))
                synced.append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 10.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    rate = scheduler.get_last_lr()[0]
    accelerator.free_memory()
    return {"synced": synced, "norms": norms, "weight": weight, "rate": rate, "dtypes": sorted(dtypes)}


def main():
    return {"whole": train(batches=8), "short": train(batches=6)}


if __name__ == "__main__":
    print(json.dumps(main()))
