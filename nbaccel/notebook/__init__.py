"""The notebook's front end: `%%accelerate` and `%accelerate`, their form, modes and results. Runs in the kernel.

May import every folder of the core, and the table of `features`. No other folder needs IPython.
"""
