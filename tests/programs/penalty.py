"""An autoencoder with a discriminator: a gradient penalty every other step, micro-batches by hand under `no_sync`."""

import contextlib
import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

ACCUMULATE = 2


def gradient_penalty(inputs, scores):
    (gradients,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return (gradients.norm(dim=1) - 1).square().mean()


def main():
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    set_seed(8)
    autoencoder = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Tanh(), torch.nn.Linear(3, 6))
    discriminator = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (autoencoder, discriminator)]
    loader = DataLoader([torch.randn(6) for _ in range(48)], batch_size=4)
    autoencoder, discriminator, *optimizers, loader = accelerator.prepare(
        autoencoder, discriminator, *optimizers, loader
    )
    batches = iter(loader)
    penalties, losses = [], []
    for step in range(len(loader) // (2 * ACCUMULATE)):
        for micro in range(ACCUMULATE):
            is_last = micro == ACCUMULATE - 1
            x = next(batches)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(autoencoder):
                made = autoencoder(x)
                loss = F.mse_loss(made, x) - 0.1 * accelerator.unwrap_model(discriminator)(made).mean()
                accelerator.backward(loss / ACCUMULATE)
        accelerator.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(ACCUMULATE):
            is_last = micro == ACCUMULATE - 1
            x = next(batches).requires_grad_()
            with contextlib.nullcontext() if is_last else accelerator.no_sync(discriminator):
                real, fake = discriminator(x), discriminator(autoencoder(x).detach())
                loss_d = F.relu(1 + fake).mean() + F.relu(1 - real).mean()
                if step % 2 == 0:
                    penalty = gradient_penalty(x, real)
                    penalties.append(penalty.item())
                    loss_d = loss_d + penalty
                accelerator.backward(loss_d / ACCUMULATE)
        optimizers[1].step()
        optimizers[1].zero_grad()
        losses.append(accelerator.gather(torch.stack([loss, loss_d]).detach()[None]).mean(0).tolist())
    accelerator.end_training()
    return {"losses": losses, "penalties": penalties}


if __name__ == "__main__":
    print(json.dumps(main()))
