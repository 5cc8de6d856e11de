"""The strategy "fsdp": parameters, gradients and optimizer states of a model are sharded over the ranks. Runs in ranks.

It hooks in as a `Strategy`, by its name in the table of features, and as the public name of its options
(`FullyShardedDataParallelPlugin`). The rows in checkpoints stand in the core: what was written in shards can be read
without this folder. Imports `train` and `base`.
"""
