"""Runs that go on while other cells run: `--bg`, `%accelerate wait` and `attach`; a map uses it too.

It hooks in as the background of a `Session`, made when a flag or a command asks for it, and as the way of a cell with
`--bg` (`left_cell`). Runs in the kernel. Imports `notebook`, `launching`, `display`, `output` and `base`.
"""
