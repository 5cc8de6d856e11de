"""Checkpoints that Accelerate has written: `load_state` and `resume` continue from them. Runs in ranks; writes nothing.

It hooks in by two names in the table of features, which the core asks where a folder looks like one of Accelerate's.
Imports `train` and `base`.
"""
