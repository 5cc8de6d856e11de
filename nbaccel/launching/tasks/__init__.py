"""Tasks: what ranks run, and what goes back: a cell, a function, a part of a namespace. Kernel and ranks run it.

Imports `launching/ipc`, `namespace`, `options` and `base`.
"""
