"""The benchmark on a CUDA device: ``make bench-gpu``. Rows of steps and of transfers, and a report about memory.

Every cell also runs on the host, small, with ``--device cpu``: that proves its code and its guard, and its numbers
say nothing about a GPU. Parties are forked before anything has touched CUDA, and each makes a context of its own.
"""
