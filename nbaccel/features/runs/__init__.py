"""`nbaccel.runs`, `%accelerate runs` and `--keep-runs`: the runs of a notebook, listed, compared and kept in a file.

It hooks in as these names: each gets the core's `EndedRuns`, in which every run of the process is, and `--keep-runs`
sets the file that `EndedRuns` passes them to. Runs in the kernel. Imports `launching`, `display` and `base`.
"""
