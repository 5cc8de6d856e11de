"""`LocalSGD`: ranks train apart, and average their parameters every few steps. Runs in ranks.

It hooks in as that name. Imports `train` and `base`.
"""
