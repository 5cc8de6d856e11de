"""`%%accelerate --speed`: short trials of a cell with one change each, and the lines that make it faster.

It hooks in as a mode of a cell (`cell_mode`), and uses the dry run of `nbaccel.features.check`. Runs in the kernel and
in ranks. May import every folder of the core.
"""
