"""Flags without an effect above the loop that trains: they are named, or refused, before its first step.

It hooks in as `watch_of_flags` of `launching/rank/parts`: a run for which flags were given, ranks that stay and a check
have it. Runs in ranks; the table of effects is read in the kernel, too. Imports `launching`, `options` and `base`.
"""
