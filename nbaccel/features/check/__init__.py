"""`%%accelerate --check`: run a cell from its first to its last line with a few batches of each loop.

It hooks in as a mode of a cell (`cell_mode`), by its own tasks for ranks (`dry_run_task`), and by a part of ranks that
leaves files as they are (`protected_files`). Runs in the kernel and in ranks. May import every folder of the core.
"""
