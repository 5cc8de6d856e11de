"""Running statistics of normalisation layers, which strategies of features keep alike. Runs in ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["running_statistics"]


def running_statistics(models: Sequence[Module]) -> Iterator[Tensor]:
    """Yield the running statistics of the normalisation layers of `models`."""
    for model in models:
        for module in model.modules():
            if isinstance(module, _NormBase):
                yield from module.buffers(recurse=False)
