"""`--sweep` and `nbaccel.sweep`: one run for each combination of values, side by side on slots. Runs in the kernel.

It hooks in as a mode of a cell (`cell_mode`), as a public name, and by a part of ranks that lists what they write.
"""
