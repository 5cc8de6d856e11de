"""The sources of functions: is it the same one, with the same values, and other code for it. Runs in any process.

Maps and sweeps go on where an earlier one has ended if marks and fingerprints are alike; checks and checkpoints of
cells rewrite loops in functions of the notebook. It hooks in nowhere. Imports `base` and `namespace`.
"""
