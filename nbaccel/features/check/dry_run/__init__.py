"""What the ranks of a check do: rewrite loops, cut loaders, and record what they see. Runs in ranks.

The kernel reads their records, one line of JSON each, and computes from them the time, the memory and the disk of the
whole run, see `nbaccel.features.check.forecasts`. Imports `train`, `launching`, `base` and `features/source`.
"""
