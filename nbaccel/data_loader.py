"""Loaders without an Accelerator, under the names of ``accelerate.data_loader``. Runs in ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from nbaccel.train.accumulation import Accumulation
from nbaccel.train.data import DataLoaderConfiguration, Facts, PreparedLoader, prepare_loader, skip_first_batches
from nbaccel.train.data.dispatch import SliceFunction
from nbaccel.train.state import PartialState
from nbaccel.world import World

__all__ = ["prepare_data_loader", "skip_first_batches"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> PreparedLoader:
    """`dataloader` as rank `process_index` of `num_processes` sees it; see `Accelerator.prepare_data_loader`.

    num_processes, process_index: by default those of this run; the call is then collective. Given, nobody is asked,
    and the ranks' order follows from `data_seed`, or from a torch seed that all of them must have set alike.
    device, put_on_device: where batches go, if they are moved. dispatch_batches: see `DataLoaderConfiguration`.
    rng_types: accepted; the order of samples is always the same on all ranks, and no other generator is touched.

    The batches know nothing of an Accelerator: windows of accumulation do not end with this loader.

    >>> loader = prepare_data_loader(DataLoader(range(8), 2), num_processes=2, process_index=1)
    >>> [batch.tolist() for batch in loader]
    [[2, 3], [6, 7]]
    """
    state = PartialState()
    is_this_run = num_processes is None and process_index is None
    ranks = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    mine = Facts.of(dataloader)
    facts = [mine] * ranks
    if is_this_run and ranks > 1:
        facts = Facts.from_tensor(state.collectives.gather(mine.as_tensor().to(state.device)))
    prepared = prepare_loader(
        dataloader,
        state.world if is_this_run else World(rank, ranks, rank, ranks),
        Accumulation(),
        DataLoaderConfiguration(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches if put_on_device else bool(dispatch_batches),
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
        ),
        facts,
        state.device if device is None else torch.device(device),
        moves=put_on_device,
        slice_function=slice_fn_for_dispatch,
    )
    prepared.is_bound = is_this_run
    return prepared
