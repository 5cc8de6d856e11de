"""Data sets of torchvision without a download: 4,000 pictures of ten classes that differ, and 800 to test."""

import numpy as np
import torch
import torchvision
from PIL import Image

TRAINING, TEST = 4000, 800


class MadePictures(torch.utils.data.Dataset):
    shape, is_grey = (28, 28), True
    classes = tuple(f"{number} - class" for number in range(10))

    def __init__(
        self, root="", train=True, transform=None, target_transform=None, download=False, split=None, **options
    ):
        is_training = train if split is None else split == "train"
        generator = np.random.RandomState(0 if is_training else 1)
        numbers = generator.randint(0, 10, TRAINING if is_training else TEST)
        pictures = np.random.RandomState(7).randint(0, 255, (10, *self.shape))
        data = (pictures[numbers] * 0.5 + generator.randint(0, 128, (len(numbers), *self.shape))).astype("uint8")
        self.data = torch.from_numpy(data) if self.is_grey else data
        self.targets = torch.from_numpy(numbers) if self.is_grey else numbers.tolist()
        self.labels = self.train_labels = self.test_labels = self.targets
        self.train_data = self.test_data = self.data  # names of torchvision before 0.3
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.transform, self.target_transform = transform, target_transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        data, target = self.data[index], int(self.targets[index])
        picture = Image.fromarray(data.numpy() if self.is_grey else data)
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return picture, target


class ColourPictures(MadePictures):
    shape, is_grey = (32, 32, 3), False


# Classes of their own, under their names: a copy of `datasets.MNIST` is pickled by its name.
for _name in ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "SVHN"):
    _base = ColourPictures if _name in ("CIFAR10", "SVHN") else MadePictures
    globals()[_name] = type(_name, (_base,), {"__module__": __name__})
    setattr(torchvision.datasets, _name, globals()[_name])
