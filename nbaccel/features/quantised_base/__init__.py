"""The base of a quantised model: the same in all ranks, and beside a checkpoint's adapters. Runs in ranks.

It hooks in as what a prepared training knows of its bases. Imports `train` and `base`.
"""
