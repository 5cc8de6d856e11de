"""The strategy "fsdp": parameters, gradients and optimizer states of a model are sharded over the ranks. Runs in ranks.

It hooks in as a `Strategy`, by its name in the table of features. Its options (`FullyShardedDataParallelPlugin`) and
the rows in checkpoints stand in the core: a folder that was written in shards can be read without this one. Imports
`train` and `base`.
"""
