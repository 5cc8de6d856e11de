"""Flags above the loops of a launched function, or of a script, whose ranks nothing else sets up. Runs in ranks.

`rank_setup` makes what changes these loops. Cells have the setup of `train`, which does it too.
Imports `train` and `base`.
"""
