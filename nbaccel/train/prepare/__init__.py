"""What `prepare` puts around models, optimizers and schedulers. Runs in ranks.

Imports `base`, `train/step`, `train/strategies`, `train/data`, `train/distributed` and the table of `features`.
"""
