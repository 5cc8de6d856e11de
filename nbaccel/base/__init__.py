"""Facts and values that everything else may use: errors, events, settings, the world, hardware, storage.

Its modules see each other and nothing else of the package; they import neither torch nor IPython when they are loaded.
Used anywhere.
"""
