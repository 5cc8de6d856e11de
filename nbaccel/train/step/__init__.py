"""One training step: accumulation windows, precision, gradient buckets, clipping. Runs in ranks.

Imports `train/distributed` and `base`.
"""
