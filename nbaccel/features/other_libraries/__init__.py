"""What meets other libraries in ranks: trainers, trackers, bars, metrics, log-ins. Runs in ranks, inline in the kernel.

Each function hooks in by the name of a library, is called with the `LibraryRank`, and yields what returns the changes
of which module; see `launching/ipc/import_hooks`. They are made by the kernel where the notebook has loaded the
library, and put in place in each rank; else by the rank whose program imports it. Nothing here imports a library.
Inline runs have actions instead, which act at once. Imports `launching`, `namespace` and `base`.
"""
