"""`find_batch_size` and `estimate`: the largest batch that fits, by trials or by counting. Runs in ranks and kernel.

It hooks in as two methods of the Accelerator, as `%accelerate estimate` and `nbaccel estimate-memory`. Imports `train`,
`options`, `output`, `base` and other features.
"""
