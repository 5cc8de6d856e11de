"""Flags without an effect above the loop that trains: they are named, or refused, before its first step.

It hooks in as `watch_of_flags` of `launching/ipc/rank_part`: a run for which flags were given has it, and so have ranks
that stay. Runs in ranks; the table of effects is read in the kernel, too. Imports `launching`, `options` and `base`.
"""
