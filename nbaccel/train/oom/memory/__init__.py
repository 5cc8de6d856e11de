"""Frees memory, and reports what still holds it. Runs in ranks, in scripts, and in the kernel.

Users call `free_memory`; the recovery from an out-of-memory error calls `release_unused` and `forget_frames`. Nothing
here decides what to do about a full device. Imports `base`.
"""
