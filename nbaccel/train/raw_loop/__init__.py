"""One training in all ranks from a loop that prepares nothing. Runs in ranks.

`loop` combines the parts in the other modules. Imports `base`, `train/step`, `train/oom` and `train/distributed`.
"""
