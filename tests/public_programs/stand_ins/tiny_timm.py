"""`timm.create_model` without a download: a small network with the names that programs touch."""

import timm
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 7, stride=16), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.fc = nn.Linear(16, num_classes)
        self.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

    def get_classifier(self):
        return self.fc

    def forward(self, images: torch.Tensor):
        return self.fc(self.body(images))


timm.create_model = lambda *_, num_classes=10, **__: Tiny(num_classes)
