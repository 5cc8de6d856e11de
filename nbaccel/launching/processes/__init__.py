"""The kernel's side of a run: starts the processes, supervises them, and ends them. Runs in the kernel.

Imports the rest of `launching`, `namespace`, `display`, `output` and `base`.
"""
