"""Completion by Tab, on the line of a magic and after `accelerator.` in a cell of ranks.

It hooks in as what the `Completer` of `notebook/completion`, which IPython asks, passes its questions on to: loaded at
the first Tab. Runs in the kernel. Imports `notebook` and `options`.
"""
