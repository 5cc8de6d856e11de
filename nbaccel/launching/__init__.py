"""Starts, watches, interrupts and ends the processes of a run; runs any torch code. Runs in the kernel and in ranks.

Imports `namespace`, `display`, `output`, `options`, `base`, and `features` for its table; never `train`, which ranks
load by a string.
"""
