"""Train with the Trainer1D of denoising-diffusion-pytorch."""

import torch
from denoising_diffusion_pytorch import Dataset1D, GaussianDiffusion1D, Trainer1D, Unet1D

torch.manual_seed(0)
diffusion = GaussianDiffusion1D(
    Unet1D(dim=8, dim_mults=(1, 2), channels=2),
    seq_length=16,
    timesteps=20,
    sampling_timesteps=4,
    auto_normalize=False,
)
trainer = Trainer1D(
    diffusion,
    dataset=Dataset1D(torch.rand(32, 2, 16)),
    train_batch_size=4,
    train_num_steps=6,
    gradient_accumulate_every=2,
    save_and_sample_every=3,
    num_samples=4,
)
trainer.train()
