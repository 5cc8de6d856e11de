"""What measures the memory of a step, for the searches for a size that fits. Runs in ranks and scripts.

It hooks in by these features, `batch_size` and `retry`, which import it. Imports `train` and `base`.
"""
