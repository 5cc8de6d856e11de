"""Train with the Learner of fast.ai's course and its AccelerateCB."""

import torch
from miniai.accel import AccelerateCB
from miniai.datasets import DataLoaders
from miniai.learner import Learner
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
learner = Learner(
    nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
    DataLoaders(DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)),
    nn.CrossEntropyLoss(),
    lr=0.1,
    cbs=[AccelerateCB(mixed_precision="no")],
    opt_func=optim.SGD,
)
learner.fit(2)
