"""What meets other libraries in ranks: trainers, trackers, bars, metrics, log-ins. Runs in ranks, inline in the kernel.

Each function hooks in by the name of a library, is called with the rank's `OtherLibraries`, and yields which action is
for which module; see `launching/ipc/import_hooks`. It is loaded before the library is: by the kernel where the notebook
has loaded the library, else by the rank whose program imports it. Nothing here imports a library. Imports `launching`,
`namespace` and `base`.
"""
