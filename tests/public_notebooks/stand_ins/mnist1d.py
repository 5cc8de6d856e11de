"""The package of that name, which is installed from its repository: 4,000 lines of 40 numbers in ten classes."""

import sys
from types import SimpleNamespace

import numpy as np

data = sys.modules[__name__]


def get_dataset_args():
    return SimpleNamespace(num_samples=5000, train_split=0.8)


def get_dataset(args, path=None, **options):
    generator = np.random.RandomState(3)
    patterns = generator.randn(10, 40)
    numbers = generator.randint(0, 10, args.num_samples)
    lines = patterns[numbers] + generator.randn(args.num_samples, 40)
    last = int(args.num_samples * args.train_split)
    return {"x": lines[:last], "y": numbers[:last], "x_test": lines[last:], "y_test": numbers[last:]}
