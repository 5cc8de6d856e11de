"""A layer over the file systems that takes what the ranks of a check write. Runs in the kernel and in ranks.

Imports `launching` and `base`.
"""
