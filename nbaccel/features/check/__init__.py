"""Run a cell from its first to its last line with a few batches of each loop, and forecast the whole run from it.

Ranks rewrite loops, cut loaders, and record what they see, one line of JSON each; the kernel reads the records, and
computes from them the time, the memory and the disk of the whole run. See `%%accelerate --check`.
"""
