"""Local SGD: every rank trains by itself and parameters are averaged every few steps."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    torch.manual_seed(0)
    inputs = torch.randn(160, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(2):
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    weights = accelerator.unwrap_model(model).weight.detach().flatten()
    spread = accelerator.gather(weights[None])
    accelerator.end_training()
    return {"weights": weights.tolist(), "ranks_agree": bool((spread == spread[0]).all())}


if __name__ == "__main__":
    print(json.dumps(main()))
