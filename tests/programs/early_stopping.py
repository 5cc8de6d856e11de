"""Training that ends on all ranks as soon as one of them has seen enough."""

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def should_stop(self, loss):
        if loss < self.best - 1e-3:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(128, 5)
    targets = inputs @ torch.arange(5.0)[:, None] + 0.1 * torch.randn(128, 1)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Only the last rank watches: it alone sees this loss, and the others hear of it.
    callback = EarlyStopping(patience=3)
    epochs = steps = 0
    while epochs < 50:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        epochs += 1
        if accelerator.is_last_process and callback.should_stop(loss.item()):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    stopped = accelerator.gather(torch.tensor([epochs, steps], device=accelerator.device)[None]).tolist()
    weight = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    accelerator.end_training()
    return {"stopped": stopped, "weight": weight}


if __name__ == "__main__":
    print(json.dumps(main()))
