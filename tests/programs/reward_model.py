"""A reward model, without a loader: every rank cuts its share out of one permutation, and numbers go by broadcast."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast, gather_object, set_seed


class Reward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(6, 8)
        self.head = torch.nn.Linear(8, 1)
        self.gain = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.tensor(0.0), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x))).squeeze(-1) * self.gain + self.bias


@torch.no_grad()
def normalise(accelerator, model, x):
    """Set gain and bias so that rewards have mean 0 and deviation 1 over all ranks."""
    plain = accelerator.unwrap_model(model)
    plain.gain.fill_(1.0)
    plain.bias.fill_(0.0)
    rewards = accelerator.gather(model(x[accelerator.process_index :: accelerator.num_processes]))
    gain = 1 / rewards.std()
    plain.gain.copy_(broadcast(gain, from_process=0))
    plain.bias.copy_(broadcast(-gain * rewards.mean(), from_process=0))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    pairs = torch.randn(64, 2, 6)
    best = pairs.sum(2).argmax(1)
    model = Reward()
    set_seed(3 + accelerator.process_index * 100_003)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    normalise(accelerator, model, pairs[:, 0])
    order = broadcast(torch.randperm(64), from_process=0)
    losses, accuracies = [], []
    for start in range(0, 64, 8):
        mine = order[start : start + 8][accelerator.process_index :: accelerator.num_processes]
        with accelerator.accumulate(model):
            rewards = model(pairs[mine].flatten(0, 1)).view(-1, 2)
            loss = F.cross_entropy(rewards, best[mine])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        accuracies.append(accelerator.reduce((rewards.argmax(1) == best[mine]).float().mean(), "mean").item())
    normalise(accelerator, model, pairs[:, 0])
    with torch.no_grad():
        rewards = accelerator.unwrap_model(model)(pairs[:, 0])
    ranks = gather_object([accelerator.process_index])
    distributed = AcceleratorState().distributed_type.name
    accelerator.end_training()
    moments = [rewards.mean().item(), rewards.std().item()]
    about = {"ranks": ranks, "distributed": distributed, "order": order.tolist()}
    return {"losses": losses, "accuracies": accuracies, "moments": moments, **about}


if __name__ == "__main__":
    print(json.dumps(main()))
