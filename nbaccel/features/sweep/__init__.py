"""`--sweep` and `nbaccel.sweep`: one run for each combination of values, several side by side. Runs in the kernel.

It hooks in as a mode of a cell (`cell_mode`), as a public name, and by a part of ranks that lists what they write. May
import every folder of the core, and `features/source`.
"""
