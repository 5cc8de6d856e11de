"""Train with the ImageTrainer of autoregressive-diffusion-pytorch."""

import torch
from autoregressive_diffusion_pytorch import ImageAutoregressiveDiffusion, ImageTrainer


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(index))


decoder = {"dim": 32, "depth": 1, "heads": 2, "mlp_depth": 1, "decoder_kwargs": {"rotary_pos_emb": True}}
model = ImageAutoregressiveDiffusion(model=decoder, image_size=16, patch_size=8)
trainer = ImageTrainer(
    model, dataset=Pictures(), num_train_steps=5, batch_size=4, save_results_every=100, checkpoint_every=3
)
trainer()
