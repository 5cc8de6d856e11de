"""`--free-kernel`, `launch(free_kernel=True)`: models of the notebook are on the host while ranks use the GPUs.

It hooks in as what `movable` of `launching/kernel_holdings` asks for: before a cell on GPUs, which says what the flag
would move, and for the flag. Runs in the kernel. Imports `launching`, `namespace` and `base`.
"""
