"""DataLoaderConfiguration: the choices about prepared loaders, under Accelerate's names. Built anywhere."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DataLoaderConfiguration"]


@dataclass
class DataLoaderConfiguration:
    """Rules by which loaders that an Accelerator prepares are dealt to the ranks.

    split_batches: a loader's batch is that of all ranks together and is cut into equal parts; otherwise each rank
        takes whole batches of it. It must divide by the number of ranks.
    dispatch_batches: rank 0 alone reads and sends the others their batches; every batch is then a collective. None:
        True for an `IterableDataset`, whose ranks need not read the same stream, and False for others.
    even_batches: fill the last round up with the epoch's first samples, so that all ranks see equally many batches.
        Otherwise the last ranks may get fewer, or none.
    use_seedable_sampler: the order of epoch e is that of ``torch.randperm`` after ``manual_seed(seed + e)``, in one
        process too: Accelerate's numbers. Otherwise one process has plain PyTorch's order, and several ranks an order
        that follows from (seed, e).
    data_seed: that seed; None: the seed of rank 0's generator when the loader was prepared.
    non_blocking: accepted. Here copies to CUDA never wait for the host; they overlap if the loader pins memory.
    use_stateful_dataloader: accepted. Here every prepared loader has `state_dict`; torchdata is not needed.

    >>> DataLoaderConfiguration(split_batches=True).even_batches
    True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    @classmethod
    def chosen(
        cls, configuration: DataLoaderConfiguration | None, split_batches: bool, even_batches: bool
    ) -> DataLoaderConfiguration:
        """Return `configuration`, or one made of the two choices that an Accelerator also takes by themselves.

        Raises:
                ValueError: both were given.
        """
        if configuration is None:
            return cls(split_batches=split_batches, even_batches=even_batches)
        if split_batches or not even_batches:
            raise ValueError(
                f"split_batches={split_batches}, even_batches={even_batches} and a dataloader_config: choose them in "
                "the DataLoaderConfiguration"
            )
        return configuration
