"""Ranks that start from a clean process, where the notebook's own state would break a fork: CUDA, or lost threads.

It hooks in as the process that `ZygoteStart` asks for ranks: with `--start zygote`, or where `preflight` finds that
forks fail. Ranks get the state that a fork would have inherited, and the names that their task reads. Ranks on other
machines start so, too. Runs in the kernel, in that process and in ranks. Imports `launching`, `namespace` and `base`.
"""
