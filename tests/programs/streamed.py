"""Pieces of constant length from a stream of texts, which has no length: steps are counted, and tokens weigh losses."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset

LETTERS, LENGTH, STEPS, ACCUMULATE = 16, 8, 5, 2


class Pieces(IterableDataset):
    """Texts of any length, joined and cut."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        kept = torch.empty(0, dtype=torch.long)
        for index in range(200):
            kept = torch.cat([kept, torch.randint(0, LETTERS, (3 + index % 11,), generator=generator)])
            while len(kept) >= LENGTH:
                piece, kept = kept[:LENGTH], kept[LENGTH:]
                yield {"tokens": piece, "is_counted": torch.rand(LENGTH, generator=generator) < 0.8}


def main():
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dataloader_config=config)
    set_seed(11)
    model = torch.nn.Sequential(torch.nn.Embedding(LETTERS, 8), torch.nn.Linear(8, LETTERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Pieces(), batch_size=4))
    batches = iter(loader)
    losses, counts = [], []
    for _ in range(STEPS):
        window = [next(batches) for _ in range(ACCUMULATE)]
        counted = sum(batch["is_counted"][:, 1:].sum() for batch in window)
        counts.append(accelerator.gather(counted.reshape(1)).sum().item())
        whole = 0.0
        for batch in window:
            with accelerator.accumulate(model):
                logits, targets = model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
                targets = targets.masked_fill(~batch["is_counted"][:, 1:], -100)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / counts[-1]
                # The mean over ranks and over the window is undone: the sum is what is divided by all tokens.
                accelerator.backward(loss * accelerator.num_processes * ACCUMULATE)
                optimizer.step()
                optimizer.zero_grad()
            whole += accelerator.gather(loss.detach().reshape(1)).sum().item()
        losses.append(whole)
    del batches
    accelerator.end_training()
    return {"losses": losses, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(main()))
