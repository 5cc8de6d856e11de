"""Facts and values that everything else may use: errors, events, settings, the world, hardware, storage.

Runs in every process. Imports `nbaccel.errors` and the standard library; torch and IPython only inside functions.
"""
