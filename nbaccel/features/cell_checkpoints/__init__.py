"""`--checkpoint-every` and `--resume` above any cell: its training is saved, and a later run goes on within it.

It hooks in by the task of such a cell (`saving_task`). A loop that prepares by itself is saved by its Accelerator, and
nothing here acts. Runs in the kernel and in ranks. May import every folder of the core.
"""
