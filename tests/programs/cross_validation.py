"""Five folds of handwritten digits, one after the other, with one Accelerator and predictions of all ranks."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    digits = load_digits()
    images, labels = digits.data[:501] / 16, digits.target[:501]
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))
    folds = StratifiedKFold(n_splits=5).split(images, labels)
    accuracies, counts = [], []
    for fold, (train_ids, test_ids) in enumerate(folds):
        set_seed(fold)
        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train_loader = DataLoader(Subset(dataset, train_ids.tolist()), batch_size=40 // accelerator.num_processes)
        test_loader = DataLoader(Subset(dataset, test_ids.tolist()), batch_size=16)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for _ in range(2):
            for x, y in train_loader:
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        correct = []
        for x, y in test_loader:
            with torch.no_grad():
                right = model(x).argmax(-1) == y
            correct.append(accelerator.gather_for_metrics(right))
        correct = torch.cat(correct)
        accuracies.append(correct.double().mean().item())
        counts.append(len(correct))
        model, optimizer, train_loader, test_loader = accelerator.free_memory(
            model, optimizer, train_loader, test_loader
        )
    accelerator.end_training()
    return {"accuracies": accuracies, "counts": counts, "mean": sum(accuracies) / len(accuracies)}


if __name__ == "__main__":
    print(json.dumps(main()))
