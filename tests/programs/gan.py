"""A GAN on a ring of points: two models, two optimizers, one loop."""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader


def network(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, outputs))


def ring(samples):
    angles = torch.linspace(0, 6.28, samples)
    return torch.stack([angles.cos(), angles.sin()], 1)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    generator, discriminator = network(4, 2), network(2, 1)
    noise = torch.randn(128, 4)
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.99))
    loader = DataLoader(list(zip(ring(128), noise, strict=True)), batch_size=8)
    generator, discriminator, opt_g, opt_d, loader = accelerator.prepare(generator, discriminator, opt_g, opt_d, loader)
    losses = []
    for _ in range(3):
        for real, z in loader:
            with accelerator.accumulate(generator, discriminator):
                fake = generator(z)
                scores_real, scores_fake = discriminator(real), discriminator(fake.detach())
                loss_d = F.softplus(-scores_real).mean() + F.softplus(scores_fake).mean()
                accelerator.backward(loss_d)
                opt_d.step()
                opt_d.zero_grad()

                discriminator.requires_grad_(False)
                loss_g = F.softplus(-discriminator(fake)).mean()
                accelerator.backward(loss_g)
                discriminator.requires_grad_(True)
                opt_g.step()
                opt_g.zero_grad()
        losses.append(accelerator.gather(torch.stack([loss_d, loss_g]).detach()[None]).mean(0).tolist())
    with torch.no_grad():
        radius = generator(torch.ones(1, 4, device=accelerator.device)).norm().item()
    accelerator.end_training()
    return {"losses": losses, "radius": radius}


if __name__ == "__main__":
    print(json.dumps(main()))
