"""REPA: its image encoder without a download, its smallest transformer smaller still, and sampling in two steps."""

import functools

import models.sit
import samplers
import torch
import utils


class Encoder(torch.nn.Module):
    embed_dim = 16

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, 16, stride=16)

    def forward_features(self, images):
        return self.patches(images.float() / 255).flatten(2).transpose(1, 2)


utils.load_encoders = lambda *_, **__: ([Encoder()], ["tiny"], ["tiny"])
models.sit.SiT_models["SiT-S/2"] = functools.partial(
    models.sit.SiT, depth=2, hidden_size=48, decoder_hidden_size=48, patch_size=2, num_heads=2
)
sample = samplers.euler_sampler
samplers.euler_sampler = lambda *given, **options: sample(*given, **options | {"num_steps": 2})
