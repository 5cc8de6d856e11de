"""Train with the Trainer of denoising_diffusion_pytorch.guided_diffusion."""

from denoising_diffusion_pytorch.guided_diffusion import GaussianDiffusion, Trainer, Unet

diffusion = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2)), image_size=16, timesteps=20, sampling_timesteps=4)
trainer = Trainer(
    diffusion,
    "files/pictures",
    train_batch_size=8,
    gradient_accumulate_every=2,
    train_num_steps=4,
    ema_update_every=2,
    save_and_sample_every=100,
    num_samples=4,
)
trainer.train()
