"""Flags above loops that prepare nothing, `-p` and `-a`: a row of the table for cells, one for launched functions.

`accumulated_batches` and `loop_precision` are changes of a loop, as `train/raw_loop/hooks` has them. `loop_changes`
makes those that are asked for; `rank_setup` does so for a launched function, or a script, whose ranks nothing else sets
up. Cells have the setup of `train`, which asks for the changes too. Runs in ranks. Imports `train` and `base`.
"""
