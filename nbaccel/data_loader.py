"""Loaders without an Accelerator, under the names of ``accelerate.data_loader``. It defines nothing. Runs in ranks."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.data import DataLoaderDispatcher, DataLoaderShard, skip_first_batches

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.standalone_loaders import (
        BatchSamplerShard,
        IterableDatasetShard,
        SeedableRandomSampler,
        SkipBatchSampler,
        SkipDataLoader,
        get_sampler,
        prepare_data_loader,
    )
