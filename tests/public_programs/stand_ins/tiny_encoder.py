"""REPA's image encoder without a download; `utils` is a module of REPA."""

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
