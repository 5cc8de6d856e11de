"""`Accelerator.forward_backward`: one batch in several forward passes, which survives running out of memory.

It hooks in as that method. `StepEngine` runs a step; the other modules are its parts: what is repeated, and the sizes
that have fitted so far. How batches are cut is in `nbaccel.train.oom.microbatch`, since a restart cuts them, too. Runs
in ranks. Imports `train` and `base`.
"""
