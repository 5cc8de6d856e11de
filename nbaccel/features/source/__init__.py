"""Marks of sources and fingerprints of values: is it the same function, with the same values? Runs in any process.

Maps and sweeps go on where an earlier one has ended if these are alike. It hooks in nowhere. Imports `base`.
"""
