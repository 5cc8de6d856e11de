"""Loaders: deal batches to ranks, and report the loader's position to training loops. Runs in ranks.

`prepare_loader` chooses a source (`sources`, `dispatch`), which deals by a shard (`shard`) in an order that all ranks
share (`order`); the loop iterates a `loader`, `position` is the progress of an epoch, `placement` moves batches to the
device. Imports `base`, `train/distributed` and `train/step`.
"""

from __future__ import annotations

from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.data.order import SharedOrder, data_seed
from nbaccel.train.data.placement import to_device
from nbaccel.train.data.prepare_loader import (
    DataLoaderConfiguration,
    DataLoaderDispatcher,
    DataLoaderShard,
    LoaderFacts,
    prepare_loader,
    skip_first_batches,
)
from nbaccel.train.data.shard import BatchShard, Shard, StreamShard

__all__ = [
    "BatchShard",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "LoaderFacts",
    "PreparedLoader",
    "Shard",
    "SharedOrder",
    "StreamShard",
    "data_seed",
    "prepare_loader",
    "skip_first_batches",
    "to_device",
]
