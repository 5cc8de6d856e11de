"""What `prepare` puts around models, optimizers and schedulers. Runs in ranks.

Imports `base`, `train/step`, `train/strategies`, `train/data` and `train/distributed`.
"""
