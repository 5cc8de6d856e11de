"""Ranks that stay from one cell to the next: `--keep`, `%accelerate start`, `push`, `pull` and `restart`.

It hooks in as the ranks of a `Session` that stay (`persistent_session`), made when a flag or a command asks for them,
and by what starts these ranks (`persistent_start`). Runs in the kernel. Imports `notebook`, `launching`,
`namespace`, `options`, `output` and `base`.
"""
