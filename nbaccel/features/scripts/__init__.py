"""`nbaccel launch`: a script on every device of one or several machines, as torchrun does; and `nbaccel demo`.

They hook in as these commands of the terminal. `script_command` reads the flags, with those of `accelerate launch`
(`accelerate_flags`, `accelerate_config`); `elastic` starts the ranks by torch elastic, and each of them runs `script`.
Runs in a terminal and in ranks. Imports `launching`, `options`, `output` and `base`.
"""
