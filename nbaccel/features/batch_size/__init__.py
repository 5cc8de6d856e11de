"""`find_batch_size` and `estimate`: the largest batch that fits, by trials or by counting. Runs in ranks and kernel.

It hooks in as two methods of the Accelerator and as `%accelerate estimate`. Imports `train`, `options`, `base` and
other features.
"""
