"""Train with the VQGanVAETrainer of muse-maskgit-pytorch, without a VGG to download."""

import torch
from muse_maskgit_pytorch import VQGanVAE, VQGanVAETrainer

vae = VQGanVAE(
    vgg=torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(3 * 32 * 32, 8)),
    dim=16,
    codebook_size=32,
    layers=2,
    discr_layers=2,
    vq_kwargs={"codebook_dim": 16},
)
trainer = VQGanVAETrainer(
    vae=vae,
    image_size=32,
    folder="files/pictures",
    batch_size=4,
    grad_accum_every=2,
    num_train_steps=5,
    save_results_every=2,
    save_model_every=4,
)
trainer.train()
