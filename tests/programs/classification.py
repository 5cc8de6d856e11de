"""Handwritten digits: a training loop with a scheduler, clipping, evaluation on all ranks, and metrics."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1000], labels[:1000])
    test = TensorDataset(images[1000:1333], labels[1000:1333])  # does not divide by the batches of the ranks
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=50)


def evaluate(accelerator, model, loader):
    model.eval()
    predictions, references = [], []
    for images, labels in loader:
        with torch.no_grad():
            logits = model(images)
        predicted, labels = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        predictions.append(predicted)
        references.append(labels)
    predictions, references = torch.cat(predictions), torch.cat(references)
    return (predictions == references).float().mean().item(), len(references)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=120)
    train_loader, test_loader = get_dataloaders(batch_size=32 // accelerator.num_processes)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    history = []
    for _ in range(3):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        accuracy, samples = evaluate(accelerator, model, test_loader)
        mean = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        history.append({"loss": mean, "accuracy": accuracy, "samples": samples})
    lr = scheduler.get_last_lr()[0]
    accelerator.end_training()
    return {"history": history, "lr": lr}


if __name__ == "__main__":
    print(json.dumps(main()))
