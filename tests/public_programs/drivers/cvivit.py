"""Train with the CViViTTrainer of phenaki-pytorch: a discriminator and a perceptual loss, without a VGG to download."""

import torch
from phenaki_pytorch import CViViT, CViViTTrainer

vae = CViViT(
    dim=16,
    codebook_size=32,
    image_size=16,
    patch_size=8,
    temporal_patch_size=2,
    spatial_depth=1,
    temporal_depth=1,
    dim_head=8,
    heads=2,
    use_vgg_and_gan=True,
    vgg=torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(3 * 16 * 16, 8)),
)
trainer = CViViTTrainer(
    vae,
    folder="files/pictures",
    batch_size=4,
    grad_accum_every=2,
    train_on_images=True,
    use_ema=False,
    num_train_steps=4,
    save_results_every=2,
    save_model_every=3,
)
trainer.train()
