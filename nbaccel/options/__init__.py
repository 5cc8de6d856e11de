"""What a person may choose for a run: flags, forms and nbaccel.toml become one value. In kernel and terminal.

Imports `base` and the table of `features`.
"""
