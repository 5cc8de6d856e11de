"""FSDP2: parameters, gradients and optimizer states of a model are sharded over the ranks of a run."""
