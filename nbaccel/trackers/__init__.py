"""Trackers: listeners on rank 0 that store a run's numbers in files or send them to a service.

Each is an entry point of the group `nbaccel_trackers` (pyproject.toml), so that `train` finds them by name and does
not import this folder. Runs in ranks. Imports `base` and, when it is opened, the library that it writes to.
"""
