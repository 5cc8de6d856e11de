"""Is it the same function, with the same values? Marks of sources, and fingerprints of values. Used anywhere.

Maps and sweeps go on where an earlier one has ended if these are alike. It hooks in nowhere.
"""
