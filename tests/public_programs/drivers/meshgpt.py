"""Train with the MeshAutoencoderTrainer of meshgpt-pytorch."""

import torch
from meshgpt_pytorch import MeshAutoencoder
from meshgpt_pytorch.trainer import MeshAutoencoderTrainer


class Meshes(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        vertices = torch.randn(12, 3, generator=generator).clamp(-1, 1)
        return vertices, torch.randint(0, 12, (8, 3), generator=generator)


autoencoder = MeshAutoencoder(
    num_discrete_coors=16,
    encoder_dims_through_depth=(16, 16),
    decoder_dims_through_depth=(16, 16),
    dim_codebook=16,
    codebook_size=32,
    dim_coor_embed=8,
    dim_area_embed=4,
    dim_normal_embed=4,
    dim_angle_embed=4,
    attn_encoder_depth=0,
    attn_decoder_depth=0,
)
trainer = MeshAutoencoderTrainer(
    autoencoder,
    Meshes(),
    num_train_steps=5,
    batch_size=2,
    grad_accum_every=2,
    val_dataset=Meshes(),
    val_every=2,
    checkpoint_every=3,
    warmup_steps=2,
    data_kwargs=["vertices", "faces"],
)
trainer()
